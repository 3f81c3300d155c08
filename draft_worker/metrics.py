"""A draft worker's metrics."""

from outrider.draft_worker.growth_thread import GrowthThread
from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker


def draft_metrics(thread: GrowthThread, *, model_name: str) -> Describe:
    """Reads a growth thread that is ready, from any thread."""

    def describe(families: Families) -> None:
        load = thread.load()
        gauges = WorkerGauges(
            sessions=load.sessions,
            slots_used=load.slots_used,
            slots_cached=0,
            slots_total=load.slots_total,
            waiting=thread.waiting,
            step_age_s=thread.watch.age_s,
        )
        describe_worker(families, thread.counts, gauges, role="draft", model_name=model_name)

    return describe
