"""A worker's sources behind one front: each session grows by those that it asks for.

The nodes of both have their ids from one counter, so that an id is one node's. Both may grow the same token below the
same node: then it has two ids, and the mirror, where nodes of the same parent and token are one node, keeps the higher
estimate. A session that asks for nothing this worker has is open and stays silent.

The n-grams of a session are told of a commit first, and matched before the model's next forward is begun. Where they
are expected to be right for most of a tree's depth, the model rests: its steps would only take others' time.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.draft_worker.calibration_report import Calibration
from outrider.draft_worker.growth_protocol import Growth, NoSlots, Pool
from outrider.draft_worker.growth_step import GrowthStep
from outrider.draft_worker.session import SessionStart
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.errors import OutOfSlots, OutriderError, Superseded
from outrider.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.draft_worker.growth import TreeGrowth
    from outrider.draft_worker.ngram_growth import NgramGrowth

# Of a session's credit, what n-grams take at most where a model grows as well.
_NGRAM_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class _Session:
    epoch: int
    owner: Any
    parts: tuple[Growth, ...]


class SourcedGrowth:
    """Growth by a model, by n-grams, or by both.

    Args:
        model: None without one.
        ngram: None without n-grams. One of both is needed.

    Attributes:
        model: as given.
        ngram: as given.
    """

    def __init__(self, model: "TreeGrowth | None", ngram: "NgramGrowth | None") -> None:
        stepping = ngram if model is None else model
        assert stepping is not None, "a worker grows by something"
        self.model, self.ngram = model, ngram
        self._stepping: Growth = stepping
        self._sessions: dict[tuple[int, int], _Session] = {}

    @property
    def sources(self) -> frozenset[GrowthSource]:
        """What this worker grows by."""
        has = {GrowthSource.MODEL: self.model, GrowthSource.NGRAM: self.ngram}
        return frozenset(source for source, growth in has.items() if growth is not None)

    @property
    def calibrations(self) -> dict[GrowthSource, Calibration]:
        """What each source has learned."""
        has = {GrowthSource.MODEL: self.model, GrowthSource.NGRAM: self.ngram}
        return {source: growth.calibration for source, growth in has.items() if growth is not None}

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def slots(self) -> Pool:
        """Where the KV of the model's sessions lies."""
        return NoSlots() if self.model is None else self.model.slots

    @property
    def steps(self) -> int:
        """Forwards so far; matches, where there is no model."""
        return self._stepping.steps

    @property
    def wake(self) -> Callable[[], None]:
        """Called when there may be something to do that no command tells of."""
        return self._stepping.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._stepping.wake = wake
        if self.ngram is not None:
            self.ngram.wake = wake

    def open(self, start: SessionStart) -> None:
        """Opens a session; one of the same key and an older epoch is replaced.

        Raises:
            Superseded: the session is open under this epoch or a newer one.
            OutriderError: one of its sources does not take it.
        """
        held = self._sessions.get(start.key)
        if held is not None:
            if start.epoch <= held.epoch:
                raise Superseded(f"epoch {start.epoch} given, epoch {held.epoch} is open")
            self.close(start.key, start.epoch)
        mine = self.sources & frozenset(start.sources)
        if GrowthSource.NGRAM in mine and len(start.prompt) + len(start.output) > self.slots.num_slots:
            # Too long for the model's KV: n-grams need none.
            mine -= {GrowthSource.MODEL}
        parts: tuple[Growth, ...] = ()
        try:
            new_id = None
            if self.model is not None and GrowthSource.MODEL in mine:
                of_model = start
                if GrowthSource.NGRAM in mine:
                    start, of_model = _shared_credit(start)
                new_id = self.model.open(of_model).tree.new_id
                parts = (self.model,)
            if self.ngram is not None and GrowthSource.NGRAM in mine:
                self.ngram.open(start, new_id=new_id, speaks=not parts)
                parts = (self.ngram, *parts)
        except OutriderError:
            for part in parts:
                part.close(start.key, start.epoch)
            raise
        self._sessions[start.key] = _Session(start.epoch, start.owner, parts)

    def commit(self, key: tuple[int, int], epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Tokens that the target committed after the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            OutriderError: a source cannot go on with it; it is closed. What has become too long for the model's KV goes
                on by n-grams, where it listens to them.
        """
        session = self._sessions.get(key)
        if session is None or session.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        try:
            for part in session.parts:
                part.commit(key, epoch, position, token_ids)
        except OutOfSlots:
            if self.ngram is None or self.ngram not in session.parts:
                self.close(key, epoch)
                raise
            # Too long for the model's KV by now: the model has closed it, and n-grams go on.
            self.ngram.speak(key)
            self._sessions[key] = replace(session, parts=(self.ngram,))
        except (OutriderError, CommitMismatch):
            self.close(key, epoch)
            raise

    def close(self, key: tuple[int, int], epoch: int) -> None:
        """Closes the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            del self._sessions[key]
            for part in session.parts:
                part.close(key, epoch)

    def close_owned(self, owner: Any) -> None:
        """Closes every session of an owner."""
        for key, session in list(self._sessions.items()):
            if session.owner is owner:
                self.close(key, session.epoch)

    def keys_of(self, owner: Any) -> set[tuple[int, int]]:
        """Keys of an owner's sessions."""
        return {key for key, session in self._sessions.items() if session.owner is owner}

    def match(self, left_out: Container[tuple[int, int]] = ()) -> GrowthStep | None:
        """What n-grams give since the last opens and commits; None if that is nothing."""
        return None if self.ngram is None else self.ngram.match(left_out)

    def begin(self, left_out: Container[tuple[int, int]] = ()) -> bool:
        """Starts a step of the model; False if there is nothing to do until the next command, or `finish`."""
        return self._stepping.begin(self._with_resting(left_out))

    def finish(self) -> GrowthStep:
        """The step that was begun first, with its nodes."""
        return self._stepping.finish()

    def _with_resting(self, left_out: Container[tuple[int, int]]) -> Container[tuple[int, int]]:
        """`left_out`, and the sessions that go on by n-grams for now.

        Their model rests, and computes what was committed meanwhile in one chain once it is needed again; prompts it
        computes at once, while the target does so too.
        """
        if self.model is None or self.ngram is None:
            return left_out
        resting = {key for key in self.ngram.leading if (own := self.model.session(key)) is not None and own.has_prompt}
        if not resting:
            return left_out
        return {key for key in self._sessions if key in resting or key in left_out}

    @property
    def num_begun(self) -> int:
        """Steps that were begun and are not finished."""
        return self._stepping.num_begun

    @property
    def takes_another(self) -> bool:
        """Whether a step may be begun now."""
        return self._stepping.takes_another

    @property
    def overlaps(self) -> bool:
        """Whether a device works on its own between `begin` and `finish`."""
        return self._stepping.overlaps

    @property
    def step_tokens(self) -> int:
        """Rows of the forward that was begun first; 0 where none was."""
        return self._stepping.step_tokens

    @property
    def expected_end_ns(self) -> int:
        """When the forward that was begun first should end, by `time.perf_counter_ns`."""
        return self._stepping.expected_end_ns

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._stepping.is_done


def _shared_credit(start: SessionStart) -> tuple[SessionStart, SessionStart]:
    """The session as n-grams and as the model open it."""
    of_ngram, of_model = shared_limits(start.limits.max_live_nodes)
    ngram = replace(start, limits=replace(start.limits, max_live_nodes=of_ngram))
    return ngram, replace(start, limits=replace(start.limits, max_live_nodes=of_model))


def shared_limits(max_live_nodes: int) -> tuple[int, int]:
    """Most nodes of n-grams and of the model: together as many as the session may have."""
    guessed = max(1, int(max_live_nodes * _NGRAM_SHARE))
    return guessed, max(1, max_live_nodes - guessed)
