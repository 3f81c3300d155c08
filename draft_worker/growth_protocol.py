"""What the growth thread drives: a source of growth, or several behind one front."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.draft_worker.growth_step import GrowthStep
from outrider.draft_worker.session import SessionStart


class Pool(Protocol):
    """How full what holds sessions' KV is."""

    @property
    def used(self) -> int:
        """Slots that sessions hold."""
        ...

    @property
    def num_slots(self) -> int:
        """Of all."""
        ...


@dataclass(frozen=True)
class NoSlots:
    """The pool of a source without KV."""

    used: int = 0
    num_slots: int = 0


class Growth(Protocol):
    """Sessions, and what grows of them. One thread calls all but the counts."""

    @property
    def steps(self) -> int:
        """Forwards, or matches, so far."""
        ...

    @property
    def wake(self) -> Callable[[], None]:
        """Called, on any thread, when there may be something to do that no command tells of."""
        ...

    @wake.setter
    def wake(self, wake: Callable[[], None], /) -> None: ...

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        ...

    @property
    def slots(self) -> Pool:
        """Where the KV of all sessions lies."""
        ...

    def open(self, start: SessionStart) -> object:
        """Opens a session; one of the same key and an older epoch is replaced.

        Raises:
            OutriderError: it is not opened.
        """
        ...

    def commit(self, key: tuple[int, int], epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Tokens that the target committed after the first `position`.

        Raises:
            OutriderError: the session is not open, or is closed now.
            CommitMismatch: the tokens do not continue the session; it is closed.
        """
        ...

    def close(self, key: tuple[int, int], epoch: int) -> None:
        """Closes the session if it is open under this epoch or an older one."""
        ...

    def close_owned(self, owner: Any) -> None:
        """Closes every session of an owner."""
        ...

    def keys_of(self, owner: Any) -> set[tuple[int, int]]:
        """Keys of an owner's sessions."""
        ...

    def match(self, left_out: Container[tuple[int, int]] = ()) -> GrowthStep | None:
        """What grows without a forward since the last opens and commits; None if nothing is to be said.

        Args:
            left_out: keys of sessions that have no part in it: what they would be matched by is about to change.
        """
        ...

    def begin(self, left_out: Container[tuple[int, int]] = ()) -> bool:
        """Starts a step; False if there is nothing to do until the next open, commit or close, or `finish`.

        Args:
            left_out: keys of sessions that have no part in it.
        """
        ...

    def finish(self) -> GrowthStep:
        """The step that was begun first, with its nodes."""
        ...

    @property
    def num_begun(self) -> int:
        """Steps that were begun and are not finished."""
        ...

    @property
    def takes_another(self) -> bool:
        """Whether a step may be begun now: none is under way, or one that need not be finished first."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a device works on its own between `begin` and `finish`."""
        ...

    @property
    def step_tokens(self) -> int:
        """Rows of the forward that was begun first; 0 where none was."""
        ...

    @property
    def expected_end_ns(self) -> int:
        """When the forward that was begun first should end, by `time.perf_counter_ns`."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        ...
