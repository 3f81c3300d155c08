"""The client against a scripted server on loopback: results, errors, resumes, early exits."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.outrider.scripted_server import TEXT, Request, Response, Script, delta, finished, serving, started, whole

from outrider.client import AsyncClient, Client
from outrider.errors import (
    FieldViolation,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Superseded,
    WorkerRefused,
    WorkerUnavailable,
)
from outrider.v1 import common_pb2, generation_pb2


def test_result() -> None:
    with serving(whole) as (servicer, endpoint), Client(endpoint) as client:
        result = client.generate("hey", logprobs=2, trace=True)
    assert (result.text, result.token_ids, result.finish_reason) == (TEXT, tuple(range(len(TEXT))), "stop")
    assert (result.request_id, result.seed, result.resumes) == (servicer.requests[0].request_id, 99, 0)
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, len(TEXT), 3)
    speculation = result.speculation
    assert (speculation.verify_steps, speculation.drafted_tokens, speculation.accepted_tokens) == (5, 40, 10)
    assert speculation.acceptance_length == 3.0
    (word,) = speculation.sources
    own = speculation.sources[word]
    assert (word, own.drafted_tokens, own.submitted_tokens, own.accepted_tokens) == ("ngram", 9, 8, 7)
    timings = result.timings
    assert (timings.queue_ms, timings.ttft_ms, timings.tpot_ms, timings.total_ms) == (1, 2, 3, 4)
    assert result.choices[0].stop_reason == "\n"
    assert result.logprobs is not None
    assert result.logprobs.token_logprobs[:3] == (0.0, -1.0, -2.0)
    assert result.logprobs.top[1] == ((10, -1.0), (11, -9.0))
    assert len(result.logprobs.top) == len(TEXT)
    assert [record.step for record in result.rounds] == [1]
    assert servicer.requests[0].text == "hey"


def test_every_option_reaches_the_request() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.75, "top_k": -1, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {3: 1.5}, "allowed_token_ids": [1, 2],
        "seed": 2**64 - 1, "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [5],
        "ignore_eos": True, "n": 1, "logprobs": 0, "forced_token_ids": [4, 4],
    }  # fmt: skip
    speculation: dict[str, Any] = {"max_nodes": 3, "max_depth": 2, "threshold_single": 0.25, "threshold_acc": 0.5}
    speculation["synthetic_rates"] = [0.5, 0.25]
    with serving(whole) as (servicer, endpoint), Client(endpoint) as client:
        client.generate(
            [7, 8],
            speculation="sync",
            verification="target_only",
            sources=["ngram", "model"],
            request_id="id",
            regex="a|b",
            **speculation,
            **sampling,
        )
    assert servicer.requests[0] == Request(
        request_id="id",
        token_ids=generation_pb2.TokenIds(ids=[7, 8]),
        sampling_params=generation_pb2.SamplingParams(
            structured_outputs=common_pb2.StructuredOutputs(regex="a|b"), **sampling
        ),
        speculation=generation_pb2.SpeculationParams(
            mode=common_pb2.SPECULATION_MODE_SYNC,
            verification=common_pb2.VERIFICATION_RULE_TARGET_ONLY,
            sources=[common_pb2.GROWTH_SOURCE_NGRAM, common_pb2.GROWTH_SOURCE_MODEL],
            **speculation,
        ),
    )
    named = {"mode", "verification", "sources", *speculation}
    assert named == set(generation_pb2.SpeculationParams.DESCRIPTOR.fields_by_name)
    assert {"structured_outputs", *sampling} == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_absent_options_are_absent() -> None:
    with serving(whole) as (servicer, endpoint), Client(endpoint) as client:
        client.generate("x", temperature=None, seed=None, stop="end")
    assert servicer.requests[0].sampling_params == generation_pb2.SamplingParams(stop=["end"])
    assert servicer.requests[0].speculation == generation_pb2.SpeculationParams(mode=common_pb2.SPECULATION_MODE_ASYNC)


def test_stream_gives_deltas_then_the_result() -> None:
    with serving(whole) as (_, endpoint), Client(endpoint) as client, client.stream("x") as stream:
        with pytest.raises(RuntimeError, match="not ended"):
            _ = stream.result
        deltas = list(stream)
        assert "".join(part.text for part in deltas) == TEXT == stream.result.text
        assert [part.offset for part in deltas] == list(range(0, len(TEXT), 3))


async def test_async_stream_and_calls() -> None:
    with serving(whole) as (_, endpoint):
        async with AsyncClient(endpoint) as client:
            assert (await client.generate("x")).text == TEXT
            async with client.stream("x") as stream:
                assert "".join([part.text async for part in stream]) == TEXT
            assert stream.result.finish_reason == "stop"
            assert await client.abort("a", "b") == ["a"]
            assert (await client.model_info()).max_new_tokens_default == 128
            with pytest.raises(WorkerRefused, match="another tokenizer"):
                await client.server_info()
            watch = client.watch(interval_ms=100)
            assert [(await anext(watch)).running_sessions for _ in range(3)] == [0, 1, 2]
            await watch.aclose()


def test_sync_calls() -> None:
    with serving(whole) as (_, endpoint), Client(endpoint) as client:
        assert client.abort("a", "b") == ["a"]
        assert client.model_info().max_new_tokens_default == 128
        with pytest.raises(WorkerRefused, match="another tokenizer"):
            client.server_info()


def breaking_at(*positions: int, overlap: int = 0) -> Script:
    """The stream breaks before these positions; the next one repeats `overlap` tokens."""

    async def script(request: Request, attempt: int) -> AsyncIterator[Response]:
        yield started(request)
        got = len(request.received[0].token_ids) if request.received else 0
        assert not request.received or request.received[0].text_bytes == len(TEXT[:got].encode())
        end = positions[attempt] if attempt < len(positions) else len(TEXT)
        start = max(0, got - overlap)
        if end > start:
            yield delta(start, count=end - start)
        if attempt < len(positions):
            raise WorkerUnavailable("the worker is gone")
        yield finished()

    return script


@pytest.mark.parametrize("overlap", [0, 2, 100])
def test_broken_stream_is_resumed_and_duplicates_are_dropped(overlap: int) -> None:
    with serving(breaking_at(3, 9, overlap=overlap)) as (servicer, endpoint), Client(endpoint) as client:
        with client.stream("x", temperature=1.0, logprobs=1) as stream:
            deltas = list(stream)
        result = stream.result
    assert (result.text, result.token_ids, result.resumes) == (TEXT, tuple(range(len(TEXT))), 2)
    assert "".join(part.text for part in deltas) == TEXT
    assert [part.offset for part in deltas] == [0, 3, 9]
    assert result.logprobs is not None
    assert result.logprobs.token_logprobs == tuple(-float(position) for position in range(len(TEXT)))
    first, second, third = servicer.requests
    assert len(first.request_id) == 32
    assert not first.sampling_params.HasField("seed")
    assert (second.request_id, second.sampling_params.seed) == (first.request_id, 99)
    assert list(third.received[0].token_ids) == list(range(9))


def test_a_resume_names_the_weights_of_what_was_received() -> None:
    async def script(request: Request, attempt: int) -> AsyncIterator[Response]:
        async for response in breaking_at(3, 9)(request, attempt):
            if response.HasField("delta"):
                response.delta.weights = "abc"
            if response.HasField("finished"):
                response.finished.weights = "abc"
            yield response

    with serving(script) as (servicer, endpoint), Client(endpoint) as client:
        result = client.generate("x")
    assert (result.text, result.resumes, result.weights) == (TEXT, 2, "abc")
    assert [request.weights for request in servicer.requests] == ["", "abc", "abc"]


@pytest.mark.parametrize("served_before", [False, True])
def test_what_broke_before_it_started_is_sent_again(served_before: bool) -> None:
    """A stream that breaks without a word, and once the client was served, also one that is refused."""

    async def script(request: Request, attempt: int) -> AsyncIterator[Response]:
        if attempt == 1:
            if served_before:
                raise WorkerUnavailable("no target worker is registered")
            raise ConnectionError
        async for response in whole(request, attempt):
            yield response

    with serving(script) as (servicer, endpoint), Client(endpoint) as client:
        if served_before:
            client.generate("x")
        else:
            servicer.requests.append(Request())
        result = client.generate("y")
    assert (result.text, result.resumes) == (TEXT, 1)
    assert servicer.requests[1].request_id == servicer.requests[2].request_id


async def test_async_stream_is_resumed() -> None:
    with serving(breaking_at(0, 0, 5)) as (servicer, endpoint):
        async with AsyncClient(endpoint) as client:
            assert (await client.generate("x")).text == TEXT
    assert len(servicer.requests) == 4


async def broken_early(request: Request, _: int) -> AsyncIterator[Response]:
    yield started(request)
    yield delta(0, count=5)
    raise WorkerUnavailable("the coordinator is shutting down")


async def the_rest(request: Request, _: int) -> AsyncIterator[Response]:
    yield started(request)
    position = len(request.received[0].token_ids) if request.received else 0
    yield delta(position, count=len(TEXT) - position)
    yield finished()


async def full(request: Request, _: int) -> AsyncIterator[Response]:
    raise Overloaded("the queue is full", retry_after_s=30)
    yield


@pytest.mark.parametrize("first", [broken_early, full, None])
async def test_a_request_goes_on_at_another_coordinator(first: Script | None) -> None:
    with serving(first or whole) as (broken, serving_first), serving(the_rest) as (_, second):
        endpoints = [serving_first if first else "127.0.0.1:9", second]
        with Client(endpoints) as client:
            assert [client.generate("hey").text for _ in range(3)] == [TEXT] * 3
            assert client.model_info().max_new_tokens_default == 128
            assert client.abort("live") == ["live"]
        async with AsyncClient(",".join(endpoints)) as async_client:
            results = [await async_client.generate("hey") for _ in range(3)]
            assert [result.text for result in results] == [TEXT] * 3
            assert [result.token_ids for result in results] == [tuple(range(len(TEXT)))] * 3
            assert (await async_client.model_info()).max_new_tokens_default == 128
            assert await async_client.abort("live") == ["live"]
        # Each client was there first once, or second, and then stayed away for a while.
        assert len(broken.requests) <= 2 if first else not broken.requests


def test_resumes_are_bounded_and_what_came_stays_readable() -> None:
    with serving(breaking_at(*[4] * 50)) as (servicer, endpoint), Client(endpoint, max_resumes=2) as client:
        stream = client.stream("x")
        with pytest.raises(WorkerUnavailable, match="the worker is gone"):
            list(stream)
        assert stream.choices[0].text == TEXT[:4]
        assert stream.choices[0].finish_reason is None
    assert len(servicer.requests) == 3


def test_several_choices_are_kept_apart() -> None:
    async def script(request: Request, attempt: int) -> AsyncIterator[Response]:
        yield started(request)
        if attempt == 0:
            yield delta(0, count=5, index=1)
            raise WorkerUnavailable("gone")
        assert [entry.index for entry in request.received] == [1]
        yield delta(0, count=len(TEXT), index=0)
        yield delta(5, count=len(TEXT) - 5, index=1)
        yield finished(2)

    with serving(script) as (_, endpoint), Client(endpoint) as client:
        result = client.generate("x", n=2)
    assert [choice.text for choice in result.choices] == [TEXT, TEXT]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest([FieldViolation("text", "empty"), FieldViolation("top_p", "1.5 given")]),
        Overloaded("full", retry_after_s=1.25),
        WorkerUnavailable("no target"),
        WorkerRefused("no"),
        Superseded("taken over"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_back_as_they_were(error: OutriderError) -> None:
    async def script(request: Request, _: int) -> AsyncIterator[Response]:
        raise error
        yield started(request)

    with serving(script) as (servicer, endpoint), Client(endpoint) as client, pytest.raises(type(error)) as caught:
        client.generate("x")
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    (asked,) = client._endpoints
    assert asked.is_avoided == isinstance(error, WorkerUnavailable | Overloaded)
    # Nothing had come: nothing was resumed.
    assert len(servicer.requests) == 1


@pytest.mark.parametrize("ending", [ConnectionError(), Superseded("too late")])
def test_what_breaks_behind_the_end_does_not_matter(ending: Exception) -> None:
    async def script(request: Request, attempt: int) -> AsyncIterator[Response]:
        async for response in whole(request, attempt):
            yield response
        raise ending

    with serving(script) as (servicer, endpoint), Client(endpoint, max_resumes=0) as client:
        assert client.generate("x").text == TEXT
        assert len(servicer.requests) == 1


def test_other_errors() -> None:
    async def broken(request: Request, _: int) -> AsyncIterator[Response]:
        yield started(request)
        raise ZeroDivisionError

    async def gap(request: Request, _: int) -> AsyncIterator[Response]:
        yield started(request)
        yield delta(3)

    async def short(request: Request, _: int) -> AsyncIterator[Response]:
        yield started(request)

    scripts = [(broken, "UNKNOWN"), (gap, "left out what stands before token 3"), (short, "without Finished")]
    for script, words in scripts:
        with (
            serving(script) as (_, endpoint),
            Client(endpoint) as client,
            pytest.raises(OutriderError, match=words),
        ):
            client.generate("x")


def test_nobody_listens() -> None:
    told = r"is it running \(`outrider serve`\)\? ipv4:"
    with Client("127.0.0.1:1") as client, pytest.raises(WorkerUnavailable, match=told):
        client.generate("x")


async def forever(request: Request, _: int) -> AsyncIterator[Response]:
    yield started(request)
    yield delta(0)
    await asyncio.sleep(60)


def test_timeout() -> None:
    with serving(forever) as (_, endpoint), Client(endpoint) as client, pytest.raises(TimeoutError):
        client.generate("x", timeout_s=0.3)


def test_early_exit_cancels_at_the_server() -> None:
    with serving(forever) as (servicer, endpoint), Client(endpoint) as client:
        with client.stream("x") as stream:
            next(iter(stream))
        assert servicer.ended.wait(30)
        servicer.ended.clear()
        # Without a `with`, dropping the stream is enough.
        for _ in client.stream("x"):
            break
        assert servicer.ended.wait(30)


async def test_early_exit_of_an_async_stream_cancels_at_the_server() -> None:
    with serving(forever) as (servicer, endpoint):
        async with AsyncClient(endpoint) as client:
            async with client.stream("x") as stream:
                await anext(aiter(stream))
            assert await asyncio.to_thread(servicer.ended.wait, 30)


def test_options_that_no_request_can_hold() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest) as caught:
            client.stream([-1], max_new_tokens=-5, temperature="hot", speculation="fast", stop=["\ud800"])  # type: ignore[arg-type]
        fields = {violation.field for violation in caught.value.violations}
        assert fields == {"token_ids", "max_new_tokens", "temperature", "speculation", "stop"}
        with pytest.raises(TypeError, match="temprature"):
            client.stream("x", temprature=1.0)  # type: ignore[call-arg]


def test_client_imports_no_torch() -> None:
    code = "import sys, outrider.client; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
