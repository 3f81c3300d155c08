"""The registry: workers announce themselves here and keep a lease; the coordinator dials their data streams."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc.aio import ServicerContext

from outrider import rpc
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.poison import LossKind
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.workers.links import DraftLink, TargetLink
from outrider.coordinator.workers.quarantine import Quarantine
from outrider.coordinator.workers.registered_worker import RegisteredWorker
from outrider.coordinator.workers.reload import Reloads
from outrider.errors import InvalidRequest, OutriderError, WorkerRefused, WorkerUnavailable
from outrider.roles.step_watch import Stopwatch
from outrider.roles.worker import until_any
from outrider.security.callers import check_registration
from outrider.security.roles import Role
from outrider.v1 import common_pb2, generation_pb2, registry_pb2, registry_pb2_grpc
from outrider.wire import WIRE_VERSION

logger = logging.getLogger(__name__)

# A quarantined target that nobody can replace is tried again this often.
_LAST_RESORT_S = 0.5
# So often within a lease it is looked whether the worker is still heard.
_LOOKS = 8
_SECURITY_ROLES = {registry_pb2.WORKER_ROLE_DRAFT: Role.DRAFT, registry_pb2.WORKER_ROLE_TARGET: Role.TARGET}


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Takes workers in, connects them to the scheduler, and lets them go when lease or data stream ends.

    Args:
        model: what this coordinator serves; workers have to fit it.
        incarnation: of this coordinator; sessions at workers are keyed on it.
    """

    def __init__(
        self, scheduler: Scheduler, *, config: CoordinatorConfig, model: common_pb2.ModelInfo, incarnation: int
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._model = model
        self._incarnation = incarnation
        self._quarantine = Quarantine(
            losses=config.quarantine_losses, window_s=config.quarantine_window_s, pause_s=config.quarantine_s
        )
        self.workers: dict[str, RegisteredWorker] = {}
        self.reloads = Reloads(scheduler, self.workers, model=model, tls=config.tls)

    async def Reload(  # noqa: N802
        self,
        request_iterator: AsyncIterator[registry_pb2.ReloadCommand],
        context: ServicerContext[registry_pb2.ReloadCommand, registry_pb2.ReloadReport],
    ) -> None:
        """Change the weights of all targets; see registry.proto."""
        try:
            async with contextlib.aclosing(self.reloads.serve(request_iterator)) as reports:
                async for report in reports:
                    await context.write(report)
        except OutriderError as error:
            await rpc.abort_with(context, error)

    async def Register(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[registry_pb2.WorkerReport],
        context: ServicerContext[registry_pb2.WorkerReport, registry_pb2.Lease],
    ) -> None:
        """The worker's lease; see registry.proto."""
        try:
            worker = await self._introduce(request_iterator, context)
            if worker is not None:
                await self._hold(worker, request_iterator, context)
        except OutriderError as error:
            await rpc.abort_with(context, error)

    async def _introduce(
        self, reports: AsyncIterator[registry_pb2.WorkerReport], context: ServicerContext[Any, Any]
    ) -> RegisteredWorker | None:
        timeout_s = self._config.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                report = await anext(reports, None)
        except TimeoutError as error:
            raise WorkerUnavailable(f"the worker did not introduce itself within {timeout_s:g} s") from error
        if report is None:
            return None
        if report.WhichOneof("report") != "introduction":
            raise WorkerRefused("the first message of a worker has to be its introduction")
        introduction = report.introduction
        self._check(introduction)
        check_registration(context, _SECURITY_ROLES[introduction.role])
        if introduction.worker_id in self.workers:
            # Not refused: it left and is back sooner than its former lease has ended, or knows this coordinator twice.
            raise WorkerUnavailable(f"worker_id {introduction.worker_id} is registered already")
        return RegisteredWorker(introduction=introduction)

    def _check(self, introduction: registry_pb2.WorkerIntroduction) -> None:
        model, own = introduction.model, self._model
        # First: other fields of another version may mean something else.
        if introduction.wire_version != WIRE_VERSION:
            raise WorkerRefused(
                f"wire version {introduction.wire_version} of the worker is not {WIRE_VERSION} of the coordinator: "
                "start coordinator and workers from one release of Outrider"
            )
        if introduction.role not in {registry_pb2.WORKER_ROLE_DRAFT, registry_pb2.WORKER_ROLE_TARGET}:
            raise WorkerRefused("role: DRAFT or TARGET needed")
        if not introduction.worker_id or not introduction.address:
            raise WorkerRefused("worker_id and address are needed")
        if model.tokenizer_hash != own.tokenizer_hash:
            raise WorkerRefused(
                f"tokenizer {model.tokenizer_hash[:12]} of {model.name} is not {own.tokenizer_hash[:12]} of "
                f"{own.name}: use a draft and a target with the same tokenizer"
            )
        is_target = introduction.role == registry_pb2.WORKER_ROLE_TARGET
        if model.vocab_size > own.vocab_size or (is_target and model.vocab_size != own.vocab_size):
            raise WorkerRefused(
                f"{model.name} has {model.vocab_size} vocabulary entries, {own.name} {own.vocab_size}: "
                "a target needs as many, a draft at most as many"
            )
        if is_target and model.max_model_len < own.max_model_len:
            raise WorkerRefused(
                f"the target serves {model.max_model_len} tokens a session, the coordinator promises "
                f"{own.max_model_len}: raise the target's max_model_len or lower the coordinator's"
            )

    async def _hold(
        self,
        worker: RegisteredWorker,
        reports: AsyncIterator[registry_pb2.WorkerReport],
        context: ServicerContext[Any, Any],
    ) -> None:
        """Serve a worker from its introduction to the end of its lease."""
        self.workers[worker.worker_id] = worker
        self._scheduler.note_return(worker.worker_id)
        lease = registry_pb2.Lease(
            incarnation=self._incarnation, heartbeat_interval_ms=self._config.heartbeat_interval_ms
        )
        heartbeats = asyncio.create_task(self._watch_heartbeats(worker, reports))
        try:
            await context.write(lease)
            await self._sit_out_quarantine(worker)
            # Before it is believed that it has the service's newest weights, and others start over.
            if not worker.is_draining:
                await self._connect(worker)
            if worker.is_target:
                await self.reloads.fit(worker)
            if not (worker.is_draining or worker.is_lost):
                self._add(worker)
                logger.info(
                    "worker %s at %s is serving", worker.worker_id, worker.introduction.address, extra=worker.ids
                )
            await self._serve(worker)
        except OutriderError as error:
            worker.lose(str(error))
        finally:
            heartbeats.cancel()
            del self.workers[worker.worker_id]
            self._note_end(worker)
            await self._disconnect(worker)
        if not worker.has_left:
            raise WorkerUnavailable(f"the lease has ended: {worker.lost_reason}")

    async def _serve(self, worker: RegisteredWorker) -> None:
        """Serve a worker's lease until it is lost or has left."""
        is_emptied = False
        while not worker.is_lost:
            if worker.is_draining and not is_emptied:
                is_emptied = True
                logger.info("worker %s drains", worker.worker_id, extra=worker.ids)
                self._scheduler.drain_worker(worker.worker_id, on_empty=worker.leave)
            if worker.is_target:
                self.reloads.follow(worker)
            await worker.until_news()

    async def _sit_out_quarantine(self, worker: RegisteredWorker) -> None:
        """Nothing is asked of a worker that was lost too often, unless there is no other target."""
        left_s = self._quarantine.left_s(worker.identity)
        if not left_s:
            return
        logger.warning(
            "worker %s is left alone for %.1f s: it was lost too often", worker.worker_id, left_s, extra=worker.ids
        )
        worker.is_quarantined = True
        while left_s and not worker.is_lost and not worker.is_draining:
            await worker.until_news(timeout_s=min(left_s, _LAST_RESORT_S))
            if worker.is_target and not self._scheduler.has_target:
                break
            left_s = self._quarantine.left_s(worker.identity)
        worker.is_quarantined = False

    def _note_end(self, worker: RegisteredWorker) -> None:
        if worker.has_left:
            logger.info("worker %s has left: %s", worker.worker_id, worker.lost_reason, extra=worker.ids)
        elif worker.is_draining:
            logger.warning("worker %s left before it was empty", worker.worker_id, extra=worker.ids)
        else:
            pause_s = self._quarantine.note_loss(worker.identity)
            counts, role = self._scheduler.totals, "target" if worker.is_target else "draft"
            counts.lost_workers[role] += 1
            counts.quarantines[role] += bool(pause_s)
            then = f"; it is left alone for {pause_s:.0f} s" if pause_s else ""
            logger.warning("worker %s is lost: %s%s", worker.worker_id, worker.lost_reason, then, extra=worker.ids)

    async def _watch_heartbeats(
        self, worker: RegisteredWorker, reports: AsyncIterator[registry_pb2.WorkerReport]
    ) -> None:
        lease_s = self._config.lease_ms / 1e3
        silence = asyncio.create_task(self._watch_silence(worker, lease_s))
        try:
            async for report in reports:
                worker.hear(report)
                worker.look_at_step(least_s=self._config.step_timeout_s)
                self._scheduler.note_load(worker.worker_id, worker.load)
            worker.lose("it took its leave")
        except (InvalidRequest, ValueError) as error:
            worker.lose(f"its heartbeats cannot be read: {error}")
        except Exception as error:
            # A lease that nobody watches would never end.
            logger.exception("the heartbeats of %s cannot be read", worker.worker_id, extra=worker.ids)
            worker.lose(f"its heartbeats cannot be read: {error}")
        finally:
            silence.cancel()

    async def _watch_silence(self, worker: RegisteredWorker, lease_s: float) -> None:
        stopwatch = Stopwatch(lease_s / _LOOKS, asyncio.get_running_loop().time)
        while not worker.is_lost:
            await asyncio.sleep(lease_s / _LOOKS)
            if stopwatch.look(worker.reported_ns) > lease_s:
                worker.lose(f"no heartbeat for {lease_s:g} s", LossKind.SILENT)

    async def _connect(self, worker: RegisteredWorker) -> None:
        address = worker.introduction.address
        link: TargetLink | DraftLink
        if worker.is_target:
            link = TargetLink(
                address,
                incarnation=self._incarnation,
                vocab_size=worker.introduction.model.vocab_size,
                on_results=functools.partial(self._scheduler.relay.take_results, worker.worker_id),
                on_lost=worker.lose,
                tls=self._config.tls,
            )
        else:
            link = DraftLink(
                address,
                incarnation=self._incarnation,
                vocab_size=worker.introduction.model.vocab_size,
                on_growth=functools.partial(self._scheduler.relay.take_growth, worker.worker_id),
                on_fault=functools.partial(self._scheduler.drafts.take_fault, worker.worker_id),
                on_lost=worker.lose,
                tls=self._config.tls,
            )
        worker.link = link
        await until_any(link.ready(timeout_s=self._config.connect_timeout_s), _lost(worker))

    def _add(self, worker: RegisteredWorker) -> None:
        link = worker.link
        if isinstance(link, TargetLink):
            self._scheduler.add_target(worker.worker_id, link, worker.introduction.limits)
        elif isinstance(link, DraftLink):
            told = worker.introduction
            self._scheduler.drafts.add(worker.worker_id, link, told.limits, sources=told.sources)
        self._scheduler.note_load(worker.worker_id, worker.load)
        worker.is_serving = True
        # What came meanwhile has not been acted upon.
        worker.news.set()

    async def _disconnect(self, worker: RegisteredWorker) -> None:
        if worker.is_target:
            self._scheduler.remove_target(worker.worker_id, worker.lost_reason, kind=worker.loss)
        else:
            self._scheduler.drafts.remove(worker.worker_id)
        if worker.link is not None:
            await worker.link.close()

    def statuses(self) -> list[generation_pb2.WorkerStatus]:
        """Every worker with a lease, for ServerInfo."""
        now_ns = time.monotonic_ns()
        return [
            generation_pb2.WorkerStatus(
                introduction=worker.introduction,
                load=worker.load,
                state=worker.state,
                lease_age_ms=(now_ns - worker.reported_ns) / 1e6,
            )
            for worker in self.workers.values()
        ]


async def _lost(worker: RegisteredWorker) -> None:
    while not worker.is_lost:
        await worker.until_news()
    raise WorkerUnavailable(worker.lost_reason)
