"""Step counts of both workers, and their metrics (torch-free)."""

from dataclasses import dataclass, field

from outrider import __version__
from outrider.metrics.families import Families
from outrider.metrics.histogram import Histogram, step_seconds


@dataclass(kw_only=True)
class StepCounts:
    """Counters since start; only the thread that runs the model writes them."""

    verify_steps: int = 0  # steps that were asked for: verifications of a target, growth of a draft
    prefill_steps: int = 0  # steps of a prompt alone
    rows: int = 0  # of all forwards: nodes, roots and prefill tokens
    sessions: int = 0  # of all steps
    step: Histogram = field(default_factory=step_seconds)
    forward: Histogram = field(default_factory=step_seconds)

    def note(self, step_ns: int, forward_ns: int, *, rows: int, sessions: int, is_prefill: bool = False) -> None:
        """Count one step.

        Args:
            step_ns: time of the whole step, in nanoseconds.
            forward_ns: the part of it that the model's forward pass took.
            rows: of the forward pass: nodes, roots and prefill tokens.
            sessions: that took part.
            is_prefill: whether the step was of a prompt alone.
        """
        self.verify_steps += not is_prefill
        self.prefill_steps += is_prefill
        self.rows += rows
        self.sessions += sessions
        self.step.observe(step_ns)
        self.forward.observe(forward_ns)


@dataclass(frozen=True, kw_only=True)
class WorkerGauges:
    """Occupancy of a worker."""

    sessions: int
    slots_used: int  # KV slots that sessions hold
    slots_cached: int  # that are kept for those that begin alike
    slots_total: int
    waiting: int  # messages or commands that wait for the model
    step_age_s: float


def describe_worker(
    families: Families, counts: StepCounts, gauges: WorkerGauges, *, role: str, model_name: str
) -> None:
    """Describe the metrics that both kinds of worker have."""
    families.gauge(
        "build_info", "Always 1: version and model are labels.", 1, version=__version__, model_name=model_name
    )
    # A draft prefills beside its growth.
    steps = {"growth": counts.verify_steps}
    if role == "target":
        steps = {"verify": counts.verify_steps, "prefill": counts.prefill_steps}
    families.by_label("counter", f"{role}_model_steps", "Steps of the model.", "kind", steps)
    families.counter(f"{role}_model_rows", "Rows of all forwards: nodes, roots and prefill tokens.", counts.rows)
    families.counter(f"{role}_model_sessions", "Sessions of all steps, one counted once a step.", counts.sessions)
    families.counter(f"{role}_model_busy_seconds", "Time in steps.", counts.step.total / 1e9)
    families.histogram(f"{role}_model_step_seconds", "A step, model and bookkeeping.", counts.step)
    families.histogram(f"{role}_model_forward_seconds", "Time of the model's forward pass in a step.", counts.forward)
    families.gauge("num_sessions", "Sessions that are open here.", gauges.sessions)
    families.gauge("kv_slots_used", "KV slots that sessions hold.", gauges.slots_used)
    families.gauge("kv_slots_cached", "KV slots that are kept for those that begin alike.", gauges.slots_cached)
    families.gauge("kv_slots", "KV slots.", gauges.slots_total)
    used = gauges.slots_used / gauges.slots_total if gauges.slots_total else 0.0
    families.gauge("kv_cache_usage_perc", "Share of KV slots that sessions hold; 1 is all.", used)
    families.gauge(f"{role}_queue_length", "Items waiting for the model: batches, or commands.", gauges.waiting)
    families.gauge("step_age_seconds", "Age of the running step; 0 if none runs.",
                   gauges.step_age_s)  # fmt: skip
