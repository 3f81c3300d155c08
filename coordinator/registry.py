"""The registry: workers announce themselves here and keep a lease; the coordinator dials their data streams."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import ServicerContext

from outrider import rpc
from outrider.coordinator.config import CoordinatorConfig
from outrider.coordinator.links import DraftLink, TargetLink
from outrider.coordinator.scheduler import Scheduler
from outrider.errors import OutriderError, WorkerRefused, WorkerUnavailable
from outrider.security.callers import check_registration
from outrider.security.roles import Role
from outrider.v1 import common_pb2, generation_pb2, registry_pb2, registry_pb2_grpc

logger = logging.getLogger(__name__)

_SECURITY_ROLES = {registry_pb2.WORKER_ROLE_DRAFT: Role.DRAFT, registry_pb2.WORKER_ROLE_TARGET: Role.TARGET}


@dataclass(kw_only=True)
class RegisteredWorker:
    """A worker while its lease lasts."""

    introduction: registry_pb2.WorkerIntroduction
    load: common_pb2.WorkerLoad = field(default_factory=common_pb2.WorkerLoad)
    reported_ns: int = 0
    link: TargetLink | DraftLink | None = None
    is_serving: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    lost_reason: str = ""

    @property
    def worker_id(self) -> str:
        """Unique per process start."""
        return self.introduction.worker_id

    @property
    def is_target(self) -> bool:
        """Whether it verifies; otherwise it drafts."""
        return self.introduction.role == registry_pb2.WORKER_ROLE_TARGET

    @property
    def state(self) -> str:
        """As `WorkerStatus.state`."""
        if self.lost.is_set():
            return "lost"
        return "serving" if self.is_serving else "connecting"

    def lose(self, reason: str) -> None:
        """Its data stream or its lease has ended."""
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()


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
        self.workers: dict[str, RegisteredWorker] = {}

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
        report = await anext(reports, None)
        if report is None:
            return None
        if report.WhichOneof("report") != "introduction":
            raise WorkerRefused("the first message of a worker has to be its introduction")
        introduction = report.introduction
        self._check(introduction)
        check_registration(context, _SECURITY_ROLES[introduction.role])
        if introduction.worker_id in self.workers:
            raise WorkerRefused(f"worker_id {introduction.worker_id} is registered already")
        return RegisteredWorker(introduction=introduction, reported_ns=time.monotonic_ns())

    def _check(self, introduction: registry_pb2.WorkerIntroduction) -> None:
        model, own = introduction.model, self._model
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
        """Serves a worker from its introduction to the end of its lease."""
        self.workers[worker.worker_id] = worker
        lease = registry_pb2.Lease(
            incarnation=self._incarnation,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
            lease_ms=self._config.lease_ms,
        )
        heartbeats = asyncio.create_task(self._watch_heartbeats(worker, reports))
        try:
            await context.write(lease)
            await self._connect(worker)
            logger.info("worker %s at %s is serving", worker.worker_id, worker.introduction.address)
            await worker.lost.wait()
            logger.warning("worker %s is lost: %s", worker.worker_id, worker.lost_reason)
        finally:
            heartbeats.cancel()
            del self.workers[worker.worker_id]
            await self._disconnect(worker)
        raise WorkerUnavailable(f"the lease has ended: {worker.lost_reason}")

    async def _watch_heartbeats(
        self, worker: RegisteredWorker, reports: AsyncIterator[registry_pb2.WorkerReport]
    ) -> None:
        lease_s = self._config.lease_ms / 1e3
        try:
            while True:
                async with asyncio.timeout(lease_s):
                    report = await anext(reports, None)
                if report is None:
                    worker.lose("it took its leave")
                    return
                worker.reported_ns = time.monotonic_ns()
                if report.WhichOneof("report") == "load":
                    worker.load = report.load
        except TimeoutError:
            worker.lose(f"no heartbeat for {lease_s:g} s")
        except Exception as error:
            # A lease that nobody watches would never end.
            logger.exception("the heartbeats of %s cannot be read", worker.worker_id)
            worker.lose(f"its heartbeats cannot be read: {error}")

    async def _connect(self, worker: RegisteredWorker) -> None:
        address = worker.introduction.address
        link: TargetLink | DraftLink
        if worker.is_target:
            link = TargetLink(address, incarnation=self._incarnation, on_lost=worker.lose, tls=self._config.tls)
        else:
            link = DraftLink(
                address,
                incarnation=self._incarnation,
                vocab_size=worker.introduction.model.vocab_size,
                on_growth=_bind_first(self._scheduler.take_growth, worker.worker_id),
                on_error=_bind_first(self._scheduler.take_draft_error, worker.worker_id),
                on_lost=worker.lose,
                tls=self._config.tls,
            )
        worker.link = link
        await link.ready(timeout_s=self._config.connect_timeout_s)
        if isinstance(link, TargetLink):
            self._scheduler.add_target(worker.worker_id, link, worker.introduction.limits, on_failure=worker.lose)
        else:
            self._scheduler.add_draft(worker.worker_id, link, worker.introduction.limits)
        worker.is_serving = True

    async def _disconnect(self, worker: RegisteredWorker) -> None:
        if worker.is_target:
            self._scheduler.remove_target(worker.worker_id, worker.lost_reason)
        else:
            self._scheduler.remove_draft(worker.worker_id)
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


def _bind_first(function: Callable[..., None], worker_id: str) -> Callable[..., None]:
    return lambda *arguments: function(worker_id, *arguments)
