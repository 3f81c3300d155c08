"""Commands of coordinators to a draft worker, and the owners that answers go to.

A `SessionStart` opens its session.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import Key, SessionStart
from outrider.errors import OutriderError


class Load(NamedTuple):
    """Fill of the worker, and the share of about the last second that steps took."""

    sessions: int
    slots_used: int
    slots_total: int
    steps: int
    busy: float


class GrowthOwner(Protocol):
    """Owner of sessions. Called on the thread that grows; must not block."""

    def deliver(self, growth: Growth) -> None:
        """Take new nodes of this owner's sessions, from one step."""
        ...

    def fail(self, session_id: int, epoch: int, error: OutriderError) -> None:
        """Learn why a command could not be carried out; its session is not open."""
        ...


@dataclass(frozen=True, slots=True)
class CommitCommand:
    """Commits tokens of a session."""

    owner: GrowthOwner
    key: Key
    epoch: int
    position: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResendCommand:
    """Request to send a session's live tree again."""

    owner: GrowthOwner
    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseCommand:
    """Closes a session."""

    owner: GrowthOwner
    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaveCommand:
    """Closes all sessions of an owner."""

    owner: GrowthOwner


@dataclass(frozen=True, slots=True)
class HoldCommand:
    """Have growth gather while its owner does not read, or send it again."""

    owner: GrowthOwner
    is_held: bool


Command = SessionStart | CommitCommand | ResendCommand | CloseCommand | LeaveCommand | HoldCommand
