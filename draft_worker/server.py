"""The draft worker process: what of serving is a draft's own."""

import functools
from collections.abc import Callable

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import LoadedDrafters, load_drafters
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.loop import GrowthLoop, spare_collector
from outrider.draft_worker.rounds.metrics import draft_metrics
from outrider.draft_worker.service import SERVICE, DraftStream, pack_calibrations
from outrider.front.calls import Calls
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.roles.worker_service import Loaded, Worker, serve_worker
from outrider.security.roles import Role
from outrider.v1 import common_pb2, registry_pb2

__all__ = ["DraftWorkerConfig", "serve"]

Loader = Callable[[DraftWorkerConfig], LoadedDrafters]


class DraftWorker(Worker[GrowthLoop]):
    """Grows trees; see `Worker`.

    Args:
        loader: makes the drafters, on the thread that grows.
    """

    role = Role.DRAFT

    def __init__(self, config: DraftWorkerConfig, loader: Loader = load_drafters) -> None:
        self._config, self._loader = config, loader
        self._parts: LoadedDrafters | None = None
        self.front = Front(SERVICE, role=self.role, address=config.address, tls=config.tls)
        self.inbox = Inbox(self.front.data, Calls(self.front.data, SERVICE, {"Speculate": DraftStream}).commands)
        self.thread = GrowthLoop(self._load_drafters, self.inbox)

    def _load_drafters(self) -> Drafters:
        self._parts = parts = self._loader(self._config)
        spare_collector()
        return parts.drafters

    @property
    def _loaded(self) -> LoadedDrafters:
        assert self._parts is not None, "asked for before the thread is ready"
        return self._parts

    def loaded(self) -> Loaded:
        """See `Worker`."""
        parts, config, model = self._loaded, self._config, self._loaded.drafters.model
        return Loaded(
            model=parts.model,
            limits=registry_pb2.WorkerLimits(
                max_sessions=config.max_num_seqs,
                max_tree_nodes=config.max_live_nodes,
                max_step_tokens=config.max_step_tokens + (0 if model is None else model.config.max_step_nodes),
            ),
            metrics=draft_metrics(self.thread, parts.drafters, model_name=parts.model.name),
            sources=sorted(parts.drafters.calibrations),
        )

    def load(self) -> common_pb2.WorkerLoad:
        """See `Worker`."""
        thread = self.thread
        return common_pb2.WorkerLoad(
            **thread.load()._asdict(),
            calibration=pack_calibrations(self._loaded.drafters.calibrations),
            step_age_ms=int(1e3 * thread.watch.age_s),
            preparing=thread.watch.is_preparing,
        )

    def close(self) -> None:
        """See `Worker`."""
        if self._parts is not None:
            self._parts.close()


serve = functools.partial(serve_worker, DraftWorker)
