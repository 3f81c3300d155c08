"""Commands of coordinators to a target worker, as its round thread takes them, and the owners that results go to."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from outrider.draft_distribution import DraftDistribution
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions import OpenRequest, SessionFault, SessionKey


class RoundCost(NamedTuple):
    """What a round took.

    Attributes:
        step_ns: from its begin to its end.
        forward_ns: of these, the forward pass, the choices and the walk.
        rows: of the forward pass.
        sessions: with verified rows.
    """

    step_ns: int = 0
    forward_ns: int = 0
    rows: int = 0
    sessions: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """How full the target is; `busy` is the share of the time since the last report that the device worked.

    Reports alone say how long the round that runs has been running, and whether it may be compiling.
    """

    sessions: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    steps: int = 0
    busy: float = 0.0
    step_age_s: float = 0.0
    is_preparing: bool = False


class ResultOwner(Protocol):
    """Owner of sessions. Called on the round thread; must not block."""

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost, load: Load) -> None:
        """Take what a round has given this owner's sessions, each at most once."""
        ...

    def fail(self, session_id: int, epoch: int, fault: SessionFault) -> None:
        """Learn why a session could not be opened."""
        ...


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """Opens a session."""

    owner: ResultOwner
    request: OpenRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthCommand:
    """Adds nodes to a session's tree; columns as `RoundLoop.grow` takes them."""

    key: SessionKey
    epoch: int
    place: int
    as_of: int
    node_ids: Sequence[int]
    parents: Sequence[int]
    tokens: Sequence[int]
    acceptances: Sequence[float]
    drafter: int
    distributions: Sequence[DraftDistribution | None] = ()


@dataclass(frozen=True, slots=True)
class PlaceCommand:
    """Another worker takes a place, or, with `is_resent`, its worker sends its live tree again."""

    key: SessionKey
    epoch: int
    place: int
    is_resent: bool


@dataclass(frozen=True, slots=True)
class BoundCommand:
    """Sets the length up to which a session may run."""

    key: SessionKey
    epoch: int
    allow: int


@dataclass(frozen=True, slots=True)
class CloseCommand:
    """Closes a session."""

    key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaveCommand:
    """Closes all sessions of an owner."""

    owner: ResultOwner


@dataclass(frozen=True, slots=True)
class HoldCommand:
    """Lets an owner's sessions rest while it does not read its results, or go on."""

    owner: ResultOwner
    is_held: bool


@dataclass(frozen=True, slots=True)
class WorkCommand:
    """Runs something while no round is under way."""

    work: Callable[[RoundLoop], Any]
    done: "Future[Any]"


Command = (
    OpenCommand | GrowthCommand | PlaceCommand | BoundCommand | CloseCommand | LeaveCommand | HoldCommand | WorkCommand
)
