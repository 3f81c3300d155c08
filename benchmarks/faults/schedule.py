"""Schedule of faults by time, role and duration: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.faults.proxy import BOTH, Conditions, Direction


class FaultKind(Enum):
    """Kind of fault of a role, or of its links."""

    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    PARTITION = "partition"
    PARTITION_DATA = "partition, data link"
    PARTITION_REGISTRATION = "partition, registration link"
    HALF_OPEN = "half-open"
    RESET = "connections reset"
    DELAY = "delay"
    LOSS = "loss"
    BANDWIDTH = "bandwidth"
    SLOW_DISK = "slow disk at restart"
    BLOCKED_LOG = "nobody reads the log"


_WORKERS, _COORDINATORS = ("draft", "target"), ("coordinator",)
_ALL = (*_WORKERS, *_COORDINATORS)
# Who, how often in comparison, and for how long in seconds. Frozen roles: shorter and longer than lease and watchdog.
_TABLE: dict[FaultKind, tuple[Sequence[str], float, tuple[float, float]]] = {
    FaultKind.KILL: (_ALL, 4, (0.0, 1.5)),
    FaultKind.FREEZE: (_ALL, 4, (0.3, 9.0)),
    FaultKind.PARTITION: (_ALL, 2, (0.5, 6.0)),
    FaultKind.PARTITION_DATA: (_WORKERS, 1, (0.5, 6.0)),
    FaultKind.PARTITION_REGISTRATION: (_WORKERS, 1, (0.5, 6.0)),
    FaultKind.HALF_OPEN: (_ALL, 2, (0.5, 3.0)),
    FaultKind.RESET: (_ALL, 2, (0.0, 0.5)),
    FaultKind.DELAY: (_ALL, 2, (1.0, 4.0)),
    FaultKind.LOSS: (_ALL, 1, (1.0, 4.0)),
    FaultKind.BANDWIDTH: (_ALL, 1, (1.0, 4.0)),
    FaultKind.SLOW_DISK: (_ALL, 1, (0.0, 0.0)),
    FaultKind.BLOCKED_LOG: (_ALL, 2, (2.0, 8.0)),
}
# Between faults, least and most.
_GAP_S = (0.3, 2.0)
ENDS_PROCESS = frozenset({FaultKind.KILL, FaultKind.SLOW_DISK})


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault.

    Attributes:
        number: in its schedule, from 1.
        role: whom it hits.
        gap_s: after the fault before it.
        duration_s: until it is lifted; of a kill, until the restart.
        conditions: of the role's links, where it is they that suffer.
        links: beginnings of the names of those that do; empty is all.
        open_pause_s: of a slow disk.
    """

    number: int
    kind: FaultKind
    role: str
    gap_s: float
    duration_s: float
    conditions: Conditions | None = None
    links: Sequence[str] = ()
    open_pause_s: float = 0.0

    def __str__(self) -> str:
        return f"fault {self.number}: {self.kind.value} of {self.role} for {self.duration_s:.1f} s"


def make_schedule(count: int, roles: Sequence[str], *, seed: int) -> list[PlannedFault]:
    """Faults for these roles; kinds of roles are hit alike, however many of each there are.

    Args:
        roles: names such as target-0.
    """
    choices = random.Random(seed)
    by_kind: dict[str, list[str]] = {}
    for role in roles:
        by_kind.setdefault(role.rpartition("-")[0], []).append(role)
    schedule = []
    for number in range(1, count + 1):
        # Taking turns, lest a short schedule leave one out.
        role_kind = sorted(by_kind)[(number + seed) % len(by_kind)]
        kinds = [kind for kind, (hits, _, _) in _TABLE.items() if role_kind in hits]
        (kind,) = choices.choices(kinds, [_TABLE[kind][1] for kind in kinds])
        schedule.append(
            PlannedFault(
                number=number,
                kind=kind,
                role=choices.choice(by_kind[role_kind]),
                gap_s=choices.uniform(*_GAP_S),
                duration_s=choices.uniform(*_TABLE[kind][2]),
                conditions=_conditions(kind, choices),
                links=_links(kind),
                open_pause_s=choices.uniform(0.2, 1.5) if kind is FaultKind.SLOW_DISK else 0.0,
            )
        )
    return schedule


def _conditions(kind: FaultKind, choices: random.Random) -> Conditions | None:
    match kind:
        case FaultKind.PARTITION | FaultKind.PARTITION_DATA | FaultKind.PARTITION_REGISTRATION:
            return Conditions(held=BOTH)
        case FaultKind.HALF_OPEN:
            return Conditions(dropped=frozenset({choices.choice(list(Direction))}))
        case FaultKind.DELAY:
            return Conditions(delay_s=choices.uniform(0.002, 0.1), jitter_s=choices.uniform(0.0, 0.1))
        case FaultKind.LOSS:
            return Conditions(stall_chance=choices.uniform(0.02, 0.2), stall_s=choices.uniform(0.2, 0.4))
        case FaultKind.BANDWIDTH:
            return Conditions(bytes_per_s=choices.uniform(5e3, 1e5))
    return None


def _links(kind: FaultKind) -> Sequence[str]:
    return {FaultKind.PARTITION_DATA: ("data",), FaultKind.PARTITION_REGISTRATION: ("registration",)}.get(kind, ())
