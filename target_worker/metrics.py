"""A target worker's metrics."""

from outrider.metrics.families import Describe, Families
from outrider.metrics.worker import WorkerGauges, describe_worker
from outrider.target_worker.rounds.thread import RoundThread


def target_metrics(rounds: RoundThread, *, model_name: str) -> Describe:
    """Reads a round thread, from any thread."""

    def describe(families: Families) -> None:
        load = rounds.load
        gauges = WorkerGauges(
            sessions=load.sessions,
            slots_used=load.slots_used,
            slots_cached=load.slots_cached,
            slots_total=load.slots_total,
            waiting=rounds.waiting,
            step_age_s=rounds.watch.age_s,
        )
        describe_worker(families, rounds.counts, gauges, role="target", model_name=model_name)

    return describe
