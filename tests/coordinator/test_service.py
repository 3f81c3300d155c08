"""GenerationService over loopback gRPC, with a scheduler that plays scripts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from tests.byte_tokenizer import ALPHABET, byte_tokenizer
from tests.coordinator.scripted_scheduler import ScriptedScheduler, delta, grpc_door, result

from outrider.coordinator.api.service import SERVICE
from outrider.coordinator.sessions.messages import FinishReason, TokenLogprobs
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.errors import OutriderError, Overloaded, WorkerUnavailable
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from outrider.wire import floats_from_bytes

MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=20_000, eos_token_ids=[0])


TOKENIZER = TextTokenizer(byte_tokenizer())


INFO = generation_pb2.ServerInfo(version="0", running_sessions=3)


@contextlib.asynccontextmanager
async def serving(
    scheduler: ScriptedScheduler,
) -> AsyncIterator[tuple[generation_pb2_grpc.GenerationServiceStub, grpc.aio.Channel]]:
    async with grpc_door(scheduler, model=MODEL, tokenizer=TOKENIZER, info=INFO) as (channel, _):
        yield generation_pb2_grpc.GenerationServiceStub(channel), channel


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    merged: dict[str, Any] = {"text": "hi"} | fields
    return generation_pb2.GenerateRequest(**merged)


async def events(call: Any) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def read(call: Any) -> Any:
    return await anext(aiter(call))


async def test_started_deltas_rounds_finished() -> None:
    logprobs = TokenLogprobs(token_logprobs=[-0.5, -1.5], top_token_ids=[[1, 2], [3, 4]], top_logprobs=[[-0.5, -1]] * 2)
    arrival = generation_pb2.GrowthArrival(worker_id="d", arrived_ns=5, as_of=3, nodes=4)
    record = generation_pb2.Round(step=7, length=3, selected=2, accepted=1, emitted_token_ids=[4, 9], growth=[arrival])
    first, second = delta(4, 9, text="ab", logprobs=logprobs), delta(5, text="c", offset=2)
    scheduler = ScriptedScheduler(
        lambda _: [first, record, second, result(3, finish_reason=FinishReason.STOP, stop_string="x")]
    )
    async with serving(scheduler) as (stub, _):
        got = await events(stub.Generate(request(request_id="r1", sampling_params={"seed": 5}), timeout=30))
    assert [event.WhichOneof("event") for event in got] == ["started", "delta", "round", "delta", "finished"]
    assert got[0].started == generation_pb2.Started(request_id="r1", seed=5, prompt_tokens=2)
    assert (list(got[1].delta.token_ids), got[1].delta.text) == ([4, 9], "ab")
    wire = got[1].delta.logprobs
    assert floats_from_bytes(wire.token_logprobs).tolist() == [-0.5, -1.5]
    assert (wire.top_count, list(wire.top_token_ids)) == (2, [1, 2, 3, 4])
    assert floats_from_bytes(wire.top_logprobs).tolist() == [-0.5, -1, -0.5, -1]
    assert got[2].round == record
    assert (got[3].delta.offset, got[3].delta.text_offset, got[3].delta.HasField("logprobs")) == (2, 2, False)
    finished = got[4].finished
    assert finished.choices[0].finish_reason == generation_pb2.FINISH_REASON_STOP
    assert (finished.choices[0].stop_string, finished.choices[0].WhichOneof("stop_reason")) == ("x", "stop_string")
    usage = finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 3, 1)
    speculation = finished.speculation
    assert (speculation.verify_steps, speculation.spec_draft_tokens, speculation.spec_accepted_tokens) == (2, 9, 3)
    assert speculation.acceptance_length == 2.5
    timings = finished.timings
    assert (timings.queue_ms, timings.ttft_ms, timings.total_ms) == pytest.approx((1, 11, 31))
    assert timings.tpot_ms == pytest.approx(10)


async def test_a_request_id_that_is_refused_writes_no_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(ScriptedScheduler(lambda _: [])) as (stub, _):
        error = await failure(stub.Generate(request(request_id="r\nERROR all is lost " + 10_000 * "x"), timeout=30))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (line,) = [line for line in caplog.records if "is refused" in line.getMessage()]
    assert "\n" not in line.getMessage() + vars(line)["ids"]["request_id"]
    assert len(line.getMessage()) < 500
    assert "request r\\nERROR" in line.getMessage()


async def test_request_id_and_seed_are_made_and_announced() -> None:
    scheduler = ScriptedScheduler(lambda _: [result(2)])
    async with serving(scheduler) as (stub, _):
        starts = [(await events(stub.Generate(request(), timeout=30)))[0].started for _ in range(2)]
    assert len({started.request_id for started in starts}) == 2
    assert [(r.request_id, r.sampling.seed) for r in scheduler.requests] == [(s.request_id, s.seed) for s in starts]


async def test_a_unary_call_does_not_wait_for_the_streams_that_came_before_it() -> None:
    async def be_busy() -> None:
        while True:
            # A turn of the event loop, in which all that was sent arrives.
            time.sleep(0.003)  # noqa: ASYNC251 - nothing else is to run
            await asyncio.sleep(0)

    scheduler = ScriptedScheduler(lambda _: [None])
    async with serving(scheduler) as (stub, channel):
        await channel.channel_ready()
        busy = asyncio.create_task(be_busy())
        streams = [stub.Generate(request(), timeout=30) for _ in range(50)]
        await asyncio.sleep(0)
        await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=30)
        begun = len(scheduler.requests)
        busy.cancel()
        for stream in streams:
            stream.cancel()
    assert begun < 25


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (events(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def test_wrong_fields_are_in_the_details() -> None:
    async with serving(ScriptedScheduler(lambda _: [])) as (stub, _):
        error = await failure(stub.Generate(request(text="", sampling_params={"top_p": 1.5}), timeout=30))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert {violation.field for violation in bad_request.field_violations} == {"text", "sampling_params.top_p"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", retry_after_s=1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (WorkerUnavailable("no target worker"), grpc.StatusCode.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("at_submit", [True, False])
async def test_errors_of_the_scheduler_get_their_status(
    error: OutriderError, code: grpc.StatusCode, at_submit: bool
) -> None:
    scheduler = ScriptedScheduler(lambda _: [delta(1), error])
    scheduler.error = error if at_submit else None
    async with serving(scheduler) as (stub, _):
        caught = await failure(stub.Generate(request(), timeout=30))
    assert (caught.code(), caught.details()) == (code, str(error))
    assert all(generation.is_cancelled.is_set() for generation in scheduler.generations)


async def test_a_full_coordinator_refuses_before_it_looks_at_the_prompt() -> None:
    scheduler = ScriptedScheduler(lambda _: [])
    scheduler.room = 0
    async with serving(scheduler) as (stub, _):
        caught = await failure(stub.Generate(request(text=""), timeout=30))
    assert caught.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_info, status = error_details_pb2.RetryInfo(), rpc_status.from_call(caught)  # type: ignore[arg-type]
    assert status is not None
    assert status.details[0].Unpack(retry_info)
    assert retry_info.retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
async def test_client_that_leaves_frees_the_generation(leave: str) -> None:
    scheduler = ScriptedScheduler(lambda _: [delta(1), None])
    async with serving(scheduler) as (stub, channel):
        call = stub.Generate(request(), timeout=30)
        await read(call)
        await read(call)
        if leave == "cancel":
            call.cancel()
        else:
            await channel.close()
        await asyncio.wait_for(scheduler.generations[0].is_cancelled.wait(), 30)


async def test_live_request_is_taken_over_with_its_seed() -> None:
    scripts = iter([[delta(4, text="a"), None], [delta(5, offset=1), result(2)]])
    scheduler = ScriptedScheduler(lambda _: next(scripts))
    received = [generation_pb2.Received(token_ids=[ALPHABET["a"]], text_bytes=1)]
    async with serving(scheduler) as (stub, _):
        params = generation_pb2.SamplingParams(temperature=1.0)
        old = stub.Generate(request(request_id="r", sampling_params=params), timeout=30)
        started = (await read(old)).started
        await read(old)
        new = await events(
            stub.Generate(request(request_id="r", sampling_params=params, received=received), timeout=30)
        )
        error = await failure(old)
    assert error.code() == grpc.StatusCode.ABORTED
    assert "took it over" in (error.details() or "")
    assert new[0].started.seed == started.seed
    assert dict(scheduler.requests[1].received) == {0: (ALPHABET["a"],)}
    # What the client had got is not part of the time a token takes here.
    assert new[-1].finished.timings.tpot_ms == 0


async def test_wrong_takeover_leaves_the_old_stream_alone() -> None:
    scheduler = ScriptedScheduler(lambda _: [None])
    async with serving(scheduler) as (stub, _):
        old = stub.Generate(request(request_id="r"), timeout=30)
        await read(old)
        error = await failure(stub.Generate(request(request_id="r", text=""), timeout=30))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert list((await stub.Abort(generation_pb2.AbortRequest(request_ids=["r"]))).aborted_request_ids) == ["r"]
        assert (await failure(old)).code() == grpc.StatusCode.ABORTED


async def test_abort_names_what_was_live() -> None:
    scheduler = ScriptedScheduler(lambda _: [None])
    async with serving(scheduler) as (stub, _):
        calls = {name: stub.Generate(request(request_id=name), timeout=30) for name in ("a", "b", "c")}
        for call in calls.values():
            await read(call)
        answer = await stub.Abort(generation_pb2.AbortRequest(request_ids=["b", "x", "a", "a"]))
        assert list(answer.aborted_request_ids) == ["b", "a"]
        for name in ("a", "b"):
            assert "aborted" in ((await failure(calls[name])).details() or "")
        calls["c"].cancel()
        await asyncio.wait_for(scheduler.generations[2].is_cancelled.wait(), 30)


async def test_model_info_server_info_watch() -> None:
    async with serving(ScriptedScheduler(lambda _: [])) as (stub, _):
        model = await stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
        assert (model.model, model.max_new_tokens_default) == (MODEL, 128)
        assert await stub.GetServerInfo(generation_pb2.GetServerInfoRequest()) == INFO
        watch = stub.Watch(generation_pb2.WatchRequest(interval_ms=100), timeout=30)
        assert [await read(watch) for _ in range(3)] == [INFO] * 3
        watch.cancel()
        error = await failure(stub.Watch(generation_pb2.WatchRequest(interval_ms=99), timeout=30))
        assert (error.code(), "99 given" in (error.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("Generate", field(2, b"\xff\xfe"), "text: broken UTF-8"),
        ("Generate", field(2, b"hi") + field(4, field(13, b"ok") + field(13, b"\xc3")), "sampling_params.stop[1]"),
        ("Generate", field(1, b"\x80") + field(2, b"\x80"), "request_id: broken UTF-8"),
        ("Generate", b"\xff\xff\xff", "these 3 bytes are no outrider.v1.GenerateRequest"),
        ("Generate", field(2, b"cut off")[:-3], "these 6 bytes are no"),
        ("Generate", field(2, b"hi") + b"\xa0\x06\x01", "no field 100"),
        ("Abort", field(1, b"\xf0"), "request_ids[0]: broken UTF-8"),
        ("Abort", b"\xa0\x06\x01", "outrider.v1.AbortRequest has no field 100"),
        ("GetModelInfo", b"\xa0\x06\x01", "no field 100"),
        ("GetServerInfo", b"\xa0\x06\x01", "no field 100"),
        ("Watch", b"\x0f", "these 1 bytes are no"),
    ],
)
async def test_bytes_that_are_no_request_are_answered(method: str, data: bytes, words: str) -> None:
    async with serving(ScriptedScheduler(lambda _: [])) as (_, channel):
        path = f"/{SERVICE.full_name}/{method}"
        open_call = channel.unary_stream if SERVICE.methods_by_name[method].server_streaming else channel.unary_unary
        error = await failure(open_call(path)(data, timeout=30))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")


async def test_large_prompt_does_not_stop_the_event_loop() -> None:
    scheduler = ScriptedScheduler(lambda _: [result(2)])
    async with serving(scheduler) as (stub, _):
        got = await events(stub.Generate(request(text="x" * 19_000), timeout=30))
    assert got[0].started.prompt_tokens == 19_000


async def test_health_and_reflection_know_the_service() -> None:
    async with serving(ScriptedScheduler(lambda _: [])) as (_, channel):
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # pyright: ignore[reportArgumentType]
        reflected = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name)])
        )
        found = [answer async for answer in reflected]
        assert found[0].file_descriptor_response.file_descriptor_proto
