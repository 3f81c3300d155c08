"""Lets demand decide how many drafts there are, and remembers what was decided and why."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ray.util.metrics import Counter, Gauge

from outrider.deploy.autoscaler import Autoscaler, Decision
from outrider.deploy.config import DeployConfig
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)

KEPT_DECISIONS = 20


_GAUGES = {
    "desired_drafts": "Draft workers that there should be.",
    "serving_drafts": "Draft workers that the coordinators can use.",
    "sessions": "Sessions that would speculate.",
    "speedup": "Tokens a second by those of plain decoding; 0 while it is not known.",
    "gain_of_next": "What one more draft worker would add to the tokens a second, as a share.",
}


class AutoscalerMetrics:
    """Gauges `outrider_autoscaler_*` and the counter of changes, tagged with the deployment's name."""

    def __init__(self, deployment: str) -> None:
        self._tags = {"deployment": deployment}
        self._gauges = {
            name: Gauge(f"outrider_autoscaler_{name}", text, tag_keys=("deployment",)) for name, text in _GAUGES.items()
        }
        self._changes = Counter(
            "outrider_autoscaler_changes", "Times that the count was changed.", tag_keys=("deployment", "direction")
        )
        self._last: int | None = None

    def note(self, decision: Decision) -> None:
        """Update the metrics with a decision."""
        values = {
            "desired_drafts": decision.drafts,
            "serving_drafts": decision.serving,
            "sessions": decision.sessions,
            "speedup": decision.speedup or 0.0,
            "gain_of_next": decision.gain_of_next or 0.0,
        }
        for name, value in values.items():
            self._gauges[name].set(value, tags=self._tags)
        if self._last is not None and decision.drafts != self._last:
            direction = "up" if decision.drafts > self._last else "down"
            self._changes.inc(tags=self._tags | {"direction": direction})
        self._last = decision.drafts


class Demand:
    """Decides, where the configuration lets demand decide."""

    def __init__(self, config: DeployConfig) -> None:
        self._config = config
        self.latest: dict[str, Any] | None = None  # the latest decision as plain values; None before the first
        self.decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)  # the latest ones that changed something
        self._scaler = self._metrics = None
        if config.max_drafts is not None:
            self._scaler, self._metrics = Autoscaler(config), AutoscalerMetrics(config.name)

    def drafts(self, infos: Iterable[generation_pb2.ServerInfo], *, now: int) -> int:
        """The number of drafts there should be, by what the coordinators say; `now` is the number so far."""
        if self._scaler is None or self._metrics is None:
            return now
        decision = self._scaler.decide(list(infos), drafts=now, now_s=time.monotonic())
        self._metrics.note(decision)
        self.latest = asdict(decision)
        if decision.drafts != now:
            logger.warning("%d drafts instead of %d: %s", decision.drafts, now, decision.reason)
            self.decisions.append({"at_s": time.time(), "before": now, **self.latest})
        return decision.drafts

    def status(self) -> dict[str, Any]:
        """Return the demand for `outrider status --json`."""
        return {
            "enabled": self._config.max_drafts is not None,
            "min_drafts": self._config.min_drafts,
            "max_drafts": self._config.max_drafts,
            "latest": self.latest,
            "decisions": list(self.decisions),
        }
