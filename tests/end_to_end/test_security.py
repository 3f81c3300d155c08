"""Every role a process of its own, over mutual TLS, with a token at the public door."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider import rpc
from outrider.client import Client
from outrider.errors import Unauthenticated, WorkerUnavailable
from outrider.local import LocalService
from outrider.sampling import SamplingSpec
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.security.tokens import TokenEntry, add_token, hash_of, new_token
from outrider.v1 import draft_pb2_grpc, generation_pb2, registry_pb2, registry_pb2_grpc, target_pb2_grpc

from .conftest import PATIENT


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("secrets")
    write_development_set(folder, days=1)
    token = new_token()
    add_token(folder / "tokens.json", TokenEntry(name="test", sha256=hash_of(token)))
    secured: dict[str, Any] = {"certificates": folder, "token_file": folder / "tokens.json", "token": token}
    with LocalService(drafts=1, coordinator_args=PATIENT, **secured) as service:
        yield service


async def status_of(call: Any) -> str:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_the_same_tokens_and_nobody_else(service: LocalService, reference: Any, prompts: Any, differs: Any):
    folder = service.certificates
    assert folder is not None
    with service.client() as client:
        wanted = reference.generate(prompts[0], SamplingSpec(temperature=0.0, max_new_tokens=24, stop_token_ids=()))
        for speculation in ("async", "sync"):
            got = client.generate(
                prompts[0], max_new_tokens=24, ignore_eos=True, temperature=0.0, speculation=speculation
            )
            assert differs(got.token_ids, wanted) is None
        # A sync round waits for its draft: on a busy machine few tokens may be through before an async one has any.
        assert got.speculation.accepted_tokens > 0
        async with asyncio.timeout(100):
            # Loads come with heartbeats: until one says that the session and its slots have gone.
            while any(sessions or slots for *_, sessions, slots in loads(client.server_info())):
                await asyncio.sleep(0.1)
        before = client.server_info()

        tls = TlsConfig(ca=folder / "ca.pem")
        refused = {
            "no token": (Client(service.endpoint, tls=tls), Unauthenticated),
            "another token": (Client(service.endpoint, tls=tls, token=new_token()), Unauthenticated),
            "in the clear": (Client(service.endpoint, max_resumes=0), WorkerUnavailable),
        }
        for name, (stranger, kind) in refused.items():
            with stranger, pytest.raises(kind):
                assert not stranger.generate(prompts[0], max_new_tokens=4), name

        addresses = {worker.introduction.role: worker.introduction.address for worker in before.workers}
        roles = {registry_pb2.WORKER_ROLE_DRAFT: Role.DRAFT, registry_pb2.WORKER_ROLE_TARGET: Role.TARGET}
        for number, role in roles.items():
            for stranger in (Role.CLIENT, Role.DRAFT, Role.TARGET):
                own = TlsConfig.of_folder(folder, stranger)
                async with rpc.open_channel(addresses[number], tls=own, peer=role) as channel:
                    if role is Role.TARGET:
                        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=30)
                    else:
                        call = draft_pb2_grpc.DraftServiceStub(channel).Speculate(timeout=30)
                    assert await status_of(call) == "PERMISSION_DENIED", (role, stranger)

        draft = next(worker.introduction for worker in before.workers if worker.introduction.role == 1)
        await check_registrations(service, folder, draft)
        await asyncio.sleep(0.7)
        after = client.server_info()
        assert loads(after) == loads(before)
        assert after.requests_total == before.requests_total


async def check_registrations(service: LocalService, folder: Path, draft: registry_pb2.WorkerIntroduction) -> None:
    """Nobody registers as what its certificate does not say."""
    attempts = [
        (Role.DRAFT, registry_pb2.WORKER_ROLE_TARGET),
        (Role.TARGET, registry_pb2.WORKER_ROLE_DRAFT),
        (Role.CLIENT, registry_pb2.WORKER_ROLE_DRAFT),
        (Role.COORDINATOR, registry_pb2.WORKER_ROLE_TARGET),
    ]
    for holder, role in attempts:
        introduction = registry_pb2.WorkerIntroduction()
        introduction.CopyFrom(draft)
        introduction.worker_id, introduction.role = "stranger", role

        async def reports(introduction: Any = introduction) -> AsyncIterator[registry_pb2.WorkerReport]:
            yield registry_pb2.WorkerReport(introduction=introduction)

        own = TlsConfig.of_folder(folder, holder)
        async with rpc.open_channel(service.worker_endpoint, tls=own, peer=Role.COORDINATOR) as channel:
            registry, status = registry_pb2_grpc.RegistryServiceStub(channel), "INTERNAL"
            # What is written in the moment in which a call is refused ends it so on this side.
            while status == "INTERNAL":
                status = await status_of(registry.Register(reports(), timeout=30))
            assert status == "PERMISSION_DENIED", (holder, role)
    # At the clients' door a certificate is not even asked for.
    own = TlsConfig.of_folder(folder, Role.TARGET)
    async with rpc.open_channel(service.endpoint, tls=own, peer=Role.COORDINATOR) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Register(timeout=30)
        assert await status_of(call) == "UNAUTHENTICATED"


def loads(info: generation_pb2.ServerInfo) -> list[tuple[str, str, int, int]]:
    return [
        (worker.introduction.worker_id, worker.state, worker.load.sessions, worker.load.slots_used)
        for worker in info.workers
    ]
