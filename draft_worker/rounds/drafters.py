"""A worker's drafters behind one front: each session grows by those that it asks for.

Both may grow the same token below the same node; it then has two ids, and whoever verifies takes the higher estimate.
A session that asks for nothing this worker has is open and stays silent. Where n-grams are expected to be right for
most of a tree's depth, the model rests: its steps would only take others' time.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.draft_worker.calibration_report import Calibration
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import CommitMismatch, Key, SessionStart
from outrider.errors import OutOfSlots, OutriderError, Superseded
from outrider.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter

# Largest share of a session's credit for n-grams where a model grows too.
_NGRAM_SHARE = 1 / 3


@dataclass(slots=True)
class _Session:
    start: SessionStart
    by_model: bool
    by_ngram: bool


class Drafters:
    """Growth by a model, by n-grams, or by both.

    Args:
        model: None without one.
        ngram: None without n-grams.

    Attributes:
        model, ngram: as given.
    """

    def __init__(self, model: "ModelDrafter | None", ngram: "NgramDrafter | None") -> None:
        self.model, self.ngram = model, ngram
        self._sessions: dict[Key, _Session] = {}
        # Keys that the model rests for.
        self._resting: set[Key] = set()

    @property
    def sources(self) -> frozenset[GrowthSource]:
        """Drafters of this worker."""
        has = {GrowthSource.MODEL: self.model, GrowthSource.NGRAM: self.ngram}
        return frozenset(source for source, drafter in has.items() if drafter is not None)

    @property
    def calibrations(self) -> dict[GrowthSource, Calibration]:
        """Calibration of each drafter."""
        has = {GrowthSource.MODEL: self.model, GrowthSource.NGRAM: self.ngram}
        return {source: drafter.calibration for source, drafter in has.items() if drafter is not None}

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def slots(self) -> tuple[int, int]:
        """KV slots in use, and all of them."""
        return (0, 0) if self.model is None else (self.model.slots_used, self.model.num_slots)

    @property
    def steps(self) -> int:
        """Forward passes so far; matches, where there is no model."""
        if self.model is not None:
            return self.model.steps
        return 0 if self.ngram is None else self.ngram.steps

    @property
    def launches(self) -> int:
        """Steps of the model launched so far."""
        return 0 if self.model is None else self.model.launches

    @property
    def is_preparing(self) -> bool:
        """True if the next step may compile something first."""
        return self.model is not None and self.model.is_preparing

    @property
    def is_busy(self) -> bool:
        """True while a step is under way."""
        return self.model is not None and self.model.is_busy

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Set what is called, on any thread, when there may be something to do that no command tells of."""
        for drafter in (self.model, self.ngram):
            if drafter is not None:
                drafter.wake = wake

    def open(self, start: SessionStart) -> None:
        """Open a session; one of the same key and an older epoch is replaced.

        Raises:
            Superseded: the session is open under this epoch or a newer one.
            OutriderError: one of its drafters does not take it.
        """
        held = self._sessions.get(start.key)
        if held is not None:
            if start.epoch <= held.start.epoch:
                raise Superseded(f"epoch {start.epoch} given, epoch {held.start.epoch} is open")
            self.close(start.key, start.epoch)
        mine = self.sources & frozenset(start.sources)
        by_ngram = GrowthSource.NGRAM in mine
        too_long = len(start.prompt) + len(start.output) > self.slots[1]
        by_model = GrowthSource.MODEL in mine and not (by_ngram and too_long)
        of_model = of_ngram = start
        if by_model and by_ngram:
            of_ngram, of_model = _shared_credit(start)
        try:
            if by_model and self.model is not None:
                self.model.open(of_model)
            if by_ngram and self.ngram is not None:
                self.ngram.open(of_ngram, speaks=not by_model)
        except OutriderError:
            for drafter in (self.model, self.ngram):
                if drafter is not None:
                    drafter.close(start.key, start.epoch)
            raise
        self._sessions[start.key] = _Session(start, by_model, by_ngram)

    def commit(self, key: Key, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Commit tokens that stand behind the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            OutriderError: a drafter cannot go on with it; it is closed. What has become too long for the model's KV
                goes on by n-grams, where it has them.
        """
        session = self._sessions.get(key)
        if session is None or session.start.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        try:
            if session.by_ngram and self.ngram is not None:
                self.ngram.commit(key, epoch, position, token_ids)
            if session.by_model and self.model is not None:
                self.model.commit(key, epoch, position, token_ids)
        except OutOfSlots:
            if self.ngram is None or not session.by_ngram:
                self.close(key, epoch)
                raise
            self.ngram.speak(key)
            session.by_model = False
        except (OutriderError, CommitMismatch):
            self.close(key, epoch)
            raise

    def close(self, key: Key, epoch: int) -> None:
        """Close the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is None or session.start.epoch > epoch:
            return
        del self._sessions[key]
        self._resting.discard(key)
        if session.by_model and self.model is not None:
            self.model.close(key, epoch)
        if session.by_ngram and self.ngram is not None:
            self.ngram.close(key, epoch)

    def close_owned(self, owner: Any) -> None:
        """Close every session of an owner."""
        for key in self.keys_of(owner):
            self.close(key, self._sessions[key].start.epoch)

    def keys_of(self, owner: Any) -> set[Key]:
        """Return the keys of an owner's sessions."""
        return {key for key, session in self._sessions.items() if session.start.owner is owner}

    def hold(self, key: Key, reason: str, *, is_held: bool) -> None:
        """Let the model rest for a session, or go on once no reason is left."""
        if self.model is not None:
            self.model.hold(key, reason, is_held=is_held)

    def advance(self, left_out: Container[Key] = ()) -> Iterator[Growth]:
        """Yield growth: what n-grams match first, then, once a step has been launched where possible, the model's.

        Args:
            left_out: keys of sessions that n-grams are not matched for.
        """
        if self.ngram is not None:
            matched = self.ngram.match(left_out)
            if matched is not None:
                yield matched
            if self.model is not None:
                self._let_model_rest(self.model, self.ngram.leading)
        if self.model is not None:
            yield from self.model.advance()

    def _let_model_rest(self, model: "ModelDrafter", leading: set[Key]) -> None:
        # Prompts are computed at once, while the target does so too.
        led = {key for key in leading if key in self._resting or model.has_prompt(key)}
        for key in led - self._resting:
            model.hold(key, "n-grams", is_held=True)
        for key in self._resting - led:
            model.hold(key, "n-grams", is_held=False)
        self._resting = led


def _shared_credit(start: SessionStart) -> tuple[SessionStart, SessionStart]:
    """The session as n-grams and as the model open it."""
    of_ngram, of_model = shared_limits(start.limits.max_live_nodes)
    ngram = replace(start, limits=replace(start.limits, max_live_nodes=of_ngram))
    return ngram, replace(start, limits=replace(start.limits, max_live_nodes=of_model))


def shared_limits(max_live_nodes: int) -> tuple[int, int]:
    """Return the most nodes of n-grams and of the model: together as many as the session may have."""
    of_ngram = max(1, int(max_live_nodes * _NGRAM_SHARE))
    return of_ngram, max(1, max_live_nodes - of_ngram)
