"""A worker's drafters behind one front: each session grows by those that it asks for.

What coordinators ask for is checked here, once for all drafters: epochs, token ids, and that commits continue what was
committed. Each drafter has a tree and ids of its own; where both grow the same node, the target merges them. A session
that asks for nothing this worker has is open and stays silent. Where n-grams are expected to be right for most of a
tree's depth, the model rests: its steps would only take others' time.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import Key, SessionStart, check_start, new_tokens
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import OutriderError, Superseded

if TYPE_CHECKING:
    from outrider.draft_worker.drafters.model.drafter import ModelDrafter
    from outrider.draft_worker.drafters.ngram.drafter import NgramDrafter

# Largest share of a session's credit for n-grams where a model grows too.
_NGRAM_SHARE = 1 / 3


@dataclass(slots=True)
class _Session:
    start: SessionStart
    tokens: list[int]  # committed
    drafters: "list[NgramDrafter | ModelDrafter]"  # that grow it


class Drafters:
    """Growth by a model, by n-grams, or by both.

    Args:
        model: None without one.
        ngram: None without n-grams; of the model's vocabulary.

    Attributes:
        model, ngram: as given.
        calibrations: of each drafter.
    """

    def __init__(self, model: "ModelDrafter | None", ngram: "NgramDrafter | None") -> None:
        self.model, self.ngram = model, ngram
        # N-grams first: their commits cannot fail, and what they match leaves before the model computes.
        self._drafters = [drafter for drafter in (ngram, model) if drafter is not None]
        self.calibrations = {drafter.source: drafter.calibration for drafter in self._drafters}
        self._sessions: dict[Key, _Session] = {}
        # Keys that the model rests for.
        self._resting: set[Key] = set()
        # By owner and session id, the length at which the tree was dropped, until growth has told.
        self._forgot: dict[tuple[Any, int], int] = {}
        # To be sent before anything that grows from now on.
        self._ready: list[Growth] = []

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
        return self._drafters[-1].steps

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
        for drafter in self._drafters:
            drafter.wake = wake

    def open(self, start: SessionStart) -> None:
        """Open a session; one of the same key and an older epoch is replaced.

        Raises:
            Superseded: the session is open under this epoch or a newer one.
            InvalidRequest: token ids or lengths that are not taken.
            OutOfSlots: a drafter has no room for it now.
        """
        held = self._sessions.get(start.key)
        if held is not None:
            if start.epoch <= held.start.epoch:
                raise Superseded(f"epoch {start.epoch} given, epoch {held.start.epoch} is open")
            self.close(start.key, start.epoch)
        first, tokens = self._drafters[0], [*start.prompt, *start.output]
        check_start(start, vocab_size=first.vocab_size, max_model_len=first.max_model_len)
        drafters = [drafter for drafter in self._drafters if drafter.source in start.sources]
        try:
            for drafter in reversed(drafters):
                drafter.open(start if len(drafters) == 1 else _shared(start, drafter.source))
        except OutriderError:
            for drafter in drafters:
                drafter.close(start.key)
            raise
        self._sessions[start.key] = _Session(start, tokens, drafters)

    def commit(self, key: Key, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Commit tokens that stand behind the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            InvalidRequest: a token outside the vocabulary, or more tokens than the model's KV holds; the session is
                closed.
        """
        session = self._sessions.get(key)
        if session is None or session.start.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        try:
            tokens = new_tokens(session.tokens, position, token_ids, vocab_size=self._drafters[0].vocab_size)
            session.tokens += tokens
            has_dropped = [drafter.commit(key, tokens) for drafter in session.drafters] if tokens else []
        except OutriderError:
            self.close(key, epoch)
            raise
        if any(has_dropped):
            self._forgot[session.start.owner, key[1]] = len(session.tokens)
            if not session.start.is_sync:
                # Ids of a tree that lives on are void like all others.
                self._send_again(session)

    def resend(self, key: Key, epoch: int) -> None:
        """Send the live tree of a session again, if it is open under this epoch: parents first, with the same ids."""
        session = self._sessions.get(key)
        if session is not None and session.start.epoch == epoch:
            self._send_again(session)

    def _send_again(self, session: _Session) -> None:
        # The model first: growth of it that has come has to leave before.
        for drafter in reversed(session.drafters):
            *earlier, tree = drafter.live_tree(session.start.key)
            tree.again = [True]
            self._ready += [*earlier, tree]

    def close(self, key: Key, epoch: int) -> None:
        """Close the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is None or session.start.epoch > epoch:
            return
        del self._sessions[key]
        self._resting.discard(key)
        self._forgot.pop((session.start.owner, key[1]), None)
        for drafter in session.drafters:
            drafter.close(key)

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
        ready, self._ready = self._ready, []
        for growth in chain(ready, self._grow(left_out)):
            for place, name in enumerate(zip(growth.owners, growth.session_ids, strict=True)) if self._forgot else ():
                if growth.as_of[place] >= self._forgot.get(name, float("inf")):
                    del self._forgot[name]
                    growth.forgot[place] = True
            yield growth

    def _grow(self, left_out: Container[Key]) -> Iterator[Growth]:
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


def _shared(start: SessionStart, source: GrowthSource) -> SessionStart:
    """The session as one of two drafters opens it: with its share of the credit."""
    of_ngram, of_model = shared_limits(start.limits.max_live_nodes)
    most = of_ngram if source is GrowthSource.NGRAM else of_model
    return replace(start, is_shared=True, limits=replace(start.limits, max_live_nodes=most))


def shared_limits(max_live_nodes: int) -> tuple[int, int]:
    """Return the most nodes of n-grams and of the model: together as many as the session may have."""
    of_ngram = max(1, int(max_live_nodes * _NGRAM_SHARE))
    return of_ngram, max(1, max_live_nodes - of_ngram)
