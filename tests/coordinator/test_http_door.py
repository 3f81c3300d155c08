"""Answers of the HTTP server: the official client over loopback, and requests that it cannot send."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from tests.coordinator.http_door import TOKENIZER, A, B, C, serving
from tests.coordinator.scripted_scheduler import Play, delta, result

from outrider.coordinator.api.http.chat_template import ChatTemplate
from outrider.coordinator.api.http.fields import Fields
from outrider.coordinator.api.http.formats import ChatFormat, CompletionFormat, WholeChoice
from outrider.coordinator.api.http.requests import read_chat, read_completion
from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TokenLogprobs,
)
from outrider.errors import InternalError, WorkerUnavailable
from outrider.v1.generation_pb2 import Round

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_whole_completion_and_chat() -> None:
    async with serving() as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt="hi", max_tokens=3)
        assert completion.choices[0].text == "abc"
        assert completion.choices[0].finish_reason == "length"
        assert completion.id.startswith("cmpl-")
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 3)
        assert completion.usage.total_tokens == 5
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 1
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
        assert chat.choices[0].message.content == "abc"
        assert chat.choices[0].message.role == "assistant"
        assert door.scheduler.requests[-1].prompt_token_ids == tuple(TOKENIZER.encode("hi"))
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_streams_of_one_choice() -> None:
    ended = result(2, finish_reason=FinishReason.STOP, stop_string="x")
    play: Play = lambda _: [delta(A, text=""), delta(B, text="ab"), ended]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        options: Any = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.completions.create(prompt="hi", **options)]
        # A token whose text is held back is a chunk all the same.
        assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["", "ab", ""]
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
        assert chunks[2].choices[0].model_extra == {"stop_reason": "x"}
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        assert len({chunk.id for chunk in chunks}) == 1
        deltas = [chunk async for chunk in await client.chat.completions.create(messages=MESSAGES, **options)]
        assert [chunk.choices[0].delta.content for chunk in deltas[:-1]] == ["", "", "ab", None]
        assert deltas[0].choices[0].delta.role == "assistant"
        assert deltas[-2].choices[0].finish_reason == "stop"
        assert deltas[-1].usage is not None


async def test_stream_as_it_travels() -> None:
    async with serving() as door:
        status, headers, body = await door.ask("/v1/completions", {"prompt": "hi", "stream": True, "request_id": "me"})
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert body.count(b"data: ") == 4
        assert body.rstrip(b"0\r\n").endswith(b"data: [DONE]")
        assert b'"id":"cmpl-me"' in body
        given = {"prompt": "hi", "stream": True, "return_token_ids": True, "echo": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, _, body = await door.ask("/v1/completions", given | {"stream_options": options}, x_request_id="proxy-7")
        parts = [part for line in body.split(b"\r\n") for part in line.split(b"\n\n") if part.startswith(b"data: {")]
        events = [json.loads(part.removeprefix(b"data: ")) for part in parts]
        assert events[0]["id"].startswith("cmpl-proxy-7-")
        assert events[0]["choices"][0]["text"] == "hi"
        assert events[0]["choices"][0]["prompt_token_ids"] == TOKENIZER.encode("hi")
        assert [event["choices"][0].get("token_ids") for event in events[1:-1]] == [[A, B], [C], None]
        assert [event["usage"]["completion_tokens"] for event in events[1:]] == [2, 3, 3, 3]


async def test_several_choices_and_several_prompts() -> None:
    async with serving() as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt=["x", "yz"], n=2, echo=True)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in completion.choices] == ["xabc", "xabc", "yzabc", "yzabc"]
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 12)
        assert [request.n for request in door.scheduler.requests] == [2, 2]
        texts = dict.fromkeys(range(4), "")
        async for chunk in await client.completions.create(model="tiny", prompt=["x", "yz"], n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == dict.fromkeys(range(4), "abc")
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in chat.choices] == ["abc", "abc"]


async def test_prompts_of_one_request_share_its_entry_in_the_queue_and_connections_take_turns() -> None:
    async with serving() as door, door.client() as client:
        await client.completions.create(model="tiny", prompt=["x", "y"])
        await client.completions.create(model="tiny", prompt="z")
        together, alone = door.scheduler.requests[:2], door.scheduler.requests[2]
        assert len({request.entry for request in door.scheduler.requests}) == 2
        assert together[0].entry == together[1].entry
        assert together[0].client == alone.client != ""
        await door.ask("/v1/completions", {"prompt": "x"})
        assert door.scheduler.requests[-1].client != alone.client


async def test_requests_of_one_name_have_each_their_own_entry_in_the_queue() -> None:
    """A name is what clients make of it: two of the same would pass the queue's bound as one."""
    async with serving() as door, door.client() as client:
        for _ in range(2):
            await client.completions.create(model="tiny", prompt=["x", "y"], extra_body={"request_id": "batch"})
        first, second = door.scheduler.requests[:2], door.scheduler.requests[2:]
        assert {request.request_id for request in first} == {request.request_id for request in second}
        assert len({request.entry for request in first}) == len({request.entry for request in second}) == 1
        assert first[0].entry != second[0].entry


async def test_one_bad_prompt_of_several_ends_them_all_before_anything_is_sent() -> None:
    async with serving() as door, door.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=["x", ""], stream=True)
        assert caught.value.param == "prompt[1]"


async def test_log_probabilities_in_both_shapes() -> None:
    logprobs = TokenLogprobs(
        token_logprobs=[-0.5, -float("inf")], top_token_ids=[[A, C], [C, A]], top_logprobs=[[-0.5, -1.5], [-0.25, -2.5]]
    )
    play: Play = lambda _: [delta(A, B, text="ab", logprobs=logprobs), result(2)]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        completion = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
        found = completion.choices[0].logprobs
        assert found is not None
        assert (found.tokens, found.token_logprobs, found.text_offset) == (["a", "b"], [-0.5, -9999.0], [0, 1])
        assert found.top_logprobs == [{"a": -0.5, "c": -1.5}, {"c": -0.25, "a": -2.5, "b": -9999.0}]
        assert door.scheduler.requests[-1].sampling.logprobs == 2
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
        content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
        assert content
        assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
            ("a", -0.5, [97]),
            ("b", -9999.0, [98]),
        ]
        assert [(best.token, best.logprob) for best in content[1].top_logprobs] == [("c", -0.25), ("a", -2.5)]
        options: Any = {"model": "tiny", "stream": True}
        async for chunk in await client.completions.create(prompt="hi", logprobs=1, **options):
            if chunk.choices[0].text:
                assert chunk.choices[0].logprobs is not None
                assert chunk.choices[0].logprobs.tokens == ["a", "b"]
        async for chunk in await client.chat.completions.create(messages=MESSAGES, logprobs=True, **options):
            if chunk.choices[0].delta.content:
                assert chunk.choices[0].logprobs is not None
                assert chunk.choices[0].logprobs.content is not None
                assert [entry.top_logprobs for entry in chunk.choices[0].logprobs.content] == [[], []]


def verification(nodes: int, accepted: int) -> Round:
    return Round(selected=nodes, accepted=accepted, emitted_token_ids=[A])


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_log_probabilities_are_not_left_to_the_end(kind: str) -> None:
    """Those of a long response, all at once, would keep the event loop from everybody else for seconds."""
    asked_for = []

    class Tokenizer:
        def token_text(self, token_id: int) -> str:
            asked_for.append(token_id)
            return "a"

        def piece(self, token_id: int) -> bytes:
            return b"a"

    names: Any = {"model": "tiny", "created": 1, "tokenizer": Tokenizer()}
    if kind == "chat":
        content = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        asked = read_chat(Fields(content), model="tiny", tokenizer=TOKENIZER, template=ChatTemplate("x"))
        form = ChatFormat(asked, **names)
    else:
        asked = read_completion(Fields({"prompt": "x", "logprobs": 2}), model="tiny", tokenizer=None)
        form = CompletionFormat(asked, **names)
    told = TokenLogprobs(token_logprobs=[-0.5], top_token_ids=[[A, B]], top_logprobs=[[-0.5, -1.0]])
    # Text may come without a token.
    no_token = delta(text="c", logprobs=TokenLogprobs(token_logprobs=[], top_token_ids=[], top_logprobs=[]))
    choice = WholeChoice([A], "", [])
    for each in (delta(A, text="a", logprobs=told), no_token, delta(A, text="a", logprobs=told)):
        choice.take(each, form.logprobs(each, 0))
    choice.result = result(2).choices[0]
    seen = len(asked_for)
    (whole,) = json.loads(form.whole([choice], {}, {}))["choices"]
    assert len(asked_for) == seen > 0
    found = whole["logprobs"]
    values = [entry["logprob"] for entry in found["content"]] if kind == "chat" else found["token_logprobs"]
    assert values == [-0.5] * 2
    assert kind == "chat" or found["text_offset"] == [0, 1]


async def test_metrics_of_speculation_where_they_are_asked_for() -> None:
    rounds = [verification(0, 0), verification(4, 2), verification(3, 0)]
    play: Play = lambda request: [delta(A, text="a"), *(rounds if request.trace else []), result(1)]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        asking: Any = {"per_request_spec_decode_metrics": "detailed"}
        completion = await client.completions.create(model="tiny", prompt="hi", extra_body=asking)
        metrics = (completion.model_extra or {})["metrics"]
        assert metrics["speculative_decoding"] == {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 2 / 7,
            "acceptance_histogram": [1, 0, 1] + [0] * 14,
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 2,
            "num_draft_tokens": 7,
            "num_spec_tokens": 16,
            "per_step_accepted": [2, 0],
            "per_step_drafted": [4, 3],
        }
        assert metrics["time_to_first_token_ms"] == pytest.approx(10)
        assert metrics["generation_time_ms"] == pytest.approx(20)
        asking = {"per_request_spec_decode_metrics": "summary"}
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": asking}
        chunks = [chunk async for chunk in await client.completions.create(model="tiny", prompt="hi", **options)]
        told = (chunks[-1].model_extra or {})["metrics"]["speculative_decoding"]
        assert told["num_draft_tokens"] == 7
        assert "per_step_accepted" not in told
        several = await client.completions.create(model="tiny", prompt=["hi", "ho"], extra_body=asking)
        assert (several.model_extra or {})["metrics"] is None
        assert "metrics" not in ((await client.completions.create(model="tiny", prompt="hi")).model_extra or {})


async def test_errors_have_openais_shape_and_status() -> None:
    async with serving() as door, door.client() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="hi", temperature=-1)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="hi")
        assert missing.value.code == "model_not_found"
        door.scheduler.error = WorkerUnavailable("no target")
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert unavailable.value.status_code == 503
        door.scheduler.error = InternalError("a defect")
        with pytest.raises(openai.InternalServerError) as defect:
            await client.completions.create(model="tiny", prompt="hi")
        assert (defect.value.status_code, defect.value.type) == (500, "server_error")
        door.scheduler.room = 0
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="tiny", prompt="hi")
        assert full.value.response.headers["retry-after"] == "3"
        assert full.value.response.headers["retry-after-ms"] == "2500"


async def test_requests_that_are_refused_by_this_door_alone_are_counted() -> None:
    told = list[str]()
    async with serving() as door:
        door.servicer.generations.on_refusal = lambda error: told.append(type(error).__name__)
        for content in (b"{", {"prompt": "x", "temprature": 1}, {"prompt": "x", "model": "other"}):
            await door.ask("/v1/completions", content)
        assert (await door.ask("/v1/completions", {"prompt": "x", "top_p": 2}))[0] == 400
    assert told == ["InvalidRequest", "InvalidRequest", "UnknownModel", "InvalidRequest"]


_BAD_SCHEMA: Any = {"type": "nothing"}


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"prompt": [1] * 2_000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 1_000_000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 2_000}, "max_tokens", "context_length_exceeded"),
        ({"prompt": ["x", [1] * 2_000]}, "prompt[1]", "context_length_exceeded"),
        ({"temperature": 2.5}, "temperature", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": _BAD_SCHEMA}}}, "response_format", None),
        ({"guided_json": _BAD_SCHEMA}, "guided_json", None),
        ({"structured_outputs": {"json": _BAD_SCHEMA}}, "structured_outputs.json", None),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", None),
    ],
)
async def test_what_is_wrong_is_called_as_the_request_calls_it(
    given: dict[str, Any], param: str, code: str | None
) -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    async with serving() as door:
        status, _, body = await door.ask("/v1/completions", {"prompt": "hi"} | given)
        error = json.loads(body)["error"]
        assert (status, error["param"], error["code"]) == (400, param, code)


async def test_the_reason_for_a_stop_is_what_the_request_has_named() -> None:
    eos, own = 0, B

    def play(request: GenerationRequest) -> Sequence[GenerationEvent]:
        token = own if own in request.sampling.stop_token_ids else eos
        ended = ChoiceResult(index=0, finish_reason=FinishReason.STOP, completion_tokens=1, stop_token_id=token)
        return [delta(token), replace(result(1), choices=[ended])]

    async with serving(play) as door, door.client() as client:
        for asking, reason in (({}, None), ({"stop_token_ids": [own]}, own)):
            options: Any = {"model": "tiny", "extra_body": asking}
            completion = await client.completions.create(prompt="hi", **options)
            chat = await client.chat.completions.create(messages=MESSAGES, **options)
            for choice in (completion.choices[0], chat.choices[0]):
                extra = choice.model_extra
                assert extra is not None
                assert (choice.finish_reason, extra["stop_reason"]) == ("stop", reason)


async def test_requests_that_are_none() -> None:
    async with serving() as door:

        async def refused(path: str, content: Any = None, **more: Any) -> tuple[int, Any]:
            status, _, body = await door.ask(path, content, **more)
            return status, json.loads(body)["error"]

        assert (await refused("/v1/completions", b"{"))[0] == 400
        assert (await refused("/v1/completions", b"[" * 100_000))[0] == 400
        assert (await refused("/v1/completions", b"[]"))[1]["param"] == "body"
        assert (await refused("/v1/completions", {"prompt": "x"}, content_type="text/plain"))[0] == 415
        assert (await refused("/v1/completions"))[0] == 405
        assert (await refused("/v1/completion", {}))[0] == 404
        assert (await refused("/v1/models/other"))[1]["code"] == "model_not_found"
        endless = b'{"prompt": "' + b"x" * (4 << 20) + b'"}'
        assert (await refused("/v1/completions", endless))[0] == 413
        assert door.scheduler.requests == []


async def test_however_deep_a_request_is_nested_it_is_no_defect() -> None:
    """A schema that can just be read cannot always be written again."""
    async with serving() as door:
        for depth in range(880, 990):
            schema = b'{"schema":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
            body = b'{"prompt":"a","response_format":{"type":"json_schema","json_schema":' + schema + b"}}"
            assert (await door.ask("/v1/completions", body))[0] == 400


async def test_a_defect_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as door:
        status, _, body = await door.ask("/defect")
        assert status == 500
        assert json.loads(body)["error"]["type"] == "server_error"
        assert b"secret" not in body
        assert "a secret" in caplog.text


async def test_an_error_after_the_first_tokens_is_an_event() -> None:
    play: Play = lambda _: [delta(A, text="a"), WorkerUnavailable("the target is gone")]  # noqa: E731
    async with serving(play) as door, door.client() as client:
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert (await anext(aiter(stream))).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="the target is gone"):
            await anext(aiter(stream))
        # As a whole it has a status.
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert caught.value.status_code == 503
