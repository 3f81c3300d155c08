"""Throughput model of draft workers from the coordinators' counters. Pure; docs/autoscaling.md derives it.

1 / a(M) = m + f + g * k(M0) / k(M)        tokens of a session in a round, with M workers
k(M)     ~ 1 - (1 - 1/s)^N                 levels that a session grows in a round, s = S / M
speed(M) = min(1, M * P / S) * a(M) + rest by the length of a round;  speed(0) = 1 by that of a plain one

m   rounds a token that end in a miss: how good the draft is, whatever there is of it
g   rounds a token that end for want of growth, as far as one level a token explains them
f   the others, which more workers do not change
N   nodes that a worker's step expands, S sessions, P sessions that a worker takes, M0 workers now
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from outrider.v1 import generation_pb2, registry_pb2

# Rounds that end in the only token of a bare root say nothing of what a draft knows: no session is asked for more.
_LEAST_TOKENS = 1.0
# A token takes a level, and a level a draft's step, however few sessions share the draft: of these steps so much is
# not to be gained. With 0 the worth of a second worker is overestimated in simulations, with 1 underestimated.
_LAW_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class DemandWindow:
    """Counts of one coordinator, or of all together, over some seconds."""

    seconds: float
    drafts: int  # workers that served all the while
    targets: int
    draft_places: int  # sessions that these drafts may take
    sessions: float  # at targets, that would speculate; mean
    undrafted: float  # of these, those that no draft grows; mean
    waiting: float  # requests in the queue; mean
    expanded_per_step: float  # N
    rounds: int  # as in DraftDemand, like all that follows
    tokens: int
    missed_rounds: int
    starved_rounds: int
    target_ns: int
    plain_ns: int
    target_rounds: int
    draft_steps: int
    draft_ns: int
    grown_sessions: int

    @property
    def tokens_per_round(self) -> float:
        """a, of the sessions that have a draft."""
        return max(self.tokens / self.rounds, _LEAST_TOKENS) if self.rounds else 1.0

    @property
    def levels_per_round(self) -> float:
        """k: steps that named a session, by its rounds."""
        return self.grown_sessions / self.rounds if self.rounds else 0.0

    @property
    def draft_steps_per_round(self) -> float:
        """Steps that a draft does while a target does a round: no session can emit more tokens in one."""
        if not self.draft_ns or not self.target_rounds:
            return 0.0
        return (self.target_ns / self.target_rounds) / (self.draft_ns / self.draft_steps)


@dataclass(frozen=True)
class Sample:
    """The coordinators' answers at one moment: counters of each, and who serves."""

    at_s: float
    counters: Mapping[int, Mapping[str, int]]  # by incarnation, a coordinator's counters
    gauges: tuple[int, int, int]  # sessions, undrafted sessions and waiting requests, over all coordinators
    drafts: Mapping[str, int]  # ids of serving draft workers, with their places
    targets: frozenset[str]

    @property
    def sessions(self) -> int:
        """That would speculate."""
        return self.gauges[0]

    def compares_with(self, later: "Sample") -> bool:
        """Return True if both samples have equal coordinators and workers, so that the time between is one window."""
        return (self.counters.keys(), self.drafts.keys(), self.targets) == (
            later.counters.keys(),
            later.drafts.keys(),
            later.targets,
        )

    @classmethod
    def of(cls, infos: Iterable[generation_pb2.ServerInfo], at_s: float) -> Self:
        """The coordinators' answers as one sample."""
        counters: dict[int, dict[str, int]] = {}
        sessions = undrafted = waiting = 0
        drafts: dict[str, int] = {}
        targets: set[str] = set()
        for info in infos:
            demand = info.draft_demand
            counters[info.incarnation] = {name: getattr(demand, f"{name}_total") for name in COUNTERS}
            counters[info.incarnation]["target_rounds"] = info.steps_total
            sessions += demand.sessions
            undrafted += demand.undrafted_sessions
            waiting += info.waiting_requests
            for worker in info.workers:
                if worker.state != "serving":
                    continue
                who = worker.introduction
                if who.role == registry_pb2.WORKER_ROLE_DRAFT:
                    drafts[who.worker_id] = who.limits.max_sessions
                else:
                    targets.add(who.worker_id)
        return cls(at_s, counters, (sessions, undrafted, waiting), drafts, frozenset(targets))


COUNTERS = tuple(
    field.name.removesuffix("_total")
    for field in generation_pb2.DraftDemand.DESCRIPTOR.fields
    if field.name.endswith("_total")
)


def window_of(samples: "list[Sample]") -> DemandWindow:
    """Return the window between the first and last of two or more samples with equal coordinators and drafts."""
    first, last = samples[0], samples[-1]
    sums = dict.fromkeys((*COUNTERS, "target_rounds"), 0)
    expanded_per_step = 0.0
    for incarnation, counters in last.counters.items():
        own = {name: value - first.counters[incarnation][name] for name, value in counters.items()}
        sums = {name: sums[name] + value for name, value in own.items()}
        # A step that serves two coordinators' sessions tells each of its own part.
        expanded_per_step += own["expanded_nodes"] / own["draft_steps"] if own["draft_steps"] else 0.0
    del sums["expanded_nodes"]
    sessions, undrafted, waiting = (
        sum(column) / len(samples) for column in zip(*(s.gauges for s in samples), strict=True)
    )
    return DemandWindow(
        seconds=last.at_s - first.at_s,
        drafts=len(last.drafts),
        targets=len(last.targets),
        draft_places=sum(last.drafts.values()),
        sessions=sessions,
        undrafted=undrafted,
        waiting=waiting,
        expanded_per_step=expanded_per_step,
        **sums,
    )


def speeds(window: DemandWindow, most: int) -> list[float]:
    """[most + 1] tokens a second with so many draft workers, by those of plain decoding; needs rounds with a draft."""
    assert window.rounds
    assert window.drafts
    sessions = max(window.sessions, 1.0)
    plain_share = window.plain_ns / window.target_ns if window.target_ns else 1.0
    levels, missed = window.levels_per_round, window.missed_rounds / window.tokens
    behind = max(0.0, 1 / window.tokens_per_round - missed)
    for_growth = min(behind, 1 / levels) if levels else behind
    if steps := window.draft_steps_per_round:
        for_growth = max(0.0, for_growth - _LAW_SHARE / steps)
    places = window.draft_places / window.drafts
    nodes = max(1.0, window.expanded_per_step)
    reach_now = _reach(nodes, (window.sessions - window.undrafted) / window.drafts)
    found = [1.0]
    for drafts in range(1, most + 1):
        drafted = min(sessions, drafts * places)
        relief = reach_now / _reach(nodes, drafted / drafts)
        tokens = max(1.0, 1 / (missed + behind - for_growth + for_growth * relief))
        found.append((drafted / sessions * tokens + 1 - drafted / sessions) * plain_share)
    return found


def _reach(nodes: float, sessions: float) -> float:
    """Chance that a step of a worker serves one of its sessions: nodes over sessions, as they fall."""
    return 1 - (1 - 1 / max(1.0, sessions)) ** nodes
