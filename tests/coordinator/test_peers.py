"""Two coordinators of one service: what reaches one is about a request of the other; one address that both share."""

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tests.coordinator.running import coordinator_running
from tests.polling import until

from outrider import addresses, rpc
from outrider.client import AsyncClient
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.workers import peers
from outrider.coordinator.workers.peers import Peers
from outrider.roles.ports import free_port
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import generation_pb2, generation_pb2_grpc, peer_pb2, peer_pb2_grpc

# Without a target requests wait, and are as live as any.
WAITS = {"port": 0, "target_wait_s": 60.0, "drain_s": 0.0}
SAMPLED = generation_pb2.SamplingParams(temperature=1.0)
INFO = generation_pb2.GetServerInfoRequest()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a peer's answer comes in time, but where a test says otherwise."""
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(peers, "_ABORT_TIMEOUT_S", 60.0)


@contextlib.asynccontextmanager
async def coordinators(*configs: CoordinatorConfig) -> AsyncIterator[list[CoordinatorServer]]:
    addresses: list[str] = []

    async def resolve() -> Sequence[str]:
        return addresses

    servers = [CoordinatorServer(config, peers=resolve) for config in configs]
    addresses += [server.worker_address for server in servers]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@contextlib.asynccontextmanager
async def asks(listed: Sequence[str], **options: Any) -> AsyncIterator[Peers]:
    """One that knows these coordinators as its peers."""

    async def resolve() -> Sequence[str]:
        return listed

    asking = Peers(incarnation=1, resolve=resolve, **options)
    asking.start()
    try:
        if not options:
            await until(lambda: len(asking._followed.members) == len(listed))
        yield asking
    finally:
        await asking.close()


@contextlib.contextmanager
def mute_peer() -> Iterator[str]:
    """The address of one that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"127.0.0.1:{mute.getsockname()[1]}"


@pytest_asyncio.fixture
async def stubs() -> AsyncIterator[list[generation_pb2_grpc.GenerationServiceStub]]:
    async with (
        coordinators(*[CoordinatorConfig(**WAITS)] * 2) as servers,
        rpc.open_channel(servers[0].address) as first,
        rpc.open_channel(servers[1].address) as second,
    ):
        yield [generation_pb2_grpc.GenerationServiceStub(channel) for channel in (first, second)]


def request(request_id: str, text: str = "import os") -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=text, request_id=request_id, sampling_params=SAMPLED)


async def begin(stub: generation_pb2_grpc.GenerationServiceStub, request_id: str):
    call = stub.Generate(request(request_id), timeout=60)
    return call, (await anext(aiter(call))).started


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


async def test_a_request_is_aborted_by_way_of_the_other(stubs):
    here, there = stubs
    call, _ = await begin(here, "a")
    other, _ = await begin(there, "b")
    answer = await there.Abort(generation_pb2.AbortRequest(request_ids=["x", "b", "a", "a"]))
    assert list(answer.aborted_request_ids) == ["b", "a"]
    for ended in (call, other):
        error = await failure(ended)
        assert error.code() == grpc.StatusCode.ABORTED
        assert "it was aborted" in (error.details() or "")
    assert not (await there.Abort(generation_pb2.AbortRequest(request_ids=["a"]))).aborted_request_ids


async def test_a_request_is_taken_over_by_the_other_with_its_seed(stubs):
    here, there = stubs
    call, started = await begin(here, "r")
    # One that cannot be served takes nothing over.
    refused = await failure(there.Generate(request("r", text=""), timeout=60))
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    again, resumed = await begin(there, "r")
    assert resumed.seed == started.seed
    assert "took it over" in ((await failure(call)).details() or "")
    # And back, with none of the first coordinator's own in the way.
    back, third = await begin(here, "r")
    assert third.seed == started.seed
    assert "took it over" in ((await failure(again)).details() or "")
    back.cancel()


async def test_other_requests_are_left_alone(stubs):
    here, there = stubs
    call, _ = await begin(here, "r")
    other, _ = await begin(there, "s")
    for running in (call, other):
        assert not running.done()
        running.cancel()


async def test_a_peer_that_does_not_answer_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.05)
    with mute_peer() as mute:
        async with asyncio.timeout(30), asks([mute, f"127.0.0.1:{free_port()}"]) as asking:
            assert await asking.find(("", "r")) is None
            assert all(peer.is_avoided for peer in asking._followed.members.values())
            assert await asking.end("", ["r"], "it was aborted") == set()
            monkeypatch.setattr(peers, "_ABORT_TIMEOUT_S", 0.05)
            assert await asking.abort("", ["r"], "it was aborted") == set()


async def test_an_abort_waits_for_a_peer_that_was_slow(monkeypatch: pytest.MonkeyPatch):
    async with (
        asyncio.timeout(30),
        coordinators(CoordinatorConfig(**WAITS)) as (server,),
        asks([server.address]) as asking,
        rpc.open_channel(server.address) as channel,
    ):
        call, _ = await begin(generation_pb2_grpc.GenerationServiceStub(channel), "r")
        # Over before it is asked.
        monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", -1.0)
        assert await asking.find(("", "r")) is None
        assert all(peer.is_avoided for peer in asking._followed.members.values())
        assert await asking.end("", ["r"], "it was aborted") == set()
        assert await asking.abort("", ["r"], "it was aborted") == {"r"}
        assert "it was aborted" in ((await failure(call)).details() or "")


async def test_a_peer_that_leaves_the_list_while_it_is_asked_ends_no_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "_RESOLVE_PAUSE_S", 0.05)
    with mute_peer() as mute:
        listed = [mute]
        async with asyncio.timeout(30), asks(listed) as asking:
            finding = asyncio.create_task(asking.find(("", "r")))
            given_up = asyncio.create_task(asking.find(("", "s")))
            await asyncio.sleep(0.1)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            listed.clear()
            assert await finding is None


async def test_a_peer_that_is_asked_for_too_much_is_asked_again():
    async with (
        asyncio.timeout(30),
        coordinators(CoordinatorConfig(**WAITS)) as (server,),
        asks([server.address]) as asking,
        rpc.open_channel(server.address) as channel,
    ):
        call, started = await begin(generation_pb2_grpc.GenerationServiceStub(channel), "r")
        assert await asking.end("", ["x" * rpc.MAX_MESSAGE_BYTES], "it was aborted") == set()
        assert await asking.find(("", "r")) == started.seed
        call.cancel()


async def test_a_list_that_does_not_come_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "_RESOLVE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(addresses, "_RESOLVE_PAUSE_S", 0.02)
    asked: list[bool] = []

    async def resolve() -> Sequence[str]:
        asked.append(True)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return ["127.0.0.1:1"]

    asking = Peers(incarnation=1, resolve=resolve)
    asking.start()
    await until(lambda: asking._followed.members)
    await asking.close()


async def test_peers_are_known_once_certificates_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(addresses, "_RESOLVE_PAUSE_S", 0.02)
    tls = TlsConfig.of_folder(tmp_path, Role.COORDINATOR)
    async with asyncio.timeout(30), asks(["127.0.0.1:1"], tls=tls) as asking:
        await until(lambda: "the list of coordinators cannot be followed" in caplog.text)
        write_development_set(tmp_path, days=1)
        await until(lambda: asking._followed.members)


async def test_nobody_is_asked_about_a_request_whose_id_the_http_door_has_made_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "_ANSWER_TIMEOUT_S", 0.05)
    with mute_peer() as mute:

        async def resolve() -> Sequence[str]:
            return [mute]

        async with asyncio.timeout(30), coordinator_running(http_port=0, target_wait_s=0.05, peers=resolve) as server:
            await until(lambda: server._peers._followed.members)
            url, body = f"http://{server.http_address}/v1/completions", b'{"prompt": "import os"}'
            # There is no target: it has come as far as that.
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(fetch, urllib.request.Request(url, body, {"Content-Type": "application/json"}))
            assert not any(peer.is_avoided for peer in server._peers._followed.members.values())


async def test_a_coordinator_asks_itself_for_nothing():
    async with coordinators(CoordinatorConfig(**WAITS)) as (server,), rpc.open_channel(server.address) as channel:
        generations, asked = generation_pb2_grpc.GenerationServiceStub(channel), peer_pb2_grpc.PeerServiceStub(channel)
        incarnation = (await generations.GetServerInfo(INFO)).incarnation
        call, started = await begin(generations, "r")
        found = await asked.Find(peer_pb2.FindRequest(incarnation=incarnation, request_id="r"))
        assert not found.is_live
        ended = await asked.End(peer_pb2.EndRequest(incarnation=incarnation, request_ids=["r"]))
        assert not ended.request_ids
        assert (await asked.Find(peer_pb2.FindRequest(incarnation=7, request_id="r"))).seed == started.seed
        assert not (await asked.Find(peer_pb2.FindRequest(incarnation=7, caller="x", request_id="r"))).is_live
        call.cancel()


async def test_connections_to_a_shared_port_are_spread_and_move_on():
    shared, http = free_port(), free_port()
    config = CoordinatorConfig(**WAITS, http_port=0, shared_port=shared, shared_http_port=http)
    async with coordinators(config, config) as servers:
        async with AsyncClient(f"127.0.0.1:{shared}", connections=24) as client:
            assert client.endpoints == (f"127.0.0.1:{shared}",)

            async def answering() -> Counter[str]:
                return Counter([(await own.stub.GetServerInfo(INFO, timeout=30)).address for own in client._endpoints])

            assert set(await answering()) == {server.address for server in servers}
            taken = int(servers[0].address.rpartition(":")[2])
            with pytest.raises(OSError, match="is the port taken"):
                CoordinatorServer(CoordinatorConfig(port=taken, shared_port=shared))
            await servers[0].stop()
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        assert await answering() == {servers[1].address: 24}
                        break
        for _ in range(4):
            assert await asyncio.to_thread(fetch, f"http://127.0.0.1:{http}/health") == b'{"status":"serving"}'


async def test_with_certificates_only_coordinators_ask_each_other(tmp_path: Path):
    write_development_set(tmp_path, days=1)
    own, client = TlsConfig.of_folder(tmp_path, Role.COORDINATOR), TlsConfig(ca=tmp_path / "ca.pem")
    proof = {"tls_ca": own.ca, "tls_certificate": own.certificate, "tls_key": own.key}
    shared = f"127.0.0.1:{free_port()}"
    config = CoordinatorConfig(**WAITS, **proof, worker_port=0, shared_port=int(shared.rpartition(":")[2]))
    async with (
        coordinators(config, config) as (here, there),
        rpc.open_channel(here.address, tls=client) as channel,
        rpc.open_channel(there.address, tls=client) as other,
        rpc.open_channel(shared, tls=client) as anybody,
    ):
        call, _ = await begin(generation_pb2_grpc.GenerationServiceStub(channel), "r")
        answer = await generation_pb2_grpc.GenerationServiceStub(other).Abort(
            generation_pb2.AbortRequest(request_ids=["r"])
        )
        assert list(answer.aborted_request_ids) == ["r"]
        assert (await failure(call)).code() == grpc.StatusCode.ABORTED
        for door in (channel, anybody):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await peer_pb2_grpc.PeerServiceStub(door).Find(peer_pb2.FindRequest(request_id="r"), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def fetch(url: str | urllib.request.Request) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return response.read()
