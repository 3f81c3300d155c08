"""A target worker's metrics."""

from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker
from outrider.target_worker.step_thread import StepThread


def target_metrics(steps: StepThread, *, model_name: str) -> Describe:
    """Reads a step thread, from any thread."""

    def describe(families: Families) -> None:
        load = steps.load
        gauges = WorkerGauges(
            sessions=load.sessions,
            slots_used=load.slots_used,
            slots_cached=load.slots_cached,
            slots_total=load.slots_total,
            waiting=steps.waiting,
            step_age_s=steps.watch.age_s,
        )
        describe_worker(families, steps.counts, gauges, role="target", model_name=model_name)

    return describe
