"""Requests for structured output are compiled before they start, or refused with the field that is wrong."""

import asyncio
import sys
import threading
from typing import Any

import pytest
from tests.byte_tokenizer import byte_tokenizer

from outrider.coordinator.api.access import Access
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.validation import RequestValidator
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import InvalidRequest, Overloaded
from outrider.v1 import common_pb2, generation_pb2

END = 256
MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=257, max_model_len=64, eos_token_ids=[END])


VALIDATOR = RequestValidator(MODEL, TextTokenizer(byte_tokenizer("<end>")), RequestLimits(allow_synthetic=True))


def request_with(structured: dict[str, Any], **sampling: Any) -> generation_pb2.GenerateRequest:
    asked = common_pb2.StructuredOutputs(**structured)
    params = generation_pb2.SamplingParams(structured_outputs=asked, **sampling)
    return generation_pb2.GenerateRequest(text="hello", sampling_params=params)


def violations(request: generation_pb2.GenerateRequest, validator: RequestValidator = VALIDATOR) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        validator.check(request)
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.fixture
def library() -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")


@pytest.mark.usefixtures("library")
def test_the_grammar_goes_to_the_workers() -> None:
    generation, _ = VALIDATOR.check(request_with({"regex": "a+"}))
    assert "a+" in generation.sampling.grammar
    assert generation.sampling.grammar_end_ids == (END,)
    assert generation.sampling.reads_logits
    plain, _ = VALIDATOR.check(generation_pb2.GenerateRequest(text="hello"))
    assert not plain.sampling.grammar
    assert not plain.sampling.reads_logits


@pytest.mark.usefixtures("library")
def test_what_is_wrong_is_named() -> None:
    field = "sampling_params.structured_outputs"
    assert violations(request_with({})) == {field: "empty: give one of json, regex, choice, grammar and json_object"}
    assert violations(request_with({"json": '{"type": "foo"}'})) == {
        f"{field}.json": "cannot be compiled: Invalid type: foo"
    }
    assert f"{field}.regex" in violations(request_with({"regex": "a("}))
    assert f"{field}.choice.values[0]" in violations(request_with({"choice": common_pb2.ChoiceList(values=[""])}))


def test_what_cannot_be_had_beside_a_grammar() -> None:
    request = request_with({"regex": "a+"}, ignore_eos=True, min_new_tokens=3, allowed_token_ids=[5])
    request.speculation.verification = common_pb2.VERIFICATION_RULE_SYNTHETIC
    request.speculation.synthetic_rates.append(0.5)
    assert violations(request).keys() == {
        "sampling_params.ignore_eos",
        "sampling_params.min_new_tokens",
        "sampling_params.allowed_token_ids",
        "speculation.verification",
    }


def test_a_model_that_cannot() -> None:
    request, field = request_with({"regex": "a+"}), "sampling_params.structured_outputs"
    request.token_ids.ids.append(1)
    without_tokenizer = RequestValidator(MODEL, None, RequestLimits())
    assert "no tokenizer" in violations(request, without_tokenizer)[field]
    endless = RequestValidator(
        common_pb2.ModelInfo(vocab_size=257, max_model_len=64), TextTokenizer(byte_tokenizer("<end>"))
    )
    assert "no end-of-sequence token" in violations(request, endless)[field]


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert (
        "pip install 'outrider[structured]'"
        in violations(request_with({"regex": "a+"}))["sampling_params.structured_outputs"]
    )


async def test_compiling_holds_nobody_up_and_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def check_room(self, choices: int = 1, *, entry: str = "") -> None: ...

        def submit(self, *_arguments: Any) -> Any:
            raise Overloaded("as far as this test goes", retry_after_s=1.0)

    scheduler: Any = Full()
    generations = Generations(
        scheduler, model=MODEL, tokenizer=TextTokenizer(byte_tokenizer("<end>")), limits=RequestLimits()
    )
    compiled, begun = threading.Event(), threading.Event()
    real = RequestValidator.check

    def slow(self: RequestValidator, request: generation_pb2.GenerateRequest, **known: Any) -> Any:
        if request.sampling_params.HasField("structured_outputs"):
            begun.set()
            assert compiled.wait(60)
        return real(self, generation_pb2.GenerateRequest(text="hello"), **known)

    monkeypatch.setattr(RequestValidator, "check", slow)
    caller = Access().caller_with(None)

    async def ask(request: generation_pb2.GenerateRequest) -> str:
        try:
            async for _ in generations.stream(request, caller):
                pass
        except Overloaded as error:
            return str(error)
        return ""

    # However many ask for the same, it is compiled once.
    waiting = [asyncio.create_task(ask(request_with({"regex": f"a{{{1 + i % 32}}}"}))) for i in range(128)]
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        assert await ask(generation_pb2.GenerateRequest(text="hello")) == "as far as this test goes"
        assert await ask(request_with({"regex": "b+"})) == "32 structured_outputs wait to be compiled"
    finally:
        compiled.set()
    assert set(await asyncio.gather(*waiting)) == {"as far as this test goes"}
