"""Figures of `outrider top`: rates between two samples of a coordinator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.v1 import generation_pb2, registry_pb2


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at one coordinator.

    Attributes:
        at_s: when, by a clock that only goes forward.
    """

    endpoint: str
    at_s: float
    info: generation_pb2.ServerInfo | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """One worker, as one coordinator sees it.

    Attributes:
        step_ms: time in steps over steps, since the look before; None where there was none, or no step.
    """

    worker_id: str
    role: str
    state: str
    sessions: int
    slots_used: int
    slots_total: int
    busy: float
    step_ms: float | None
    steps_per_s: float | None
    lease_age_ms: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One coordinator; what needs two looks is None after one, and after a restart.

    Attributes:
        acceptance_length: tokens a verification since the look before; where there was none, since the start.
        accepted_share: of the draft tokens that were verified in the same time.
    """

    endpoint: str
    problem: str = ""
    is_restarted: bool = False
    version: str = ""
    uptime_s: float = 0.0
    running: int = 0
    waiting: int = 0
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    requests_per_s: float | None = None
    refused_per_s: float | None = None
    acceptance_length: float | None = None
    accepted_share: float | None = None
    workers: tuple[WorkerFigures, ...] = ()

    @property
    def answers(self) -> bool:
        """True if the coordinator answered."""
        return not self.problem


def figures(before: Look | None, now: Look) -> Figures:
    """Figures of one coordinator."""
    info = now.info
    if info is None:
        return Figures(endpoint=now.endpoint, problem=now.problem or "no answer")
    old = before.info if before is not None else None
    is_restarted = old is not None and old.incarnation != info.incarnation
    if is_restarted:
        old = None
    elapsed_s = now.at_s - before.at_s if before is not None and old is not None else 0.0

    def rate(name: str) -> float | None:
        return (getattr(info, name) - getattr(old, name)) / elapsed_s if old is not None and elapsed_s > 0 else None

    length, share = _acceptance(old, info)
    known = {} if old is None else {worker.introduction.worker_id: worker for worker in old.workers}
    return Figures(
        endpoint=now.endpoint,
        is_restarted=is_restarted,
        version=info.version,
        uptime_s=info.uptime_s,
        running=info.running_sessions,
        waiting=info.waiting_requests,
        requests=info.requests_total,
        refused=info.refused_total,
        tokens=info.emitted_tokens_total,
        tokens_per_s=rate("emitted_tokens_total"),
        requests_per_s=rate("requests_total"),
        refused_per_s=rate("refused_total"),
        acceptance_length=length,
        accepted_share=share,
        workers=tuple(
            _worker(known.get(worker.introduction.worker_id), worker, elapsed_s)
            for worker in sorted(info.workers, key=_order)
        ),
    )


def _order(worker: generation_pb2.WorkerStatus) -> tuple[bool, str]:
    introduction = worker.introduction
    return introduction.role != registry_pb2.WORKER_ROLE_TARGET, introduction.worker_id


def _acceptance(
    old: generation_pb2.ServerInfo | None, info: generation_pb2.ServerInfo
) -> tuple[float | None, float | None]:
    now, then = info.speculation, old.speculation if old is not None else generation_pb2.SpeculationStats()
    if now.verify_steps == then.verify_steps:
        then = generation_pb2.SpeculationStats()
    rounds = now.verify_steps - then.verify_steps
    drafted = now.spec_draft_tokens - then.spec_draft_tokens
    accepted = now.spec_accepted_tokens - then.spec_accepted_tokens
    return 1 + accepted / rounds if rounds else None, accepted / drafted if drafted else None


def role_name(role: registry_pb2.WorkerRole) -> str:
    """Return what people call it."""
    return registry_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def _worker(
    old: generation_pb2.WorkerStatus | None, worker: generation_pb2.WorkerStatus, elapsed_s: float
) -> WorkerFigures:
    introduction, load = worker.introduction, worker.load
    steps = load.steps - old.load.steps if old is not None and elapsed_s > 0 else 0
    return WorkerFigures(
        worker_id=introduction.worker_id,
        role=role_name(introduction.role),
        state="preparing" if worker.state == "serving" and load.preparing else worker.state,
        sessions=load.sessions,
        slots_used=load.slots_used,
        slots_total=load.slots_total,
        busy=load.busy,
        step_ms=load.busy * elapsed_s * 1e3 / steps if steps > 0 else None,
        steps_per_s=steps / elapsed_s if steps > 0 else None,
        lease_age_ms=worker.lease_age_ms,
    )


def as_dict(frame: Sequence[Figures]) -> dict[str, Any]:
    """A frame as `outrider top --json` prints it."""
    return {"coordinators": [{**vars(each), "workers": [vars(worker) for worker in each.workers]} for each in frame]}


def all_workers(frame: Iterable[Figures]) -> list[WorkerFigures]:
    """Each worker once, as the first coordinator sees it that has it."""
    found: dict[str, WorkerFigures] = {}
    for each in frame:
        for worker in each.workers:
            found.setdefault(worker.worker_id, worker)
    return sorted(found.values(), key=lambda worker: (worker.role != "target", worker.worker_id))
