"""The `health` command: asks one role whether it serves, for probes that have to speak TLS (Kubernetes' own do not)."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import rpc
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig


def health(
    *,
    endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="OUTRIDER_ENDPOINT", help="Address of a coordinator or a worker.")
    ] = "127.0.0.1:50051",
    tls_ca: Annotated[Path | None, typer.Option(help="Certificates of the authorities to believe (PEM).")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="Own certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    role: Annotated[
        Role | None, typer.Option(help="With TLS: who has to answer, whatever the address; default whoever has it.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Longest to wait for the answer, in seconds.")
    ] = 3.0,
) -> None:
    """Ask a role whether it serves: exit code 0 if it does, else 1 and the reason. For probes."""
    try:
        tls = TlsConfig.of_options(tls_ca, tls_certificate, tls_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    asyncio.run(check_health(endpoint, tls=tls, role=role, timeout_s=timeout_s))


async def check_health(address: str, *, tls: TlsConfig | None, role: Role | None, timeout_s: float) -> None:
    """Ask the health service at an address once.

    Args:
        address: host:port; with TLS, a door that takes certificates of this role.
        tls: own proof and whom to believe; None talks in the clear.
        role: that has to answer; None needs the host among the answerer's names.

    Raises:
        WorkerUnavailable: it does not answer in time, or does not serve.
        CertificateError: a file of `tls` cannot be read.
    """
    async with rpc.open_channel(address, tls=tls, peer=role) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs do not know its methods
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailable(f"{address} does not answer: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise WorkerUnavailable(f"{address} is {state}")
