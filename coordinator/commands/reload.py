"""Changes the weights of a whole service: the same commands to every coordinator, one step after the other.

    check everywhere -> hold everywhere, until nothing runs -> swap everywhere -> the streams end, and requests begin

Until the swap whatever goes wrong leaves the service as it was: requests begin again as soon as a stream ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import grpc.aio

from outrider import rpc
from outrider.errors import WorkerRefused, WorkerUnavailable
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc


class InFlight(StrEnum):
    """Treatment of running requests during a reload."""

    FINISH = "finish"
    """They end as they would have, on the old weights."""
    ABORT = "abort"
    """They end at once, with ABORTED."""


_IN_FLIGHT = {InFlight.FINISH: registry_pb2.IN_FLIGHT_FINISH, InFlight.ABORT: registry_pb2.IN_FLIGHT_ABORT}


@dataclass(frozen=True, kw_only=True)
class ReloadOutcome:
    """Outcome of a reload.

    Attributes:
        weights: that the service runs with now, unless every target has failed.
        previous: that it ran with before.
        targets: of all targets, what each says.
        is_same: the targets ran with these weights already; nothing was held.
    """

    weights: common_pb2.Weights
    previous: common_pb2.Weights
    targets: Sequence[registry_pb2.TargetReport]
    aborted: int = 0
    is_same: bool = False

    @property
    def failed(self) -> list[registry_pb2.TargetReport]:
        """Targets that could not swap."""
        return [target for target in self.targets if target.error]


async def reload_weights(
    endpoints: Sequence[str],
    path: str,
    *,
    in_flight: InFlight = InFlight.FINISH,
    tls: TlsConfig | None = None,
    timeout_s: float = 600.0,
    tell: Callable[[str], None] = lambda line: None,
) -> ReloadOutcome:
    """Have every target of a service run with other weights.

    Args:
        endpoints: host:port of every coordinator, where workers register.
        path: folder of the checkpoint, as the targets see it.
        tls: own proof, of the role coordinator.

    Raises:
        WorkerRefused: a target cannot run with them, or a coordinator refuses; nothing has changed.
        WorkerUnavailable: a coordinator cannot be reached, or requests ran for too long; nothing has changed, unless it
            says that the swap had begun.
    """
    stage = "nothing has changed"
    try:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(timeout_s):
            streams = [await stack.enter_async_context(_stream(endpoint, tls)) for endpoint in endpoints]
            tell(f"the targets read {path}")
            checked = await _check(streams, path)
            weights, previous = _found(checked, path), _newest(checked)
            if all(target.running.version == weights.version for target in checked):
                return ReloadOutcome(weights=previous, previous=previous, targets=checked, is_same=True)
            stage = "nothing has changed, and requests begin again; requests still ran"
            aborted = await _hold(streams, in_flight, tell)
            stage = "the swap had begun: `outrider status` says what runs now"
            tell(f"weights {weights.version} are put in place")
            swapped = await _swap(streams, weights)
            return ReloadOutcome(weights=weights, previous=previous, targets=swapped, aborted=aborted)
    except TimeoutError as error:
        raise WorkerUnavailable(f"not done within {timeout_s:g} s ({stage})") from error
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
        kind = WorkerRefused if code is grpc.StatusCode.FAILED_PRECONDITION else WorkerUnavailable
        raise kind(f"{details or code.name} ({stage})") from error


@dataclass(frozen=True)
class _Stream:
    """Reload stream to one coordinator."""

    endpoint: str
    call: "grpc.aio.StreamStreamCall[registry_pb2.ReloadCommand, registry_pb2.ReloadReport]"

    async def ask(self, command: registry_pb2.ReloadCommand) -> registry_pb2.ReloadReport:
        """The first report on a command."""
        # Of a stream that has ended it is reading that tells why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self.call.write(command)
        return await self.report()

    async def report(self) -> registry_pb2.ReloadReport:
        """The next one."""
        report = await self.call.read()
        if not isinstance(report, registry_pb2.ReloadReport):
            raise WorkerUnavailable(f"{self.endpoint} ended the reload")
        return report


@contextlib.asynccontextmanager
async def _stream(endpoint: str, tls: TlsConfig | None) -> AsyncIterator[_Stream]:
    async with rpc.open_channel(endpoint, tls=tls, peer=None if tls is None else Role.COORDINATOR) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Reload()
        try:
            yield _Stream(endpoint, call)
            # Wait until the coordinator has ended the reload: only then may requests and other reloads begin.
            await call.done_writing()
            await call.read()
        finally:
            # What ends a stream lets requests begin again.
            call.cancel()


async def _check(streams: Sequence[_Stream], path: str) -> list[registry_pb2.TargetReport]:
    command = registry_pb2.ReloadCommand(check=registry_pb2.ReloadCheck(path=path))
    targets = _by_target(await asyncio.gather(*(stream.ask(command) for stream in streams)))
    if refusals := [target for target in targets if target.error]:
        told = "; ".join(f"{name_of(target)}: {target.error}" for target in refusals)
        raise WorkerRefused(
            f"{len(refusals)} of {len(targets)} targets cannot run with it, nothing has changed: {told}"
        )
    return targets


def _found(checked: Sequence[registry_pb2.TargetReport], path: str) -> common_pb2.Weights:
    versions = {target.found.version for target in checked}
    if len(versions) > 1:
        told = "; ".join(f"{name_of(target)}: {target.found.version}" for target in checked)
        raise WorkerRefused(f"{path} does not hold the same weights on every machine, nothing has changed: {told}")
    return common_pb2.Weights(version=versions.pop(), path=path, reloads=1 + _newest(checked).reloads)


def _newest(checked: Sequence[registry_pb2.TargetReport]) -> common_pb2.Weights:
    """Return the newest weights among the targets'."""
    return max((target.running for target in checked), key=lambda weights: weights.reloads)


async def _hold(streams: Sequence[_Stream], in_flight: InFlight, tell: Callable[[str], None]) -> int:
    """Wait until nothing runs anywhere; return how many requests were ended."""
    command = registry_pb2.ReloadCommand(hold=registry_pb2.ReloadHold(in_flight=_IN_FLIGHT[in_flight]))
    running = dict.fromkeys(streams, 0)

    async def empty(stream: _Stream) -> int:
        report = await stream.ask(command)
        while report.running:
            running[stream] = report.running
            tell(f"{sum(running.values())} requests that have begun go on with the old weights; new ones wait")
            report = await stream.report()
        running[stream] = 0
        return report.aborted

    return sum(await asyncio.gather(*(empty(stream) for stream in streams)))


async def _swap(streams: Sequence[_Stream], weights: common_pb2.Weights) -> list[registry_pb2.TargetReport]:
    command = registry_pb2.ReloadCommand(swap=registry_pb2.ReloadSwap(weights=weights))
    return _by_target(await asyncio.gather(*(stream.ask(command) for stream in streams)))


def _by_target(reports: Iterable[registry_pb2.ReloadReport]) -> list[registry_pb2.TargetReport]:
    """One a target, of what several coordinators say of it: an error, or what took longest."""
    found: dict[str, registry_pb2.TargetReport] = {}
    for report in reports:
        for target in report.targets.targets:
            known = found.setdefault(target.worker_id, target)
            if (bool(target.error), target.swap_ns) > (bool(known.error), known.swap_ns):
                found[target.worker_id] = target
    return list(found.values())


def name_of(target: registry_pb2.TargetReport) -> str:
    """Return a target's name and address for messages."""
    return f"{target.name or target.worker_id} ({target.address})"


def outcome_dict(outcome: ReloadOutcome) -> dict[str, Any]:
    """Return the outcome as JSON; the keys are stable."""
    return {
        "version": outcome.weights.version,
        "path": outcome.weights.path,
        "reloads": outcome.weights.reloads,
        "previous": {"version": outcome.previous.version, "path": outcome.previous.path},
        "changed": not outcome.is_same,
        "aborted_requests": outcome.aborted,
        "targets": [
            {
                "name": target.name or target.worker_id,
                "address": target.address,
                "version": target.running.version,
                "swap_s": target.swap_ns / 1e9,
                "error": target.error or None,
            }
            for target in outcome.targets
        ],
    }
