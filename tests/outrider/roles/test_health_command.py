"""`outrider health`: what a probe hears of a role, with mutual TLS and without."""

import asyncio
from pathlib import Path

import pytest

from outrider import cli, rpc
from outrider.security.certificates import write_development_set
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig

# However busy the machine is, an answer comes in that time.
PATIENT = ("--timeout", "60")


def target_server(folder: Path | None) -> rpc.RoleServer:
    return rpc.RoleServer(
        services=["outrider.v1.TargetService"],
        add_services=lambda server: None,
        address="127.0.0.1:0",
        tls=None if folder is None else TlsConfig.of_folder(folder, Role.TARGET),
    )


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(cli.run, ["health", "--endpoint", *arguments])


def tls_options(folder: Path, role: str) -> list[str]:
    files = {"ca": "ca.pem", "certificate": f"{role}.pem", "key": f"{role}.key"}
    return [word for option, file in files.items() for word in (f"--tls-{option}", str(folder / file))]


async def test_a_probe_hears_whether_a_role_serves(capsys: pytest.CaptureFixture[str]):
    server = target_server(None)
    await server.start()
    answers: list[int] = []

    async def drain() -> None:
        answers.append(await probe(server.address, *PATIENT))

    try:
        assert await probe(server.address, *PATIENT) == 0
    finally:
        await server.stop(grace_s=0, drain=drain)
    assert answers == [cli.FAILED]
    assert "is NOT_SERVING" in capsys.readouterr().err
    assert await probe(server.address, *PATIENT) == cli.FAILED
    assert "does not answer" in capsys.readouterr().err


async def test_under_tls_a_probe_shows_a_certificate_and_wants_one_of_the_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_development_set(tmp_path, days=1)
    server = target_server(tmp_path)
    await server.start()
    own = tls_options(tmp_path, "target")
    try:
        assert await probe(server.address, *own, "--role", "target", *PATIENT) == 0
        assert await probe(server.address, *own, "--role", "draft", "--timeout", "1") == cli.FAILED
        assert await probe(server.address, "--timeout", "1") == cli.FAILED
        assert await probe(server.address, *own[:2]) == cli.BAD_ARGUMENTS
        assert "tls_certificate: missing" in capsys.readouterr().err
    finally:
        await server.stop(grace_s=0)
