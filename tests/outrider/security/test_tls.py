import datetime
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import cli, rpc
from outrider.errors import CertificateError
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import registry_pb2, registry_pb2_grpc, target_pb2, target_pb2_grpc

LONG_AGO = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
SOON = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)


class Called(target_pb2_grpc.TargetServiceServicer, registry_pb2_grpc.RegistryServiceServicer):
    """Two services that note who got through."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        self.calls.append("Verify")
        await context.write(target_pb2.RoundResults(session_ids=[7]))

    async def Register(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        self.calls.append("Register")
        await context.write(registry_pb2.Lease(incarnation=7))


@pytest.fixture
def called() -> Called:
    return Called()


@pytest_asyncio.fixture
async def server(authority: Any, called: Called) -> AsyncIterator[rpc.RoleServer]:
    def add(server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(called, server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(called, server)

    server = rpc.RoleServer(
        services=["outrider.v1.TargetService"],
        add_services=add,
        address="127.0.0.1:0",
        public_address="127.0.0.1:0",
        tls=authority.tls(Role.COORDINATOR),
    )
    await server.start()
    yield server
    await server.stop(grace_s=0)


async def outcome(address: str, tls: TlsConfig | None, method: str, peer: Role | None = Role.COORDINATOR) -> str:
    """OK or the status of one call."""
    async with rpc.open_channel(address, tls=tls, peer=peer) as channel:
        try:
            if method == "Check":
                check = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
                await check(health_pb2.HealthCheckRequest(), timeout=30)
            elif method == "Verify":
                call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=30)
                assert (await call.read()).session_ids == [7]
            else:
                call = registry_pb2_grpc.RegistryServiceStub(channel).Register(timeout=30)
                assert (await call.read()).incarnation == 7
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_services_are_for_their_roles(server: rpc.RoleServer, authority: Any, called: Called):
    expected = {
        Role.COORDINATOR: ("OK", "PERMISSION_DENIED"),
        Role.TARGET: ("PERMISSION_DENIED", "OK"),
        Role.DRAFT: ("PERMISSION_DENIED", "OK"),
        Role.CLIENT: ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    }
    for role, statuses in expected.items():
        tls = authority.tls(role)
        assert (
            await outcome(server.address, tls, "Verify"),
            await outcome(server.address, tls, "Register"),
        ) == statuses
        assert await outcome(server.address, tls, "Check") == "OK"
    assert called.calls == ["Verify", "Register", "Register"]


async def test_the_public_door_takes_no_worker(server: rpc.RoleServer, authority: Any, called: Called):
    assert server.public_address != server.address
    no_certificate = TlsConfig(ca=authority.ca)
    for tls in (no_certificate, authority.tls(Role.TARGET)):
        assert await outcome(server.public_address, tls, "Check", peer=None) == "OK"
        assert await outcome(server.public_address, tls, "Register", peer=None) == "UNAUTHENTICATED"
        assert await outcome(server.public_address, tls, "Verify", peer=None) == "UNAUTHENTICATED"
    assert called.calls == []


async def test_bad_certificates_do_not_connect(
    server: rpc.RoleServer, authority: Any, make_ca: Callable[[str], Any], called: Called
):
    good = authority.tls(Role.TARGET)
    bad = {
        "expired": authority.tls(Role.TARGET, "expired", not_before=LONG_AGO),
        "not yet valid": authority.tls(Role.TARGET, "early", not_before=SOON),
        "of another authority": make_ca("other").tls(Role.TARGET, ca=authority.ca),
        "none": TlsConfig(ca=authority.ca),
        "in the clear": None,
        "who believes another authority": replace(good, ca=make_ca("third").ca),
    }
    for name, tls in bad.items():
        assert await outcome(server.address, tls, "Register") == "UNAVAILABLE", name
    assert await outcome(server.address, good, "Register") == "OK"
    assert called.calls == ["Register"]


async def test_who_dials_a_role_gets_no_other(server: rpc.RoleServer, authority: Any):
    tls = authority.tls(Role.COORDINATOR, "dialling")
    assert await outcome(server.address, tls, "Check", peer=Role.TARGET) == "UNAVAILABLE"
    # By its address it is known as well: the certificate names 127.0.0.1, not localhost.
    assert await outcome(server.address, tls, "Check", peer=None) == "OK"
    elsewhere = server.address.replace("127.0.0.1", "localhost")
    assert await outcome(elsewhere, tls, "Check", peer=None) == "UNAVAILABLE"


async def test_renewed_files_need_no_restart(server: rpc.RoleServer, authority: Any, make_ca: Callable[[str], Any]):
    client = authority.tls(Role.TARGET)
    assert await outcome(server.address, client, "Register") == "OK"
    other = make_ca("other")
    authority.ca.write_bytes(other.ca.read_bytes())
    made = other.tls(Role.COORDINATOR)
    for kind in ("pem", "key"):
        (authority.folder / f"coordinator.{kind}").write_bytes(
            (made.certificate.parent / f"coordinator.{kind}").read_bytes()
        )
    assert await outcome(server.address, other.tls(Role.TARGET), "Register") == "OK"


def test_own_files_are_checked(authority: Any, make_ca: Callable[[str], Any], tmp_path: Path):
    good = authority.tls(Role.DRAFT)
    good.check(Role.DRAFT)
    TlsConfig(ca=authority.ca).check()
    other = make_ca("other").tls(Role.DRAFT)
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    faults = {
        "draft.pem is a certificate of draft, target needed": (good, Role.TARGET),
        "a target needs tls_certificate": (TlsConfig(ca=authority.ca), Role.TARGET),
        "is expired since": (authority.tls(Role.DRAFT, "old", not_before=LONG_AGO), None),
        "is not valid before": (authority.tls(Role.DRAFT, "new", not_before=SOON), None),
        "was not issued by": (replace(other, ca=authority.ca), None),
        "is not the key of": (replace(good, key=other.key), None),
        "no private key in PEM form": (replace(good, key=no_pem), None),
        "tls_certificate: .* holds no certificate": (replace(good, certificate=no_pem), None),
        "tls_ca: .* holds no certificate": (replace(good, ca=no_pem), None),
        "cannot be read": (replace(good, ca=tmp_path / "none"), None),
    }
    for message, (tls, role) in faults.items():
        with pytest.raises(CertificateError, match=message):
            tls.check(role)
    with pytest.raises(ValueError, match="tls_key: missing"):
        TlsConfig.of_options(good.ca, good.certificate, None)
    assert TlsConfig.of_options(None, None, None) is None


def test_a_development_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "certs"
    assert cli.run(["certs", str(folder), "--host", "llm.example", "--days", "3"]) == 0
    for role in Role:
        TlsConfig.of_folder(folder, role).check(role)
    keys = list(folder.glob("*.key"))
    assert len(keys) == 5
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    before = (folder / "ca.pem").read_bytes()
    assert cli.run(["certs", str(folder)]) == cli.FAILED
    assert "--force" in capsys.readouterr().err
    assert (folder / "ca.pem").read_bytes() == before
    assert cli.run(["certs", str(folder), "--force"]) == 0
    assert (folder / "ca.pem").read_bytes() != before
    assert cli.run(["certs", str(tmp_path / "x"), "--host", "no name"]) == cli.BAD_ARGUMENTS
    assert not (tmp_path / "x").exists()
