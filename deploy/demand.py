"""Lets demand decide how many drafts there are, and remembers what was decided and why."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from outrider.deploy.autoscaler import Autoscaler
from outrider.deploy.autoscaler_metrics import AutoscalerMetrics
from outrider.deploy.config import DeployConfig
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)

KEPT_DECISIONS = 20


class Demand:
    """Decides, where the configuration lets demand decide.

    Attributes:
        latest: the latest decision as plain values; None before the first.
        decisions: the latest ones that changed something.
    """

    def __init__(self, config: DeployConfig) -> None:
        self._config = config
        self.latest: dict[str, Any] | None = None
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._scaler = self._metrics = None
        if config.max_drafts is not None:
            self._scaler, self._metrics = Autoscaler.of(config), AutoscalerMetrics(config.name)

    def drafts(self, infos: Iterable[generation_pb2.ServerInfo], *, now: int) -> int:
        """How many drafts there should be.

        Args:
            infos: what the coordinators say.
            now: how many there are to be so far.
        """
        if self._scaler is None or self._metrics is None:
            return now
        decision = self._scaler.decide(list(infos), drafts=now, now_s=time.monotonic())
        self._metrics.note(decision)
        self.latest = decision.as_dict()
        if decision.drafts != now:
            logger.warning("%d drafts instead of %d: %s", decision.drafts, now, decision.reason)
            self.decisions.append({"at_s": time.time(), "before": now, **decision.as_dict()})
        return decision.drafts

    def status(self) -> dict[str, Any]:
        """For `outrider status --json`."""
        return {
            "enabled": self._config.max_drafts is not None,
            "min_drafts": self._config.min_drafts,
            "max_drafts": self._config.max_drafts,
            "latest": self.latest,
            "decisions": list(self.decisions),
        }
