"""The coordinator's metrics: what it has counted, put into Prometheus' families when they are read.

`totals.py` counts; docs/metrics.md has the table of all names. Where vLLM has the same thing, so is it called.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider import __version__
from outrider.coordinator.api.access import Access
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.totals import Totals
from outrider.coordinator.workers.registered_worker import RegisteredWorker
from outrider.drafting.growth_source import GrowthSource
from outrider.metrics.families import Families, registry_of
from outrider.v1 import generation_pb2, registry_pb2

_NS = 1e9
STATES = ("connecting", "serving", "draining", "quarantined", "lost")
_ROLES = {registry_pb2.WORKER_ROLE_DRAFT: "draft", registry_pb2.WORKER_ROLE_TARGET: "target"}


class CoordinatorMetrics:
    """Reads one coordinator."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        workers: Mapping[str, RegisteredWorker],
        access: Access,
        model_name: str,
        max_depth: int,
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._access = access
        self._model_name = model_name
        self._max_depth = max_depth
        self._started_ns = time.monotonic_ns()
        self.registry: CollectorRegistry = registry_of(self.describe)
        """To be read on the event loop."""

    def describe(self, families: Families) -> None:
        """All values now; on the event loop."""
        totals = self._scheduler.totals
        families.gauge(
            "build_info",
            "Always 1: version and model are labels.",
            1,
            version=__version__,
            model_name=self._model_name,
        )
        families.gauge("uptime_seconds", "Since the start.", (time.monotonic_ns() - self._started_ns) / _NS)
        self._describe_load(families)
        refused = totals.refused | {"unauthenticated": self._access.unauthenticated}
        _describe_requests(families, totals, refused)
        _describe_speculation(families, totals, positions=self._max_depth)
        _describe_sources(families, self._scheduler.totals.sources.counts())
        _describe_rounds(families, totals)
        self._describe_workers(families, totals)

    def _describe_load(self, families: Families) -> None:
        scheduler = self._scheduler
        stalled = sum(session.generation.is_stalled for session in scheduler.sessions)
        families.gauge("num_requests_running", "Choices that are generated.", scheduler.running_sessions)
        families.gauge("num_requests_waiting", "Choices in the queue.", scheduler.waiting_requests)
        families.gauge("num_requests_stalled", "Choices that rest since nobody reads what they have.", stalled)
        undrafted = scheduler.drafts.speculating()[1]
        families.gauge("undrafted_sessions", "Sessions that would speculate, and that nobody grows.", undrafted)

    def _describe_workers(self, families: Families, counts: Totals) -> None:
        workers = list(self._workers.values())
        states = Counter((_role(worker), worker.state) for worker in workers)
        for role in _ROLES.values():
            for state in STATES:
                families.gauge("workers", "Registered workers.", states[role, state], role=role, state=state)
        families.by_label("counter", "workers_lost", "Workers that went without leave.", "role", counts.lost_workers)
        families.by_label(
            "counter", "worker_quarantines", "Pauses of workers that were lost too often.", "role", counts.quarantines
        )
        now_ns = time.monotonic_ns()
        for worker in workers:
            labels, load = {"worker": worker.worker_id, "role": _role(worker)}, worker.load
            families.gauge("worker_sessions", "Sessions that the worker holds.", load.sessions, **labels)
            families.gauge(
                "worker_kv_slots_used", "KV slots that the worker's sessions hold.", load.slots_used, **labels
            )
            families.gauge(
                "worker_kv_slots_cached",
                "KV slots that the worker keeps for requests that begin alike.",
                load.slots_cached,
                **labels,
            )
            families.gauge("worker_kv_slots", "KV slots of the worker.", load.slots_total, **labels)
            families.gauge("worker_busy_ratio", "Share of the worker's time in steps, of late.", load.busy, **labels)
            families.counter("worker_steps", "Steps of the worker, for all coordinators.", load.steps, **labels)
            age_s = (now_ns - worker.reported_ns) / _NS
            families.gauge("worker_lease_age_seconds", "Time since the worker's last heartbeat.", age_s, **labels)


def accepted_per_position(depths: Mapping[int, int], positions: int) -> list[int]:
    """Return for each depth from 0 how many trees had a node accepted there.

    Args:
        depths: number of trees by accepted tokens.
    """
    return [sum(count for depth, count in depths.items() if depth > position) for position in range(positions)]


def _role(worker: RegisteredWorker) -> str:
    return _ROLES[worker.introduction.role]


def _describe_requests(families: Families, totals: Totals, refused: Mapping[str, int]) -> None:
    families.counter("requests", "Requests that were accepted.", totals.requests)
    families.by_label("counter", "requests_refused", "Requests that never began.", "reason", refused)
    families.by_label("counter", "request_success", "Choices that have ended.", "finished_reason", totals.finished)
    families.counter("prompt_tokens", "Prompt tokens of requests that have ended.", totals.prompt_tokens)
    families.counter("generation_tokens", "Tokens that were generated.", totals.emitted_tokens)
    families.counter("prefix_cache_queries", "Prompt tokens that were looked up at targets.", totals.prompt_tokens)
    families.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens)
    for name, text, values in (
        ("time_to_first_token_seconds", "From a request's arrival to its first token.", totals.first_token),
        ("inter_token_latency_seconds", "Between two deliveries of a choice, of one token or several.",
         totals.between_tokens),
        ("request_time_per_output_token_seconds", "A request's time after its first token, by its further tokens.",
         totals.per_token),
        ("e2e_request_latency_seconds", "From a request's arrival to its last token.", totals.whole),
        ("request_queue_time_seconds", "From a request's arrival to its place at a target.", totals.queue),
        ("request_prefill_time_seconds", "From a request's place at a target to its first token.", totals.prefill),
        ("request_decode_time_seconds", "From a request's first token to its last.", totals.decode),
    ):  # fmt: skip
        families.histogram(name, text, values)


def _describe_speculation(families: Families, totals: Totals, *, positions: int) -> None:
    demand = totals.demand
    families.counter(
        "spec_decode_num_drafts", "Trees that were verified: rounds with a node.", sum(totals.accepted_depths.values())
    )
    families.counter("spec_decode_num_draft_tokens", "Tree nodes that were verified.", totals.drafted_tokens)
    families.counter(
        "spec_decode_num_accepted_tokens", "Verified tree nodes that were accepted.", totals.accepted_tokens
    )
    families.by_label(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "Trees of which the token at this depth was accepted, from 0.",
        "position",
        {str(place): count for place, count in enumerate(accepted_per_position(totals.accepted_depths, positions))},
    )
    families.by_label(
        "counter",
        "spec_decode_rounds_without_draft",
        "Fallbacks: rounds of choices that speculate, without a node.",
        "reason",
        {"no_worker": totals.bare_undrafted, "no_nodes": totals.bare_drafted},
    )
    families.counter("draft_nodes_received", "Tree nodes that drafts have sent.", totals.grown_nodes)
    families.counter(
        "draft_nodes_dropped", "Received tree nodes that were dropped: too late or unusable.", totals.dropped_nodes
    )
    families.by_label(
        "counter",
        "draft_rounds",
        "How rounds of choices with a draft ended: whether it was ahead, wrong or behind.",
        "outcome",
        {
            "covered": demand.rounds - demand.missed_rounds - demand.starved_rounds,
            "missed": demand.missed_rounds,
            "starved": demand.starved_rounds,
        },
    )
    families.counter("draft_steps", "Steps of drafts' models.", demand.draft_steps)
    families.counter("draft_step_seconds", "Time of the steps of drafts' models.", demand.draft_ns / _NS)


def _describe_sources(families: Families, counts: Iterable[generation_pb2.SourceStats]) -> None:
    known: dict[int, generation_pb2.SourceStats] = {own.source: own for own in counts}
    none = generation_pb2.SourceStats()
    for name, text in (
        ("drafted_tokens", "Tree nodes by the source that grew them; of several sources: of each."),
        ("submitted_tokens", "Tree nodes that were verified, by source."),
        ("accepted_tokens", "Verified tree nodes that were accepted, by source."),
    ):
        values = {source.word: getattr(known.get(source, none), name) for source in GrowthSource}
        families.by_label("counter", f"source_{name}", text, "source", values)


def _describe_rounds(families: Families, totals: Totals) -> None:
    demand = totals.demand
    families.counter("verify_steps", "Steps of targets.", totals.steps)
    families.counter("verify_rounds", "Rounds: a choice in a step.", totals.verify_steps)
    families.counter("target_seconds", "Time of all targets' rounds.", demand.target_ns / _NS)
    families.counter("target_plain_seconds", "Estimated time of the rounds without speculation.", demand.plain_ns / _NS)
    families.histogram("target_round_seconds", "Rounds of targets.", totals.step)
    families.histogram("target_forward_seconds", "Time of the model's forward pass in a step.", totals.forward)
    families.counter("failovers", "Choices whose target was lost, and that go on at another.", totals.failovers)
    families.counter("sessions_reopened", "Choices that a target lost, and that were opened anew.", totals.reopened)


def metrics_routes(registry: CollectorRegistry) -> list[Route]:
    """The route that Prometheus reads."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]
