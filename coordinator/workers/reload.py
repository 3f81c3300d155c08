"""Keeps all targets on the same weights, and changes them while requests wait.

    check   every target reads the checkpoint beside its steps, and says whether it could run with it
    hold    nothing new begins; what has begun ends by itself, or is ended
    swap    every target puts the weights in place; then whoever waited begins

The steps come from outside, one after the other (`RegistryService.Reload`), so that several coordinators can take each
together. A target that registers with other weights is told to load those that the service runs with, where these came
by a reload; where they did not, it is left alone until nobody else serves.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence

import grpc
import grpc.aio

from outrider import rpc
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.workers.registered_worker import RegisteredWorker
from outrider.errors import FieldViolation, InvalidRequest, WeightsReplaced, WorkerRefused
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, registry_pb2, target_pb2, target_pb2_grpc

logger = logging.getLogger(__name__)

# So often it is looked whether requests still run, and told; whether a worker that is asked is still there.
_LOOK_S = 0.1
_TOLD_EVERY = 10
# A target that could not load the service's weights tries again: the folder may only be late.
_RETRY_S = 5.0


class Reloads:
    """The weights of one coordinator's targets.

    Args:
        model: that is served: its `weights` are those that the targets run with, for whoever asks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Mapping[str, RegisteredWorker],
        *,
        model: common_pb2.ModelInfo,
        tls: TlsConfig | None,
    ) -> None:
        self._scheduler, self._workers, self._model, self._tls = scheduler, workers, model, tls
        self._is_active = self._is_swapping = False
        self._swapped: asyncio.Task[registry_pb2.ReloadReport] | None = None

    @property
    def running(self) -> common_pb2.Weights:
        """Weights of the targets; an empty version while unknown."""
        return self._model.weights

    # ------------------------------------------------------------------------------------------- who comes, and as what

    async def fit(self, worker: RegisteredWorker) -> None:
        """Wait until a registered target runs with the service's weights, or drains."""
        while not worker.is_lost and not worker.is_draining:
            problem = "the weights are being changed" if self._is_swapping else await self._fit(worker)
            if not problem:
                worker.weights_problem, worker.has_weights = "", True
                return
            if problem != worker.weights_problem and not self._is_swapping:
                logger.warning("worker %s is left alone: %s", worker.worker_id, problem, extra=worker.ids)
            worker.weights_problem = problem
            await worker.until_news(timeout_s=_LOOK_S if self._is_swapping else _RETRY_S)

    async def _fit(self, worker: RegisteredWorker) -> str:
        """Return why a worker's weights do not fit; empty if they do."""
        own, running = worker.weights, self.running
        if not own.version or (own.version == running.version and own.reloads <= running.reloads):
            return ""
        is_newer = own.reloads > running.reloads
        others = [other for other in self._targets() if other is not worker and other.has_weights]
        if not running.version or is_newer or (not running.reloads and not others):
            self._adopt(own)
            return ""
        if running.reloads == own.reloads:
            return (f"it runs with weights {own.version} of {own.path}, the service with {running.version} of "
                    f"{running.path}: start it with the same checkpoint, or use `outrider reload`")  # fmt: skip
        logger.info("worker %s comes with old weights: it loads %s", worker.worker_id, running.path, extra=worker.ids)
        wanted = common_pb2.Weights()
        wanted.CopyFrom(running)
        report = await self._tell(worker, target_pb2.ReloadRequest(path=wanted.path, swap=wanted))
        return report.error and f"it has old weights, and cannot load {wanted.version} of {wanted.path}: {report.error}"

    def follow(self, worker: RegisteredWorker) -> None:
        """Adopt a target's weights if another coordinator has reloaded them; lose the target if they are older."""
        own, running = worker.weights, self.running
        if self._is_active or not worker.has_weights or own.version == running.version:
            return
        if own.reloads > running.reloads:
            self._adopt(own)
        else:
            worker.lose(f"it runs with weights {own.version} now, the service with {running.version}")

    def _adopt(self, weights: common_pb2.Weights) -> None:
        """Make these weights the service's: targets that serve with others start over."""
        logger.info("the service runs with weights %s of %s", weights.version, weights.path)
        self._model.weights.CopyFrom(weights)
        gate = self._scheduler.weights
        gate.version = weights.version
        if replaced := [own for own in self._scheduler.sessions if not gate.fits(own.generation.weights)]:
            self._scheduler.end(replaced, gate.refusal(replaced[0].generation.weights))
        for other in self._targets():
            if other.has_weights and other.weights.version not in ("", weights.version):
                other.lose(f"its weights {other.weights.version} were replaced by {weights.version}")

    # --------------------------------------------------------------------------------------------------------- a reload

    async def serve(
        self, commands: AsyncIterable[registry_pb2.ReloadCommand]
    ) -> AsyncGenerator[registry_pb2.ReloadReport, None]:
        """Carry out one reload's commands; however they end, requests begin again, after a swap that has begun.

        Raises:
            WorkerRefused: another reload is under way, there is no target, or requests still run at a swap.
            InvalidRequest: a command says nothing.
        """
        if self._is_active:
            raise WorkerRefused("another reload is under way")
        self._is_active = True
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "check":
                        yield await self._check(command.check.path)
                    case "hold":
                        async for report in self._hold(command.hold.in_flight):
                            yield report
                    case "swap":
                        # Targets end what they have begun, whoever asked for it is there or not.
                        self._swapped = asyncio.create_task(self._swap(command.swap.weights))
                        yield await asyncio.shield(self._swapped)
                    case _:
                        raise InvalidRequest([FieldViolation("command", "none given: check, hold or swap needed")])
        finally:
            if self._swapped is None or self._swapped.done():
                self._end()
            else:
                self._swapped.add_done_callback(self._end)

    def _end(self, swapped: "asyncio.Task[registry_pb2.ReloadReport] | None" = None) -> None:
        """Requests begin again."""
        if swapped is not None and not swapped.cancelled() and (error := swapped.exception()) is not None:
            logger.error("a swap whose caller had gone was not carried out: %s", error)
        self._swapped = None
        self._is_active = self._scheduler.weights.is_held = False
        self._scheduler.admit()

    async def _check(self, path: str) -> registry_pb2.ReloadReport:
        targets = self._targets()
        if not targets:
            raise WorkerRefused("no target worker is registered: there is nothing to reload")
        return await self._tell_all(targets, target_pb2.ReloadRequest(path=path))

    async def _hold(self, in_flight: "registry_pb2.InFlight") -> AsyncIterator[registry_pb2.ReloadReport]:
        self._scheduler.weights.is_held = True
        begun, aborted = self._begun(), 0
        if in_flight == registry_pb2.IN_FLIGHT_ABORT:
            aborted = _requests(begun)
            message = "weights were replaced while it ran: the tokens delivered stay valid, ask anew for others"
            self._scheduler.end(begun, WeightsReplaced(message))
            begun = self._begun()
        looks = 0
        while True:
            if looks % _TOLD_EVERY == 0 or not begun:
                yield registry_pb2.ReloadReport(running=_requests(begun), aborted=aborted)
            if not begun:
                return
            looks += 1
            await asyncio.sleep(_LOOK_S)
            begun = self._begun()

    async def _swap(self, weights: common_pb2.Weights) -> registry_pb2.ReloadReport:
        if not self._scheduler.weights.is_held or self._begun():
            raise WorkerRefused("requests run: hold them first, and wait until they have ended")
        if not weights.version or not weights.reloads:
            raise InvalidRequest([FieldViolation("swap.weights", "version and reloads needed, as a check gives them")])
        targets = self._targets()
        # Who comes meanwhile is told by nobody. Before, what has begun may need it to end.
        self._is_swapping = True
        try:
            report = await self._tell_all(targets, target_pb2.ReloadRequest(path=weights.path, swap=weights))
        finally:
            self._is_swapping = False
        if any(not each.error for each in report.targets.targets):
            self._adopt(weights)
        for worker, each in zip(targets, report.targets.targets, strict=True):
            if each.error:
                logger.error("worker %s could not swap: %s", worker.worker_id, each.error, extra=worker.ids)
                worker.lose(f"it could not change its weights: {each.error}")
        return report

    def _begun(self) -> list[Session]:
        return [session for session in self._scheduler.sessions if session.generation.has_begun]

    def _targets(self) -> list[RegisteredWorker]:
        return [worker for worker in self._workers.values() if worker.is_target and not worker.is_lost]

    async def _tell_all(
        self, targets: Sequence[RegisteredWorker], request: target_pb2.ReloadRequest
    ) -> registry_pb2.ReloadReport:
        told = await asyncio.gather(*(self._tell(worker, request) for worker in targets))
        return registry_pb2.ReloadReport(targets=registry_pb2.TargetReports(targets=told))

    async def _tell(self, worker: RegisteredWorker, request: target_pb2.ReloadRequest) -> registry_pb2.TargetReport:
        """Ask one target, for as long as it is registered."""
        report = registry_pb2.TargetReport(
            worker_id=worker.worker_id, name=worker.introduction.name, address=worker.introduction.address
        )
        asked = asyncio.create_task(self._ask(worker, request))
        try:
            while not worker.is_lost and not asked.done():
                await asyncio.wait({asked}, timeout=_LOOK_S)
            if asked.done():
                response = asked.result()
                worker.note_weights(response.running)
                report.found.CopyFrom(response.found)
                report.swap_ns = response.swap_ns
            else:
                report.error = f"it was lost: {worker.lost_reason}"
        except grpc.aio.AioRpcError as error:
            report.error = error.details() or error.code().name
        finally:
            asked.cancel()
            # Its call and its channel end with it.
            await asyncio.gather(asked, return_exceptions=True)
        report.running.CopyFrom(worker.weights)
        return report

    async def _ask(self, worker: RegisteredWorker, request: target_pb2.ReloadRequest) -> target_pb2.ReloadResponse:
        async with rpc.open_channel(worker.introduction.address, tls=self._tls, peer=Role.TARGET) as channel:
            return await target_pb2_grpc.TargetServiceStub(channel).Reload(request)


def _requests(sessions: Sequence[Session]) -> int:
    return len({id(session.generation) for session in sessions})
