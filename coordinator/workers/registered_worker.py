"""A worker while its lease lasts."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from outrider.coordinator.sessions.poison import LossKind
from outrider.coordinator.workers.answers import check_load
from outrider.coordinator.workers.links import DraftLink, TargetLink
from outrider.roles.log_output import about
from outrider.roles.step_watch import patience_s
from outrider.v1 import common_pb2, registry_pb2


@dataclass(kw_only=True, eq=False)
class RegisteredWorker:
    """State of a registered worker.

    Attributes:
        news: set whenever something below has changed that whoever holds the lease acts upon.
        has_left: it drained, and nothing of this coordinator's is left there: its end is no loss.
        is_overdue: its last heartbeat told of a step that takes too long.
        loss: what its loss says of what it was verifying.
        has_weights: a target has been found to run with the service's weights.
        weights_problem: why it has not; empty while nobody has looked.
    """

    introduction: registry_pb2.WorkerIntroduction
    load: common_pb2.WorkerLoad = field(default_factory=common_pb2.WorkerLoad)
    reported_ns: int = field(default_factory=time.monotonic_ns)
    link: TargetLink | DraftLink | None = None
    is_serving: bool = False
    is_quarantined: bool = False
    is_draining: bool = False
    has_left: bool = False
    is_lost: bool = False
    is_overdue: bool = False
    loss: LossKind = LossKind.BROKEN
    has_weights: bool = False
    weights_problem: str = ""
    lost_reason: str = "its lease ended without a word"
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def worker_id(self) -> str:
        """Unique per process start."""
        return self.introduction.worker_id

    @property
    def ids(self) -> dict[str, Any]:
        """Ids for a log line."""
        return about(worker_id=self.worker_id)

    @property
    def identity(self) -> str:
        """Identity that survives restarts, as far as known."""
        return f"{self.introduction.role} {self.introduction.name or self.introduction.address}"

    @property
    def is_target(self) -> bool:
        """True for a target, False for a draft."""
        return self.introduction.role == registry_pb2.WORKER_ROLE_TARGET

    @property
    def weights(self) -> common_pb2.Weights:
        """Weights last reported."""
        return self.introduction.model.weights

    @property
    def state(self) -> str:
        """State as in `WorkerStatus.state`."""
        if self.is_lost:
            return "lost"
        if self.is_draining:
            return "draining"
        if self.is_quarantined:
            return "quarantined"
        if self.weights_problem:
            return "other weights"
        return "serving" if self.is_serving else "connecting"

    def lose(self, reason: str, kind: LossKind = LossKind.BROKEN) -> None:
        """Mark the worker as lost: its stream or lease ended, or a step hangs."""
        if not self.is_lost:
            self.is_lost, self.lost_reason, self.loss = True, reason, kind
            self.news.set()

    def look_at_step(self, *, least_s: float) -> None:
        """After a heartbeat: a target whose step does not come back is lost, unless it may be compiling.

        Two heartbeats in a row have to say so: one alone may be of a process that was stopped meanwhile.

        Args:
            least_s: no step is overdue before.
        """
        if not isinstance(self.link, TargetLink):
            return
        limit_s = patience_s(self.link.step_latency.mean_ns / 1e9, least_s=least_s)
        age_s, was_overdue = self.load.step_age_ms / 1e3, self.is_overdue
        self.is_overdue = age_s > limit_s and not self.load.preparing
        if self.is_overdue and was_overdue:
            self.lose(f"its step has not come back for {age_s:.1f} s", LossKind.HUNG)

    def leave(self) -> None:
        """Mark the worker as drained, unless it is lost."""
        self.has_left = self.has_left or not self.is_lost
        self.lose("it has drained", LossKind.SILENT)

    def hear(self, report: registry_pb2.WorkerReport) -> None:
        """Take a report after the introduction.

        Raises:
            ValueError: it says what no worker can.
        """
        if report.WhichOneof("report") == "load":
            check_load(report.load)
            self.load = report.load
            if report.load.HasField("weights"):
                self.note_weights(report.load.weights)
        self.reported_ns = time.monotonic_ns()
        if report.draining and not self.is_draining:
            self.is_draining = True
            self.news.set()

    def note_weights(self, weights: common_pb2.Weights) -> None:
        """Store newly reported weights."""
        if weights != self.weights:
            self.introduction.model.weights.CopyFrom(weights)
            self.news.set()

    async def until_news(self, *, timeout_s: float | None = None) -> None:
        """Wait for the next change, at most for this long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return
        self.news.clear()
