"""The public door over loopback gRPC: who may come in, and how often."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tests.coordinator.scripted_scheduler import ScriptedScheduler, delta, grpc_door, result
from tests.polling import until

from outrider.client.errors import error_of
from outrider.coordinator.api.access import MAX_WATCHES
from outrider.coordinator.api.service import SERVICE, GenerationServicer
from outrider.coordinator.sessions import clock
from outrider.errors import InvalidRequest, Overloaded, Unauthenticated
from outrider.security.bearer import authorized
from outrider.security.tokens import TokenEntry, hash_of, new_token
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

MODEL = common_pb2.ModelInfo(name="tiny", vocab_size=256, max_model_len=100, eos_token_ids=[0])
ALICE, BOB, UNKNOWN = new_token(), new_token(), new_token()


class Door:
    """A server with tokens, and what the test does at it."""

    def __init__(self, channel: grpc.aio.Channel, scheduler: ScriptedScheduler, servicer: GenerationServicer) -> None:
        self.channel = channel
        self.scheduler = scheduler
        self.servicer = servicer

    def stub(self, token: str | None) -> Any:
        return authorized(generation_pb2_grpc.GenerationServiceStub(self.channel), token)

    async def start(self, token: str | None, request_id: str = "", **params: Any) -> Any:
        """A generation that runs: `Started` has come, and the four tokens. Raises what refuses it."""
        request = generation_pb2.GenerateRequest(
            request_id=request_id, token_ids={"ids": [5]}, sampling_params={"seed": 1, **params}
        )
        call = self.stub(token).Generate(request, timeout=30)
        try:
            started = await call.read()
            assert started.HasField("started")
            await call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return call

    async def finish(self, call: Any) -> None:
        self.scheduler.generations[-1].go_on.set()
        assert (await call.read()).HasField("finished")
        assert await call.code() is grpc.StatusCode.OK


@contextlib.asynccontextmanager
async def serving(path: Path, **alice: int) -> AsyncIterator[Door]:
    write_tokens(path, TokenEntry(name="alice", sha256=hash_of(ALICE), **alice), BOB_ENTRY)
    scheduler = ScriptedScheduler(lambda _: [delta(1, 2, 3, 4), None, result(4)])
    async with grpc_door(scheduler, model=MODEL, token_file=path) as (channel, servicer):
        yield Door(channel, scheduler, servicer)


BOB_ENTRY = TokenEntry(name="bob", sha256=hash_of(BOB))


def write_tokens(path: Path, *entries: TokenEntry) -> None:
    fields = [{key: value for key, value in vars(entry).items() if value is not None} for entry in entries]
    path.write_text(json.dumps({"tokens": fields}))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def seconds() -> Iterator[list[float]]:
    """The coordinator's time, which only the test moves."""
    now = [0.0]
    with clock.replaced_by(lambda: int(now[0] * 1e9)):
        yield now


async def test_every_method_but_health_needs_a_token(tokens: Path):
    async with serving(tokens) as door:
        calls = {
            "Generate": generation_pb2.GenerateRequest(token_ids={"ids": [5]}),
            "Abort": generation_pb2.AbortRequest(request_ids=["x"]),
            "GetModelInfo": generation_pb2.GetModelInfoRequest(),
            "GetServerInfo": generation_pb2.GetServerInfoRequest(),
            "Watch": generation_pb2.WatchRequest(),
        }
        assert calls.keys() == {method.name for method in SERVICE.methods}
        for name, request in calls.items():
            for token in (None, UNKNOWN, "", "alice", ALICE[:-1], ALICE + "x", hash_of(ALICE)):
                call = getattr(door.stub(token), name)(request, timeout=30)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call.read() if hasattr(call, "read") else call)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, (name, token)
                assert isinstance(error_of(caught.value), Unauthenticated)
        assert door.scheduler.generations == []
        reflected = door.channel.stream_stream(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")(timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        watch = health_pb2_grpc.HealthStub(door.channel).Watch  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(health_pb2.HealthCheckRequest(), timeout=30).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        check = health_pb2_grpc.HealthStub(door.channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        assert (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await door.stub(ALICE).GetModelInfo(calls["GetModelInfo"])).model == MODEL
        await door.finish(await door.start(ALICE))


async def test_a_large_message_without_a_token_is_not_read(tokens: Path):
    async with serving(tokens) as door:
        generate = door.channel.unary_stream("/outrider.v1.GenerationService/Generate")
        call = generate(bytes(32 << 20), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        # Were it read, it would be too large, and no message of this protocol.
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_another_tokens_requests_are_out_of_reach(tokens: Path):
    async with serving(tokens) as door:
        call = await door.start(ALICE, "mine")
        abort = generation_pb2.AbortRequest(request_ids=["mine"])
        assert list((await door.stub(BOB).Abort(abort)).aborted_request_ids) == []
        # The same id is another request of Bob's: Alice's goes on.
        other = await door.start(BOB, "mine")
        assert list((await door.stub(BOB).Abort(abort)).aborted_request_ids) == ["mine"]
        with pytest.raises(grpc.aio.AioRpcError, match="it was aborted"):
            await other.read()
        assert not door.scheduler.generations[0].go_on.is_set()
        taken_over = await door.start(ALICE, "mine")
        with pytest.raises(grpc.aio.AioRpcError, match="another stream took it over"):
            await call.read()
        await door.finish(taken_over)
        assert [request.caller for request in door.scheduler.requests] == ["alice", "bob", "alice"]


async def refusal(door: Door, token: str, request_id: str = "", **params: Any) -> Overloaded:
    before = len(door.scheduler.generations)
    with pytest.raises(Overloaded) as caught:
        await door.start(token, request_id, **params)
    assert len(door.scheduler.generations) == before
    return caught.value


async def test_requests_a_minute(tokens: Path, seconds: list[float]):
    async with serving(tokens, requests_per_minute=2) as door:
        for _ in range(2):
            await door.finish(await door.start(ALICE))
        assert (await refusal(door, ALICE)).retry_after_s == pytest.approx(30)
        await door.finish(await door.start(BOB))
        seconds[0] = 29.9
        assert (await refusal(door, ALICE)).retry_after_s == pytest.approx(0.1)
        seconds[0] = 30.1
        await door.finish(await door.start(ALICE))
        await refusal(door, ALICE)
        # Minutes of silence save up no more than one.
        seconds[0] = 3600
        for _ in range(2):
            await door.finish(await door.start(ALICE))
        await refusal(door, ALICE)


async def test_choices_at_a_time(tokens: Path):
    async with serving(tokens, max_concurrent=2) as door:
        first = await door.start(ALICE, "first")
        await refusal(door, ALICE, n=2)
        second = await door.start(ALICE)
        assert "at most 2 at a time" in str(await refusal(door, ALICE))
        # Taking over one's own request needs no place beside it; where that is refused, the first has its place still.
        with pytest.raises(InvalidRequest):
            await door.start(ALICE, "first", top_p=9.0)
        await refusal(door, ALICE)
        first = await door.start(ALICE, "first")
        await refusal(door, ALICE)
        await door.finish(first)
        third = await door.start(ALICE)
        await refusal(door, ALICE)
        for call in (second, third):
            call.cancel()
        await until(lambda: not door.servicer.generations.live)
        await door.start(ALICE, n=2)


async def test_watches_at_a_time(tokens: Path):
    async with serving(tokens) as door:
        calls = [door.stub(ALICE).Watch(generation_pb2.WatchRequest(), timeout=30) for _ in range(MAX_WATCHES)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door.stub(ALICE).Watch(generation_pb2.WatchRequest(), timeout=30).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await door.stub(BOB).Watch(generation_pb2.WatchRequest(), timeout=30).read()
        calls[0].cancel()
        async with asyncio.timeout(30):
            while True:
                try:
                    await door.stub(ALICE).Watch(generation_pb2.WatchRequest(), timeout=30).read()
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


async def test_output_tokens_a_minute(tokens: Path, seconds: list[float]):
    async with serving(tokens, tokens_per_minute=6) as door:
        # Each emits four; what was begun goes on, and the debt is made up for: -2, then 1 after half a minute.
        await door.finish(await door.start(ALICE))
        await door.finish(await door.start(ALICE))
        assert (await refusal(door, ALICE)).retry_after_s == pytest.approx(30)
        seconds[0] = 30.1
        await door.finish(await door.start(ALICE))
        assert (await refusal(door, ALICE)).retry_after_s == pytest.approx(39.9)


async def test_the_file_is_obeyed_as_it_changes(tokens: Path, seconds: list[float]):
    async with serving(tokens, max_concurrent=2) as door:
        running = await door.start(ALICE)
        write_tokens(tokens, TokenEntry(name="alice", sha256=hash_of(ALICE), max_concurrent=1))
        seconds[0] += 1
        # The request that was running before counts against the new limit, and Bob is gone.
        await refusal(door, ALICE)
        with pytest.raises(Unauthenticated):
            await door.start(BOB)
        tokens.write_text("{")
        seconds[0] += 1
        await refusal(door, ALICE)
        await door.finish(running)
        await door.finish(await door.start(ALICE))
