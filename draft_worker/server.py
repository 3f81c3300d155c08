"""The draft worker process: what of serving is a draft's own."""

import asyncio
import contextlib
from collections.abc import Callable

from outrider.addresses import Resolve
from outrider.draft_worker.calibration_report import pack_calibrations
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.front import Front
from outrider.draft_worker.growth_parts import GrowthParts, make_growth
from outrider.draft_worker.growth_thread import GrowthThread, spare_collector
from outrider.draft_worker.inbox import SocketInbox
from outrider.draft_worker.metrics import draft_metrics
from outrider.draft_worker.service import DraftStreams, pack_load
from outrider.draft_worker.sourced_growth import SourcedGrowth
from outrider.security.roles import Role
from outrider.v1 import common_pb2, draft_pb2, registry_pb2
from outrider.worker_service import Loaded, Worker, WorkerConfig, serve_worker

__all__ = ["DraftWorkerConfig", "serve"]


class DraftWorker(Worker[GrowthThread]):
    """Grows trees; see `Worker`."""

    role = Role.DRAFT
    service = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]

    def __init__(self, config: DraftWorkerConfig) -> None:
        self._config = config
        self._parts: GrowthParts | None = None
        self.front = Front(config.address, config.tls)
        self.inbox = SocketInbox(self.front.data, DraftStreams(self.front.data).commands)
        self.thread = GrowthThread(self._make_growth, self.inbox)

    async def listen(self, config: WorkerConfig) -> Front:
        """See `Worker`."""
        await self.front.listen()
        return self.front

    def _make_growth(self) -> SourcedGrowth:
        self._parts = parts = make_growth(self._config)
        spare_collector()
        return parts.growth

    @property
    def _loaded(self) -> GrowthParts:
        assert self._parts is not None, "asked for before the thread is ready"
        return self._parts

    def loaded(self) -> Loaded:
        """See `Worker`."""
        parts, config = self._loaded, self._config
        model = parts.growth.model
        return Loaded(
            model=parts.model,
            limits=registry_pb2.WorkerLimits(
                max_sessions=config.max_num_seqs,
                max_tree_nodes=config.max_live_nodes,
                max_step_tokens=config.max_step_tokens + (0 if model is None else model.config.max_step_nodes),
            ),
            metrics=draft_metrics(self.thread, parts.growth, model_name=parts.model.name),
            sources=sorted(parts.growth.sources),
            failures=(self.front.failed,),
        )

    def load(self) -> common_pb2.WorkerLoad:
        """See `Worker`."""
        thread = self.thread
        load = pack_load(thread.load())
        load.calibration.CopyFrom(pack_calibrations(self._loaded.growth.calibrations))
        load.step_age_ms, load.preparing = int(1e3 * thread.watch.age_s), thread.watch.is_preparing
        return load

    def close(self) -> None:
        """See `Worker`."""
        if self._parts is not None:
            self._parts.close()


async def serve(
    config: DraftWorkerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    resolve: Resolve | None = None,
) -> None:
    """Serves a draft until `stop` is set or a coordinator asks it to end; see `serve_worker`.

    Raises:
        CheckpointError: the model folder cannot be served.
        CorpusError: a file of texts cannot be read, or begins with a line that is none.
        OSError: the address is taken.
        CertificateError: the TLS files cannot be used.
        WorkerRefused: a coordinator does not take this worker.
        WorkerHung: a step does not come back; its thread runs on, and the process has to end.
        WorkerUnavailable: the process that speaks to coordinators has ended.
        RuntimeError: the model failed while it ran.
    """
    worker = DraftWorker(config)

    def serves(address: str) -> None:
        if ready is not None:
            ready(address)
        # Whoever is told may have chosen cores for this process.
        worker.front.share_cores()

    with contextlib.closing(worker.front), contextlib.closing(worker.inbox):
        await serve_worker(worker, config, ready=serves, stop=stop, resolve=resolve)
