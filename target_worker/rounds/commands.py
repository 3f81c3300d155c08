"""Commands of coordinators to the rounds of a target, and the owners that results go to."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions.requests import OpenRequest, SessionFault, SessionKey


class RoundCost(NamedTuple):
    """Time and size of a round, over all owners.

    Attributes:
        step_ns: from its begin to its end, or from the end of the one before.
        forward_ns: of these, the forward pass and what follows up to the walk.
        rows: of the forward pass.
        plain_ns: what it would have taken without nodes.
    """

    step_ns: int
    forward_ns: int
    rows: int
    plain_ns: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Fill of a target.

    Attributes:
        sessions: open.
        slots_used, slots_cached, slots_total: KV slots of sessions, those that are remembered, and all.
        steps: since start.
        busy: share of the time since the last report that steps took.
        step_age_s: how long the step that runs has been running, in reports alone.
        is_preparing: whether it may be compiling, likewise.
    """

    sessions: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    steps: int = 0
    busy: float = 0.0
    step_age_s: float = 0.0
    is_preparing: bool = False


class RoundOwner(Protocol):
    """Owner of sessions; called on the thread of the rounds."""

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost | None) -> None:
        """Take what one round has given this owner's sessions; without a cost, what no round has brought about."""
        ...


class PlaceChange(Enum):
    """Change of the worker that has a place of a session."""

    TAKEN = "taken"
    LEFT = "left"
    RESENT = "resent"


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """Opens a session, or replaces it if it is open under an older epoch."""

    owner: RoundOwner
    request: OpenRequest


@dataclass(frozen=True, slots=True)
class RefuseCommand:
    """Tells an owner what is wrong with a command for a session, and closes the session if it is open."""

    owner: RoundOwner
    key: SessionKey
    epoch: int
    fault: SessionFault


@dataclass(frozen=True, slots=True)
class PlaceCommand:
    """Changes who has a place of a session."""

    key: SessionKey
    epoch: int
    place: int
    change: PlaceChange


@dataclass(frozen=True, slots=True)
class BoundsCommand:
    """Sets how far a session may go, and whether it runs alone."""

    key: SessionKey
    epoch: int
    allow: int
    is_alone: bool


@dataclass(frozen=True, slots=True)
class CloseCommand:
    """Closes a session."""

    key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True)
class HoldCommand:
    """Lets an owner's sessions rest while it does not read its results, or go on."""

    owner: RoundOwner
    is_held: bool


@dataclass(frozen=True, slots=True)
class LeaveCommand:
    """Closes all sessions of an owner."""

    owner: RoundOwner


Command = (
    OpenCommand | RefuseCommand | PlaceCommand | Growth | BoundsCommand | CloseCommand | HoldCommand | LeaveCommand
)
