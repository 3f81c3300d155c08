"""The autoscaler's decisions as metrics of Ray, which exports them for Prometheus."""

from ray.util.metrics import Counter, Gauge

from outrider.deploy.autoscaler import Decision

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
        """Shows a decision."""
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
