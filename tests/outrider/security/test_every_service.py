"""Every method of every service against every certificate: nobody gets through who is not named for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider import rpc
from outrider.security.callers import KINDS
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import draft_pb2, generation_pb2, peer_pb2, registry_pb2, target_pb2

FILES = (draft_pb2, generation_pb2, peer_pb2, registry_pb2, target_pb2)
METHODS = {
    f"{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
WORKERS, COORDINATOR = frozenset({Role.DRAFT, Role.TARGET}), frozenset({Role.COORDINATOR})
# What whoever has a token may call is in test_access.py: certificates say nothing of it.
ALLOWED = {
    "outrider.v1.TargetService/Verify": COORDINATOR,
    "outrider.v1.TargetService/Reload": COORDINATOR,
    "outrider.v1.DraftService/Speculate": COORDINATOR,
    "outrider.v1.RegistryService/Register": WORKERS,
    "outrider.v1.RegistryService/Reload": COORDINATOR,
    "outrider.v1.PeerService/Find": COORDINATOR,
    "outrider.v1.PeerService/End": COORDINATOR,
    **{name: frozenset(Role) for name in METHODS if name.startswith("outrider.v1.GenerationService/")},
}


def kind_of(method: Any) -> str:
    """Such as unary_stream."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))


def handlers(calls: list[str]) -> Iterator[grpc.GenericRpcHandler]:
    """Yield handlers of all methods, each of which notes that somebody got through."""
    for name, method in METHODS.items():
        service, _, short = name.partition("/")

        async def stream(request: Any, context: Any, name: str = name) -> AsyncIterator[bytes]:
            calls.append(name)
            yield b""

        async def answer(request: Any, context: Any, name: str = name) -> bytes:
            calls.append(name)
            return b""

        kind = kind_of(method)
        assert kind in KINDS
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        yield grpc.method_handlers_generic_handler(
            service, {short: make(stream if method.server_streaming else answer)}
        )


def add_all(server: grpc.aio.Server, calls: list[str]) -> None:
    for handler in handlers(calls):
        server.add_generic_rpc_handlers((handler,))


@asynccontextmanager
async def serving(tls: TlsConfig, calls: list[str]) -> AsyncIterator[rpc.RoleServer]:
    server = rpc.RoleServer(
        services=sorted({name.partition("/")[0] for name in METHODS}),
        add_services=lambda server: add_all(server, calls),
        address="127.0.0.1:0",
        public_address="127.0.0.1:0",
        tls=tls,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0)


async def silence() -> AsyncIterator[bytes]:
    """Yield nothing for ever: a message written while a call is refused would end it with INTERNAL on this side."""
    await asyncio.Event().wait()
    yield b""


async def statuses(address: str, tls: TlsConfig | None) -> dict[str, str]:
    """Return the status of a call of each method."""
    found = {}
    async with rpc.open_channel(address, tls=tls, peer=None) as channel:
        for name, method in METHODS.items():
            kind = kind_of(method)
            call = getattr(channel, kind)(f"/{name}")
            request = silence() if method.client_streaming else b""
            try:
                if method.server_streaming:
                    async for _ in call(request, timeout=30):
                        pass
                else:
                    await call(request, timeout=30)
                found[name] = "OK"
            except grpc.aio.AioRpcError as error:
                found[name] = error.code().name
    return found


def test_every_method_is_named_here():
    assert set(ALLOWED) == set(METHODS)


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_reaches_what_is_named_for_it(authority: Any, role: Role):
    calls: list[str] = []
    async with serving(authority.tls(Role.COORDINATOR, "server"), calls) as server:
        found = await statuses(server.address, authority.tls(role))
    assert found == {name: "OK" if role in ALLOWED[name] else "PERMISSION_DENIED" for name in METHODS}
    assert sorted(calls) == sorted(name for name in METHODS if role in ALLOWED[name])


async def test_what_is_for_roles_is_refused_at_the_public_door(authority: Any):
    calls: list[str] = []
    async with serving(authority.tls(Role.COORDINATOR, "server"), calls) as server:
        for tls in (TlsConfig(ca=authority.ca), authority.tls(Role.COORDINATOR)):
            calls.clear()
            found = await statuses(server.public_address, tls)
            # It asks for no certificate, so a good one is not seen there either.
            expected = {name: "OK" if ALLOWED[name] == set(Role) else "UNAUTHENTICATED" for name in METHODS}
            assert found == expected
            assert sorted(calls) == sorted(name for name in METHODS if expected[name] == "OK")


async def test_no_method_is_reached_with_a_bad_certificate(authority: Any, make_ca: Callable[[str], Any]):
    calls: list[str] = []
    strangers = make_ca("other")
    async with serving(authority.tls(Role.COORDINATOR, "server"), calls) as server:
        for role in Role:
            found = await statuses(server.address, strangers.tls(role, ca=authority.ca))
            assert set(found.values()) == {"UNAVAILABLE"}, role
        for tls in (TlsConfig(ca=authority.ca), None):
            assert set((await statuses(server.address, tls)).values()) == {"UNAVAILABLE"}
    assert calls == []
