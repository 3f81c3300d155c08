import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc  # pyright: ignore[reportAttributeAccessIssue] compiled
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import errors, rpc
from outrider.roles.ports import free_port


def every_error(kind: type[errors.OutriderError] = errors.OutriderError) -> list[type[errors.OutriderError]]:
    return [found for below in kind.__subclasses__() for found in (below, *every_error(below))]


def test_every_error_has_a_code():
    assert every_error()
    for kind in every_error():
        assert any(issubclass(kind, known) for known in rpc.CODES), kind


def test_violations_travel_as_details():
    error = errors.InvalidRequest([errors.FieldViolation("top_p", "too high"), errors.FieldViolation("n", "zero")])
    status = rpc.status_of(error)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.message == "top_p: too high; n: zero"
    assert [violation.field for violation in details_of(status)] == ["top_p", "n"]


def test_overload_says_when_to_retry():
    status = rpc.status_of(errors.Overloaded("full", retry_after_s=1.5))
    detail = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(detail)
    assert (detail.retry_delay.seconds, detail.retry_delay.nanos) == (1, 500_000_000)


async def test_a_role_server_is_healthy_until_it_stops():
    server = rpc.RoleServer(
        services=["outrider.v1.TargetService"], add_services=lambda server: None, address="127.0.0.1:0"
    )
    await server.start()
    seen = []

    async def drain() -> None:
        seen.append(await health(server.address))

    assert await health(server.address) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(OSError, match=str(server.port)):
        rpc.RoleServer(services=[], add_services=lambda server: None, address=server.address)
    await server.stop(grace_s=0, drain=drain)
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_health_of_services_that_are_served_and_of_others():
    """As https://github.com/grpc/grpc/blob/master/doc/health-checking.md says."""
    serving, service = health_pb2.HealthCheckResponse.SERVING, "outrider.v1.TargetService"
    server = rpc.RoleServer(services=[service], add_services=lambda server: None, address="127.0.0.1:0")
    await server.start()
    async with rpc.open_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)).status == serving
        for name in ("outrider.v1.NoService", "x" * 50_000):
            with pytest.raises(grpc.aio.AioRpcError, match=f"served here: {service}") as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="outrider.v1.NoService"), timeout=60)
        assert (await anext(aiter(watching))).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watching.cancel()
        request = health_pb2.HealthListRequest()  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
        listed = (await stub.List(request, timeout=60)).statuses
        assert {name: answer.status for name, answer in listed.items()} == {"": serving, service: serving}
    await server.stop(grace_s=0)


async def test_a_shared_port_is_the_others_while_calls_that_run_go_on():
    shared, services = f"127.0.0.1:{free_port()}", ["outrider.v1.TargetService"]
    options = {"services": services, "add_services": lambda server: None, "shared_address": shared}
    going, staying = (rpc.RoleServer(address="127.0.0.1:0", **options) for _ in range(2))
    await going.start()
    await staying.start()
    async with rpc.open_channel(going.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        states = aiter(watching)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING

        async def drain() -> None:
            assert (await anext(states)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for _ in range(12):
                assert await health(shared) == health_pb2.HealthCheckResponse.SERVING
            assert not watching.done()

        await going.stop(grace_s=0, drain=drain)
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(states)
    with pytest.raises(OSError, match=str(staying.port)):
        rpc.RoleServer(address=staying.address, **options)
    await staying.stop(grace_s=0)


async def health(address: str) -> int:
    async with rpc.open_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return (await check(health_pb2.HealthCheckRequest(service="outrider.v1.TargetService"))).status


_OPTIONS = (*rpc.SERVER_OPTIONS, *rpc.CHANNEL_OPTIONS, *rpc.unread_options(1))


@pytest.mark.parametrize("name", sorted({name for name, _ in _OPTIONS}))
def test_grpc_knows_every_option(name: str):
    # It takes any name and ignores what it does not know: a misspelt one shows nowhere else.
    assert name.encode() in _library()


@functools.cache
def _library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", ["x" * 50_000, "\U0001f600" * 9_000, "100%\n" * 9_000])
async def test_a_message_of_any_length_fits_the_metadata(name: str):
    """A worker that named its model at length was told RESOURCE_EXHAUSTED by its own client, and no reason."""
    status = rpc.status_of(errors.WorkerRefused(f"{name} does not fit"))
    assert metadata_bytes(status) < 7_000
    assert status.message.endswith(" ...")
    assert rpc.status_of(errors.WorkerRefused("short")).message == "short"


@pytest.mark.parametrize("reason", ["x" * 50_000, "\U0001f600" * 9_000, "CUDA error\n" * 9_000])
def test_a_targets_reason_of_any_length_fits_the_metadata(reason: str):
    status = rpc.status_of(errors.InvalidRequest([errors.FieldViolation("request", reason)]))
    assert metadata_bytes(status) < 7_000
    assert status.message.startswith(f"request: {reason[:50]}") and status.message.endswith(" ...")
    assert f"request: {details_of(status)[0].description}" == status.message


@pytest.mark.parametrize(("count", "rest"), [(1, ""), (2, "1 more field is wrong"), (3, "2 more fields are wrong")])
@pytest.mark.parametrize("name", ["top_p", "x" * 50_000, "\U0001f600" * 9_000])
def test_the_first_violation_always_travels_and_the_rest_are_counted(name: str, count: int, rest: str):
    status = rpc.status_of(errors.InvalidRequest([errors.FieldViolation(name, "too_long_" * 9_000)] * count))
    assert metadata_bytes(status) < 7_000
    first, *others = details_of(status)
    cut = name if len(name) < 50 else f"{first.field.removesuffix(' ...')} ..."
    assert first.field == cut and name.startswith(first.field[:20])
    assert first.description.startswith("too_long_too_long_") and first.description.endswith(" ...")
    assert [(other.field, other.description) for other in others] == (
        [("request", f"{rest}: correct these first")] if rest else []
    )


def metadata_bytes(status: status_pb2.Status) -> float:
    return len(quote(status.message)) + len(status.SerializeToString()) * 4 / 3


def details_of(status: status_pb2.Status) -> Sequence[error_details_pb2.BadRequest.FieldViolation]:
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    return detail.field_violations
