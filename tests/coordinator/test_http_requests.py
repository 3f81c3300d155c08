"""Parsing of HTTP requests, field by field, without a server."""

import json
from typing import Any

import pytest
from tests.byte_tokenizer import byte_tokenizer
from tokenizers import processors

from outrider.coordinator.api.http.chat_template import ChatTemplate, NoChatTemplate
from outrider.coordinator.api.http.errors import UnknownModel
from outrider.coordinator.api.http.fields import Fields
from outrider.coordinator.api.http.parameters import Asked, renamed
from outrider.coordinator.api.http.requests import read_chat, read_completion
from outrider.coordinator.api.http.responses import read_response
from outrider.coordinator.api.validation import RequestValidator
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import InvalidRequest
from outrider.v1 import common_pb2, generation_pb2

MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=257, max_model_len=200, eos_token_ids=[256])
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood or '' }}"
)


_BYTES = byte_tokenizer("<s>")
# It puts <s>, token 256, in front of what is not said to have its special tokens.
_BYTES.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
TOKENIZER = TextTokenizer(_BYTES)


def completion(**fields: Any) -> Asked:
    content = json.loads(json.dumps({"prompt": "hi"} | fields))
    return read_completion(Fields(content), model="tiny", tokenizer=TOKENIZER)


def chat(template: Any = TEMPLATE, **fields: Any) -> Asked:
    content = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return read_chat(Fields(content), model="tiny", tokenizer=TOKENIZER, template=template)


def wrong(read: Any, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    return {violation.field: violation.description for violation in caught.value.violations}


def checked(asked: Asked) -> None:
    """The checks that both doors share, told in this one's names."""
    try:
        RequestValidator(MODEL, TOKENIZER).check(asked.requests[0])
    except InvalidRequest as error:
        raise renamed(error, asked.names[0]) from error


def test_every_sampling_parameter_has_its_place() -> None:
    asked = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={"5": -100, "6": 2.5}, allowed_token_ids=[1, 2], seed=-1, max_tokens=9,
        min_tokens=3, stop="x", stop_token_ids=[4], ignore_eos=True, n=2, logprobs=3,
    )  # fmt: skip
    (request,) = asked.requests
    assert request.text == "hi"
    assert request.sampling_params == generation_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, logit_bias={5: -100, 6: 2.5}, allowed_token_ids=[1, 2], seed=2**64 - 1,
        max_new_tokens=9, min_new_tokens=3, stop=["x"], stop_token_ids=[4], ignore_eos=True, n=2, logprobs=3,
    )  # fmt: skip
    assert (asked.choices, asked.logprobs, asked.stream, asked.metrics) == (2, 3, False, "none")


def test_defaults_are_openais_where_they_differ() -> None:
    (request,) = completion().requests
    assert request.sampling_params == generation_pb2.SamplingParams(temperature=1.0)
    assert request.request_id.startswith("cmpl-")
    # null is the same as nothing.
    assert completion(temperature=None, stop=None, n=None, suffix=None).choices == 1


def test_prompts_are_text_or_token_ids_one_or_several() -> None:
    assert completion(prompt=[1, 2]).requests[0].token_ids.ids == [1, 2]
    several = completion(prompt=["a", [3]], request_id="mine")
    assert [request.WhichOneof("prompt") for request in several.requests] == ["text", "token_ids"]
    assert [request.request_id for request in several.requests] == ["cmpl-mine-0", "cmpl-mine-1"]
    assert completion(prompt="ab", add_special_tokens=False).requests[0].token_ids.ids == TOKENIZER.encode("ab")[1:]
    assert completion(prompt=["ab", [3]], echo=True).echo == ["ab", TOKENIZER.decode([3])]
    # An output of no tokens makes sense where there is something else to be sent.
    assert "max_tokens" in wrong(completion, max_tokens=0)
    assert "max_tokens" in wrong(completion, max_tokens=-1, echo=True)
    assert "prompt" in wrong(completion, prompt={})
    assert "prompt" in wrong(completion, prompt=[])
    assert "prompt" in wrong(completion, prompt=["a"] * 129)
    assert "prompt[1]" in wrong(completion, prompt=["a", [1.5]])
    assert "prompt[1]" in wrong(completion, prompt=["a", True])
    assert "prompt[0]" in wrong(completion, prompt="\ud800")


def test_speculation_by_name_or_in_full() -> None:
    modes = [completion(speculation=mode).requests[0].speculation.mode for mode in ("async", "sync", "off")]
    assert modes == [1, 2, 3]
    given = {"mode": "sync", "max_nodes": 5, "max_depth": 3, "verification": "target_only", "threshold_acc": 0.5}
    assert completion(speculation=given).requests[0].speculation == generation_pb2.SpeculationParams(
        mode=common_pb2.SPECULATION_MODE_SYNC,
        max_nodes=5,
        max_depth=3,
        verification=common_pb2.VERIFICATION_RULE_TARGET_ONLY,
        threshold_acc=0.5,
    )
    listed = completion(speculation={"sources": ["eagle", "ngram"]}).requests[0].speculation.sources
    assert list(listed) == [common_pb2.GROWTH_SOURCE_EAGLE, common_pb2.GROWTH_SOURCE_NGRAM]
    for given in ("ngram", ["trie"], [2], {}):
        found = wrong(completion, speculation={"sources": given})
        assert found == {"speculation.sources": "a list of model, ngram, eagle needed"}
    assert "speculation" in wrong(completion, speculation="fast")
    assert "speculation" in wrong(completion, speculation=3)
    found = wrong(completion, speculation={"mod": "off", "max_nodes": "x"})
    assert found.keys() == {"speculation.max_nodes", "speculation.mod"}


def test_wrong_kinds_are_named_all_at_once() -> None:
    found = wrong(
        completion, temperature="hot", top_k=1.5, n=True, stop=[1], stream="yes", logit_bias=[1], seed=2**64,
        stop_token_ids=["a"], max_tokens=-1, user=3, stream_options=[],
    )  # fmt: skip
    expected = {"temperature", "top_k", "n", "stop", "stream", "logit_bias", "seed", "stop_token_ids", "max_tokens"}
    assert found.keys() == expected | {"stream_options"}
    assert found["temperature"] == '"hot" given, a number needed'


@pytest.mark.parametrize("number", [10**400, 1e308 * 10, float("nan")])
def test_numbers_beyond_all_bounds_are_refused(number: float) -> None:
    content = {"prompt": "hi", "temperature": number}
    with pytest.raises(InvalidRequest, match="temperature"):
        checked(read_completion(Fields(content), model="tiny", tokenizer=TOKENIZER))


def test_unknown_fields_are_refused_with_what_may_have_been_meant() -> None:
    assert wrong(completion, max_token=3) == {"max_token": "not a field of this request: did you mean max_tokens?"}
    assert wrong(completion, zzz=3) == {"zzz": "not a field of this request: leave it out"}


def test_what_changes_nothing_is_ignored_and_what_is_not_served_is_refused() -> None:
    completion(user="u", metadata={"a": "b"}, store=False, best_of=1, suffix="", echo=False, skip_special_tokens=True)
    completion(n=3, best_of=3)
    for name, value in {"best_of": 4, "suffix": "x", "use_beam_search": True, "skip_special_tokens": False}.items():
        assert name in wrong(completion, **{name: value})
    chat(
        modalities=["text"],
        function_call="none",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
    )
    for name, value in {
        "modalities": ["audio"],
        "audio": {},
        "functions": [{}],
        "tools": [{"type": "function"}],
    }.items():
        assert name in wrong(chat, **{name: value})
    assert "tool_choice" in wrong(chat, tool_choice="required")


def test_streaming_options() -> None:
    asked = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (asked.stream, asked.include_usage, asked.continuous_usage) == (True, True, True)
    assert "stream_options" in wrong(completion, stream_options={"include_usage": True})
    assert "stream_options.usage" in wrong(completion, stream=True, stream_options={"usage": True})


def test_model_is_the_served_one_or_none() -> None:
    completion(model="tiny")
    completion(model="")
    with pytest.raises(UnknownModel, match="use 'tiny'"):
        completion(model="gpt-4")


def test_shared_checks_speak_in_this_doors_names() -> None:
    def shared(read: Any = completion, **fields: Any) -> dict[str, str]:
        return wrong(lambda: checked(read(**fields)))

    assert shared(temperature=-1).keys() == {"temperature"}
    assert shared(logprobs=21).keys() == {"logprobs"}
    assert shared(stop=["a", ""]).keys() == {"stop[1]"}
    found = shared(max_tokens=500)
    assert "max_tokens (500)" in found["max_tokens"]
    assert "max_tokens (5)" in shared(max_tokens=5, min_tokens=6)["min_tokens"]
    assert shared(prompt=[1, 999]).keys() == {"prompt[1]"}
    assert shared(speculation={"max_nodes": 0}).keys() == {"speculation.max_nodes"}
    assert shared(chat, top_logprobs=21, logprobs=True).keys() == {"top_logprobs"}
    assert shared(chat, max_completion_tokens=500).keys() == {"max_completion_tokens"}
    assert shared(chat, messages=[{"role": "user", "content": "x" * 300}]).keys() == {"messages"}


def test_chat_is_the_templates_text_without_more_special_tokens() -> None:
    (request,) = chat().requests
    assert TOKENIZER.decode(request.token_ids.ids) == "<user>hi<assistant>"
    assert 256 not in request.token_ids.ids
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[{"role": "system", "content": parts}],
        add_generation_prompt=False,
        chat_template_kwargs={"mood": "!"},
        max_tokens=4,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert TOKENIZER.decode(asked.requests[0].token_ids.ids) == "<system>a\nb!"
    assert asked.requests[0].sampling_params.max_new_tokens == 5
    assert asked.requests[0].sampling_params.logprobs == 2
    assert chat(logprobs=True).requests[0].sampling_params.logprobs == 0
    assert not chat(logprobs=False).requests[0].sampling_params.HasField("logprobs")


def test_messages_that_are_none() -> None:
    assert "messages" in wrong(chat, messages=[])
    assert "messages[0]" in wrong(chat, messages=["hi"])
    assert "messages[1].content" in wrong(
        chat, messages=[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}]
    )
    assert "messages[0].content" in wrong(chat, messages=[{"role": "user"}])
    assert "top_logprobs" in wrong(chat, top_logprobs=3)
    assert "no chat template" in wrong(chat, template=NoChatTemplate("this model has no chat template"))["messages"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": {"type": "text"}}, None, None),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": "start: x"}}, "grammar", "start: x"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, "json", SCHEMA),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_regex": "b"}, "regex", "b"),
        ({"guided_grammar": "g"}, "grammar", "g"),
    ],
)
def test_structured_output_in_three_spellings(fields: dict[str, Any], field: str | None, value: Any) -> None:
    for read in (completion, chat):
        outputs = read(**fields).requests[0].sampling_params.structured_outputs
        assert outputs.WhichOneof("constraint") == field
        if field is not None:
            given = getattr(outputs, field)
            assert (json.loads(given) if field == "json" else getattr(given, "values", given)) == value


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_json": 3}, "guided_json"),
    ],
)
def test_structured_output_that_is_none(fields: dict[str, Any], named: str) -> None:
    assert named in wrong(completion, **fields)


ODD = [
    True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e39, 1e400, float("nan"), "", "x", "\ud800", "\x00",
    [], [[]], [None], [1, "a"], [2**32], ["\udfff"], [{}], {}, {"a": 1}, {"1": 1e39}, {"1": 10**400}, {"type": []},
    {"type": "json_schema", "json_schema": {"schema": 3}}, {"type": "json_schema", "json_schema": []}, {"json": {}},
    {"choice": [1]}, {"choice": []}, {"mode": 1}, {"mode": "off", "max_nodes": 10**30, "synthetic_rates": [1e400]},
    [{"role": 1}], [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "\ud800", "content": "x"}], {"mood": "\ud800"}, {"mood": 3},
    [{"role": "assistant", "tool_calls": [1]}], [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], [{"type": "function_call"}],
    [{"role": "user", "content": [{"type": []}]}], [{"type": "function_call_output", "output": {}}], {"format": []},
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": 3, "$defs": []}}}], {"format": {"type": []}},
    {"type": "function", "function": {"name": []}}, [{"type": "function", "name": []}], {"name": []}, {"effort": 3},
]  # fmt: skip
FIELDS = [
    "prompt", "messages", "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "allowed_token_ids",
    "seed", "n", "best_of", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "min_tokens",
    "ignore_eos", "echo", "stream", "stream_options", "response_format", "structured_outputs", "guided_json",
    "guided_choice", "guided_regex", "guided_whitespace_pattern", "speculation",
    "per_request_spec_decode_metrics", "request_id", "tools", "tool_choice", "chat_template_kwargs",
    "input", "instructions", "text", "reasoning", "max_output_tokens", "truncation", "include", "previous_response_id",
    "parallel_tool_calls", "reasoning_effort", "documents", "suffix", "user", "add_special_tokens", "return_token_ids",
    "modalities", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_a_field_holds_is_served_or_refused_by_name(field: str) -> None:
    for value in ODD:
        for read in (completion, chat, read_response):
            try:
                asked = read_anything(read, field, value)
                for request in asked.requests:
                    RequestValidator(MODEL, TOKENIZER).check(request)
            except InvalidRequest as error:
                assert error.violations
                assert all(violation.field and violation.description for violation in error.violations)


def read_anything(read: Any, field: str, value: Any) -> Asked:
    names: Any = {"model": "tiny", "tokenizer": TOKENIZER, "template": TEMPLATE}
    if read is read_response:
        return read_response(Fields({"input": "hi"} | {field: value}), **names)
    if read is chat:
        tool = {"type": "function", "function": {"name": "f"}}
        content = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]} | {field: value}
        if field == "tools":
            content["tool_choice"] = "required"
        return read_chat(Fields(content), **names)
    return read_completion(Fields({"prompt": "hi"} | {field: value}), model="tiny", tokenizer=TOKENIZER)
