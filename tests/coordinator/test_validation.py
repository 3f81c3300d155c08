"""Requests are taken with every default filled in, or refused with every wrong field named."""

import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tests.byte_tokenizer import byte_tokenizer

from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.validation import RequestValidator, max_request_bytes
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.errors import InvalidRequest
from outrider.rpc import MAX_MESSAGE_BYTES, status_of
from outrider.sampling import SpeculationMode, VerificationRule
from outrider.v1 import common_pb2, generation_pb2

EOS = 255
MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=64, eos_token_ids=[EOS])


TOKENIZER = TextTokenizer(byte_tokenizer())
VALIDATOR = RequestValidator(MODEL, TOKENIZER, RequestLimits(default_max_new_tokens=32, max_nodes=24, max_depth=8))


def request_with(**fields: object) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(text="hello")
    if "token_ids" in fields:
        request.token_ids.ids.extend(fields.pop("token_ids"))  # type: ignore[arg-type]
    for name, value in fields.items():
        if name in generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            request.sampling_params.MergeFrom(generation_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]
        else:
            request.MergeFrom(generation_pb2.GenerateRequest(**{name: value}))  # type: ignore[arg-type]
    return request


def violations(request: generation_pb2.GenerateRequest, validator: RequestValidator = VALIDATOR) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        validator.check(request)
    return {violation.field: violation.description for violation in caught.value.violations}


def test_defaults() -> None:
    generation, streams = VALIDATOR.check(generation_pb2.GenerateRequest(text="hello"))
    sampling = generation.sampling
    assert list(generation.prompt_token_ids) == TOKENIZER.encode("hello")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.logprobs) == (32, 0, None)
    assert sampling.stop_token_ids == (EOS,)
    assert (generation.mode, generation.max_nodes, generation.max_depth) == (SpeculationMode.ASYNC, 24, 8)
    assert (generation.n, len(streams), generation.trace, dict(generation.received)) == (1, 1, False, {})
    assert sampling.verification is VerificationRule.COUPLED
    assert (sampling.threshold_single, sampling.threshold_acc) == (1.0, 1.0)


def test_trees_of_sync_mode_are_smaller_unless_the_request_says() -> None:
    def bounds(limits: RequestLimits, **asked: Any) -> tuple[int, int]:
        params = generation_pb2.SpeculationParams(mode=common_pb2.SPECULATION_MODE_SYNC, **asked)
        request = generation_pb2.GenerateRequest(text="hello", speculation=params)
        generation, _ = RequestValidator(MODEL, TOKENIZER, limits).check(request)
        return generation.max_nodes, generation.max_depth

    limits = RequestLimits(max_nodes=40, max_depth=20)
    assert bounds(limits) == (24, 8)
    assert bounds(limits, max_nodes=40, max_depth=20) == (40, 20)
    assert bounds(replace(limits, max_nodes=10, max_depth=5)) == (10, 5)


def test_sources_of_growth() -> None:
    def asked(*numbers: int) -> generation_pb2.GenerateRequest:
        return request_with(speculation={"sources": numbers})

    assert VALIDATOR.check(asked())[0].sources == ALL_SOURCES
    assert VALIDATOR.check(asked(3, 2))[0].sources == {GrowthSource.NGRAM, GrowthSource.EAGLE}
    assert violations(asked(1, 0, 9)) == {
        f"speculation.sources[{place}]": f"{number} given, 1 (model) or 2 (ngram) or 3 (eagle) needed"
        for place, number in ((1, 0), (2, 9))
    }
    assert violations(asked(2, 2)) == {"speculation.sources[1]": "ngram given twice: name it once"}
    assert violations(asked(*[1] * 1000)) == {"speculation.sources": "1000 given, at most 3 needed: each source once"}


def test_every_parameter_arrives() -> None:
    request = request_with(
        token_ids=[1, 2], temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=-1.0, frequency_penalty=2.0, logit_bias={3: -100.0, 4: 100.0}, allowed_token_ids=[9, 8, 9],
        seed=2**64 - 1, max_new_tokens=62, min_new_tokens=5, stop=["x", "y"], stop_token_ids=[9, EOS],
        ignore_eos=True, n=3, logprobs=0, speculation={"mode": 2, "max_nodes": 3, "max_depth": 2},
        request_id="a-b_c.d:9", trace=True,
    )  # fmt: skip
    generation, streams = VALIDATOR.check(request)
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 7, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 2.0)
    assert dict(sampling.logit_bias) == {3: -100.0, 4: 100.0}
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((9, 8), (9, EOS))
    assert (sampling.seed, sampling.max_new_tokens, sampling.min_new_tokens) == (2**64 - 1, 62, 5)
    assert (sampling.logprobs, generation.stop, generation.n, len(streams)) == (0, ("x", "y"), 3, 3)
    assert (generation.mode, generation.max_nodes, generation.max_depth) == (SpeculationMode.SYNC, 3, 2)
    assert (generation.request_id, generation.trace) == ("a-b_c.d:9", True)
    assert len({id(stream) for stream in streams}) == 3


def test_an_output_that_is_known_is_as_long_as_it_is_and_no_draft_has_a_part_in_it() -> None:
    generation, _ = VALIDATOR.check(request_with(forced_token_ids=[EOS, 9, EOS], logprobs=1))
    sampling = generation.sampling
    assert (sampling.forced_token_ids, sampling.max_new_tokens, sampling.stop_token_ids) == ((EOS, 9, EOS), 3, ())
    assert (generation.mode, generation.max_nodes, generation.max_depth) == (SpeculationMode.OFF, 0, 0)


BENCHMARKED = RequestValidator(MODEL, TOKENIZER, RequestLimits(allow_synthetic=True))


def test_the_synthetic_rule_is_taken_where_the_server_allows_it() -> None:
    asked = request_with(speculation={"verification": 4, "synthetic_rates": [0.5, 0.25]})
    sampling = BENCHMARKED.check(asked)[0].sampling
    assert (sampling.verification, sampling.synthetic_rates) == (VerificationRule.SYNTHETIC, (0.5, 0.25))
    assert sampling.is_synthetic
    refused = violations(asked)
    assert list(refused) == ["speculation.verification"]
    assert "--allow-synthetic" in refused["speculation.verification"]


@pytest.mark.parametrize(
    ("speculation", "field", "words"),
    [
        ({"verification": 4}, "speculation.synthetic_rates", "0 given, 1 to 64"),
        ({"verification": 4, "synthetic_rates": [0.5] * 65}, "speculation.synthetic_rates", "65 given"),
        ({"verification": 4, "synthetic_rates": [1, 1.5]}, "speculation.synthetic_rates[1]", "1.5 given"),
        ({"verification": 4, "synthetic_rates": [math.nan]}, "speculation.synthetic_rates[0]", "nan given"),
        ({"verification": 2, "synthetic_rates": [0.5]}, "speculation.synthetic_rates", "not target_only"),
    ],
)
def test_synthetic_rates_that_mean_nothing(speculation: dict[str, object], field: str, words: str) -> None:
    found = violations(request_with(speculation=speculation), BENCHMARKED)
    assert list(found) == [field]
    assert words in found[field]


@pytest.mark.parametrize("number", [2, 3])
def test_the_rule_arrives_and_is_in_force_above_temperature_0(number: int) -> None:
    greedy = VALIDATOR.check(request_with(speculation={"verification": number}))[0].sampling
    warm = VALIDATOR.check(request_with(temperature=0.5, speculation={"verification": number}))[0].sampling
    assert warm.verification is greedy.verification is warm.rule is list(VerificationRule)[number - 1]
    assert greedy.rule is VerificationRule.COUPLED


def test_thresholds_of_target_only_arrive() -> None:
    given = {"verification": 2, "threshold_single": 0.25, "threshold_acc": 0.5}
    sampling = VALIDATOR.check(request_with(speculation=given))[0].sampling
    assert (sampling.threshold_single, sampling.threshold_acc) == (0.25, 0.5)


def test_both_thresholds_and_a_wrong_rule_are_named_together() -> None:
    found = violations(request_with(speculation={"verification": 7, "threshold_single": 2.0, "threshold_acc": 0.5}))
    assert set(found) == {f"speculation.{name}" for name in ("verification", "threshold_single", "threshold_acc")}


def test_end_of_sequence_stops_unless_ignored() -> None:
    assert VALIDATOR.check(request_with(stop_token_ids=[1]))[0].sampling.stop_token_ids == (1, EOS)
    assert VALIDATOR.check(request_with(ignore_eos=True))[0].sampling.stop_token_ids == ()


def test_drawn_seeds_differ_and_a_known_one_is_kept() -> None:
    seeds = {VALIDATOR.check(request_with())[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5
    assert VALIDATOR.check(request_with(), known_seed=77)[0].sampling.seed == 77
    assert VALIDATOR.check(request_with(seed=0), known_seed=77)[0].sampling.seed == 0


def test_default_output_limit_is_cut_to_the_room_but_a_given_one_is_not() -> None:
    assert VALIDATOR.check(request_with(token_ids=[1] * 60))[0].sampling.max_new_tokens == 4
    assert VALIDATOR.check(request_with(token_ids=[1] * 63))[0].sampling.max_new_tokens == 1
    message = violations(request_with(token_ids=[1] * 60, max_new_tokens=5))["sampling_params.max_new_tokens"]
    assert all(number in message for number in ("60", "5", "65", "64", "at most 4"))
    assert VALIDATOR.check(request_with(token_ids=[1] * 60, max_new_tokens=4))[0].sampling.max_new_tokens == 4


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"text": ""}, "text", "empty"),
        ({"text": "x" * 64}, "text", "64 tokens"),
        ({"text": "x" * 1000}, "text", "shorten"),
        ({"token_ids": []}, "token_ids.ids", "empty"),
        ({"token_ids": [1] * 64}, "token_ids.ids", "at most 63"),
        ({"token_ids": [1, 256]}, "token_ids.ids[1]", "token id 256 is outside the vocabulary: give 0 to 255"),
        ({"token_ids": [2**32 - 1]}, "token_ids.ids[0]", "4294967295"),
        ({"temperature": math.nan}, "sampling_params.temperature", "nan given"),
        ({"temperature": math.inf}, "sampling_params.temperature", "inf given"),
        ({"temperature": -0.5}, "sampling_params.temperature", "-0.5 given"),
        ({"top_p": 1.5}, "sampling_params.top_p", "1.5 given, more than 0 and at most 1"),
        ({"top_p": 0.0}, "sampling_params.top_p", "0 given"),
        ({"top_p": math.nan}, "sampling_params.top_p", "nan"),
        ({"top_k": -2}, "sampling_params.top_k", "-2 given"),
        ({"min_p": 1.01}, "sampling_params.min_p", "1.01"),
        ({"min_p": -0.1}, "sampling_params.min_p", "-0.1"),
        ({"repetition_penalty": 0.0}, "sampling_params.repetition_penalty", "more than 0"),
        ({"repetition_penalty": 2.5}, "sampling_params.repetition_penalty", "2.5"),
        ({"presence_penalty": 2.1}, "sampling_params.presence_penalty", "-2 to 2"),
        ({"frequency_penalty": -math.inf}, "sampling_params.frequency_penalty", "-inf"),
        ({"logit_bias": {256: 1.0}}, "sampling_params.logit_bias[256]", "0 to 255"),
        ({"logit_bias": {1: math.nan}}, "sampling_params.logit_bias[1]", "finite"),
        ({"logit_bias": {1: -101.0}}, "sampling_params.logit_bias[1]", "-101"),
        ({"allowed_token_ids": [3, 300]}, "sampling_params.allowed_token_ids[1]", "300"),
        ({"stop_token_ids": [256]}, "sampling_params.stop_token_ids[0]", "256"),
        ({"forced_token_ids": [256]}, "sampling_params.forced_token_ids[0]", "256"),
        ({"forced_token_ids": [3] * 60}, "sampling_params.max_new_tokens", "at most 59"),
        ({"forced_token_ids": [3], "max_new_tokens": 2}, "sampling_params.forced_token_ids", "as many as max_new"),
        ({"forced_token_ids": [3], "temperature": 1.0}, "sampling_params.forced_token_ids", "nothing beside them"),
        ({"forced_token_ids": [3], "stop": ["x"]}, "sampling_params.forced_token_ids", "nothing beside them"),
        ({"forced_token_ids": [3], "stop_token_ids": [4]}, "sampling_params.forced_token_ids", "nothing beside them"),
        ({"stop": ["ok", ""]}, "sampling_params.stop[1]", "empty"),
        ({"stop": ["é" * 129]}, "sampling_params.stop[0]", "258 bytes"),
        ({"stop": ["x"] * 17}, "sampling_params.stop", "17 strings"),
        ({"n": 0}, "sampling_params.n", "1 to 16"),
        ({"n": 17}, "sampling_params.n", "17 given"),
        ({"logprobs": 21}, "sampling_params.logprobs", "0 to 20"),
        ({"max_new_tokens": 0}, "sampling_params.max_new_tokens", "1 or more"),
        ({"max_new_tokens": 2**32 - 1}, "sampling_params.max_new_tokens", "at most 59"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "sampling_params.min_new_tokens", "more than max_new_tokens (4)"),
        ({"allowed_token_ids": [EOS], "min_new_tokens": 1}, "sampling_params.allowed_token_ids", "only stop tokens"),
        ({"speculation": {"mode": 9}}, "speculation.mode", "9 given"),
        ({"speculation": {"max_nodes": 25}}, "speculation.max_nodes", "1 to 24"),
        ({"speculation": {"max_nodes": 0}}, "speculation.max_nodes", "0 given"),
        ({"speculation": {"max_depth": 9}}, "speculation.max_depth", "1 to 8"),
        ({"speculation": {"verification": 9}}, "speculation.verification", "9 given, 1 (coupled)"),
        ({"speculation": {"threshold_single": 0.5}}, "speculation.threshold_single", "target_only"),
        ({"speculation": {"verification": 3, "threshold_acc": 1.0}}, "speculation.threshold_acc", "not rejection"),
        ({"speculation": {"verification": 2, "threshold_single": 0.0}}, "speculation.threshold_single", "0 given"),
        ({"speculation": {"verification": 2, "threshold_acc": 1.5}}, "speculation.threshold_acc", "1.5 given"),
        ({"speculation": {"verification": 2, "threshold_acc": math.nan}}, "speculation.threshold_acc", "nan given"),
        ({"request_id": "x" * 129}, "request_id", "129 characters"),
        ({"request_id": "two words"}, "request_id", "letters"),
        ({"request_id": "zeile\n"}, "request_id", "letters"),
        ({"received": [{"index": 1, "token_ids": [1]}]}, "received[0].index", "1 choices"),
        ({"received": [{"index": 0}, {"index": 0}]}, "received[1].index", "twice"),
        ({"received": [{"token_ids": [256]}]}, "received[0].token_ids[0]", "outside"),
        ({"received": [{"token_ids": [1] * 33, "text_bytes": 33}]}, "received[0].token_ids", "max_new_tokens is 32"),
        ({"received": [{"token_ids": TOKENIZER.encode("abc"), "text_bytes": 2}]}, "received[0].text_bytes", "has 3"),
        ({"received": [{"token_ids": [EOS, 1]}]}, "received[0].token_ids", "ended after 1 of these 2"),
        (
            {"received": [{"token_ids": TOKENIZER.encode("abc")}], "stop": ["b"]},
            "received[0].token_ids",
            "ended after 2",
        ),
        ({"received": [{"token_ids": [1], "text_bytes": 1}], "temperature": 1.0}, "sampling_params.seed", "Started"),
    ],
)
def test_violation(fields: dict[str, object], field: str, words: str) -> None:
    found = violations(request_with(**fields))
    assert list(found) == [field]
    assert words in found[field]


def test_prompt_is_missing() -> None:
    assert violations(generation_pb2.GenerateRequest()) == {"prompt": "missing: give text or token_ids"}


def test_without_tokenizer_text_and_stop_strings_are_refused() -> None:
    validator = RequestValidator(MODEL, None)
    found = violations(request_with(text="hello", stop=["x"]), validator)
    assert "no tokenizer" in found["text"]
    assert "stop_token_ids" in found["sampling_params.stop"]
    assert validator.check(request_with(token_ids=[1]))[1][0].push([5]).text == ""


def test_all_wrong_fields_are_named_at_once_and_fit_into_a_status() -> None:
    request = request_with(
        token_ids=[300], temperature=math.nan, top_p=1.5, top_k=-7, min_p=2.0, repetition_penalty=-1.0,
        presence_penalty=9.0, frequency_penalty=math.inf, logit_bias={256: math.inf}, allowed_token_ids=[400],
        max_new_tokens=4000, min_new_tokens=4001, stop=[""], stop_token_ids=[500], n=99, logprobs=99,
        speculation={"mode": 7, "max_nodes": 1000, "max_depth": 1000}, request_id="a b", received=[{"index": 99}],
    )  # fmt: skip
    found = violations(request)
    assert len(found) == 21
    assert "request" not in found
    with pytest.raises(InvalidRequest) as caught:
        VALIDATOR.check(request)
    assert status_size(caught.value) < 8000


def status_size(error: InvalidRequest) -> int:
    status = status_of(error)
    return len(status.message) + len(status.SerializeToString()) * 4 // 3


def test_endless_violations_are_counted() -> None:
    found = violations(request_with(token_ids=[999] * 50))
    assert found["token_ids.ids"] == "47 more token ids outside the vocabulary"
    request = request_with(received=[{"index": index, "token_ids": [999] * 5} for index in range(1, 17)])
    with pytest.raises(InvalidRequest) as caught:
        VALIDATOR.check(request)
    assert status_of(caught.value).message.endswith("more fields are wrong: correct these first")
    assert status_size(caught.value) < 8192
    assert status_of(caught.value).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def with_bytes(request: generation_pb2.GenerateRequest, more: bytes) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest.FromString(request.SerializeToString() + more)


def test_unknown_fields_are_named_at_any_depth() -> None:
    # Field 100 (varint 1) at the top; field 99 in sampling_params (4); field 77 in received (6).
    found = violations(with_bytes(request_with(), b"\xa0\x06\x01" + b"\x22\x03\x98\x06\x01" + b"\x32\x03\xe8\x04\x01"))
    assert set(found) == {"100", "sampling_params.99", "received[0].77"}
    assert "outrider.v1.SamplingParams has no field 99" in found["sampling_params.99"]


def test_resume_is_taken() -> None:
    stop_at_b = {"token_ids": TOKENIZER.encode("ab"), "text_bytes": 1}
    request = request_with(received=[stop_at_b, {"index": 2, "token_ids": [EOS]}], stop=["b"], n=3, seed=1)
    generation, streams = VALIDATOR.check(request)
    assert dict(generation.received) == {0: tuple(TOKENIZER.encode("ab")), 2: (EOS,)}
    # The streams are fresh: the scheduler pushes what was received.
    assert [stream.text_bytes for stream in streams] == [0, 0, 0]


def test_resume_counts_text_that_was_held_back() -> None:
    smile = TOKENIZER.encode("🙂")
    unfinished = request_with(received=[{"token_ids": smile[:2], "text_bytes": 0}], seed=1)
    assert VALIDATOR.check(unfinished)[0].received
    ended = request_with(received=[{"token_ids": smile[:2], "text_bytes": 3}], seed=1, max_new_tokens=2)
    assert VALIDATOR.check(ended)[0].received


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": [999] * 100_000}, "token_ids.ids"),
        ({"sampling_params": {"allowed_token_ids": [999] * 100_000}}, "sampling_params.allowed_token_ids"),
        ({"sampling_params": {"stop_token_ids": [999] * 100_000}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"logit_bias": dict.fromkeys(range(100_000), 900.0)}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"stop": [""] * 100_000}}, "sampling_params.stop"),
        ({"received": [{"index": 7}] * 100_000}, "received"),
        (
            {"speculation": {"verification": common_pb2.VERIFICATION_RULE_SYNTHETIC, "synthetic_rates": [7.0] * 9_999}},
            "speculation.synthetic_rates",
        ),
    ],
)
def test_a_list_that_is_too_long_is_not_looked_into(fields: dict[str, Any], named: str) -> None:
    request = request_with(**fields)
    with pytest.raises(InvalidRequest) as caught:
        RequestValidator(MODEL, TOKENIZER, RequestLimits(allow_synthetic=True)).check(request)
    assert [violation.field for violation in caught.value.violations] == [named]
    assert "at most" in str(caught.value) or "needed" in str(caught.value) or "shorten" in str(caught.value)


def test_many_unknown_fields_are_not_looked_for_one_by_one() -> None:
    request = request_with()
    request.MergeFromString(bytes([0xF8, 0x3F, 0x01]) * 100_000)
    assert violations(request) == {"request": "300000 bytes of fields that this protocol does not have: remove them"}


def test_the_largest_request_grows_with_the_model() -> None:
    small = common_pb2.ModelInfo(vocab_size=1_000, max_model_len=2_048)
    large = common_pb2.ModelInfo(vocab_size=150_000, max_model_len=131_072)
    assert max_request_bytes(small, None) == 1 << 20
    # Whatever one may ask for fits: a whole prompt, sixteen whole outputs, lists over the whole vocabulary.
    ids = [149_999] * 131_072
    whole = generation_pb2.GenerateRequest(
        token_ids={"ids": ids},
        received=[{"index": index, "token_ids": ids} for index in range(16)],
        sampling_params={
            "logit_bias": dict.fromkeys(range(150_000), 1.0),
            "allowed_token_ids": range(150_000),
            "stop_token_ids": range(150_000),
        },
    )
    assert whole.ByteSize() <= max_request_bytes(large, None) <= MAX_MESSAGE_BYTES
