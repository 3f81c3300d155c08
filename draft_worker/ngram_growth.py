"""Growth by n-grams: the trees of all sessions that listen to the trie, grown at every open and commit.

What was opened or committed to since the last time is matched together, in one call. A tree is whole at once, so that
nothing is to be begun or finished here, and no step ever runs. Prompts and committed tokens go to the trie's queue.

Under coupled noise a guess is right as often as the target chooses what it chose before; which rule holds matters to
the estimates alone. Rejection needs the q that a node was drawn from, which a trie has not: such sessions only feed it.
What a grammar forbids may be guessed; the target knows.

Knows neither proto nor grpc; one thread calls it.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.draft_worker import guess_tree
from outrider.draft_worker.growth_protocol import NoSlots
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.guess_tree import GuessBounds, GuessEnds, GuessForest, NewGuesses
from outrider.draft_worker.ngram_calibration import NgramCalibration, rule_number
from outrider.draft_worker.ngram_source import NgramSource
from outrider.draft_worker.ngram_tree import TextTails
from outrider.draft_worker.session import GrowthMode, SessionStart
from outrider.draft_worker.session_checks import CommitMismatch, check_commit, check_start, final_tokens, new_tokens
from outrider.errors import InvalidRequest, Superseded
from outrider.growth_source import GrowthSource
from outrider.sampling import VerificationRule

# Times that a commit is followed by a match of the text and the guesses after it, so that the next commit finds a tree
# that goes on, and how likely all these guesses have to be right together.
_LOOKS_AHEAD, _LEAST_AHEAD = 2, 0.1
# Growth is asked for two trees deep. Where so much of the first is expected to be accepted, no other source is needed.
_TREES_DEEP, _ENOUGH = 2, 2 / 3
_NOTHING = NewGuesses([], [], [], [])


@dataclass(frozen=True, kw_only=True)
class NgramGrowthConfig:
    """How a worker grows by n-grams.

    Attributes:
        vocab_size: tokens from here on are refused.
        max_model_len: most tokens of a session.
        max_live_nodes: most nodes of a session, whatever its credit.
        min_value: guesses less likely to be reached and accepted are not sent.
    """

    vocab_size: int
    max_model_len: int
    max_live_nodes: int = 256
    min_value: float = 0.01


class NgramSession:
    """One session that listens to the trie.

    Args:
        start: what opened it.
        config: see there.
        forest: where its tree is planted.
        new_id: gives its node ids, where another source has its part in them.
        speaks: whether it says so when there is no guess: nobody else answers its commits.
    """

    def __init__(
        self,
        start: SessionStart,
        config: NgramGrowthConfig,
        forest: GuessForest,
        *,
        new_id: Callable[[], int] | None,
        speaks: bool,
    ) -> None:
        self.key, self.owner, self.epoch = start.key, start.owner, start.epoch
        self.tokens = [*start.prompt, *start.output]
        self.is_sync = start.limits.mode is GrowthMode.SYNC
        self.is_silent = start.sampling.rule is VerificationRule.REJECTION
        self.speaks = speaks
        longest = min(len(start.prompt) + start.sampling.max_new_tokens, config.max_model_len)
        bounds = GuessBounds(
            max_depth=start.limits.max_depth,
            max_nodes=min(start.limits.max_live_nodes, config.max_live_nodes),
            last_position=longest - 1,
            final_tokens=final_tokens(start.sampling),
        )
        rule = rule_number(start.sampling)
        self.tree = forest.plant(len(self.tokens) - 1, bounds, rule=rule, new_id=new_id)

    def commit(self, token_ids: Sequence[int], calibration: NgramCalibration) -> None:
        """Tokens that it does not have yet, at least one."""
        self.tokens += token_ids
        self.tree.commit(token_ids, calibration)
        if self.is_sync:
            # A round's tree is made afresh: the coordinator keeps nothing of the last one.
            self.tree.clear()


class NgramGrowth:
    """All sessions of a worker that listen to its trie.

    Args:
        source: the trie, started.
        config: see there.

    Attributes:
        source: as given.
        calibration: of all sessions.
        steps: matches so far.
        slots: there are none.
        wake: called when a match was put off.
        leading: keys of sessions whose guesses need no other source beside them: they are expected to be right for most
            of a tree's depth.
    """

    def __init__(self, source: NgramSource, config: NgramGrowthConfig) -> None:
        self.source, self.config = source, config
        self.calibration = NgramCalibration()
        self.steps = 0
        guess_tree.warm_up()
        self._forest = GuessForest()
        self.slots = NoSlots()
        self.wake: Callable[[], None] = _nobody
        self.leading: set[tuple[int, int]] = set()
        self._sessions: dict[tuple[int, int], NgramSession] = {}
        # Opened or committed to since they were matched.
        self._due: dict[tuple[int, int], NgramSession] = {}

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    def session(self, key: tuple[int, int]) -> NgramSession | None:
        """The open session of this key."""
        return self._sessions.get(key)

    def open(self, start: SessionStart, *, new_id: Callable[[], int] | None = None, speaks: bool = True) -> None:
        """Opens a session; one of the same key and an older epoch is replaced.

        Args:
            start: what opens it.
            new_id: gives its node ids, where another source has its part in them.
            speaks: whether a commit after which there is no guess is answered with no nodes.

        Raises:
            Superseded: the session is open under this epoch or a newer one.
            InvalidRequest: token ids or lengths that are not taken.
        """
        held = self._sessions.get(start.key)
        if held is not None:
            if start.epoch <= held.epoch:
                raise Superseded(f"epoch {start.epoch} given, epoch {held.epoch} is open")
            self._remove(held)
        check_start(start, vocab_size=self.config.vocab_size, max_model_len=self.config.max_model_len)
        session = self._sessions[start.key] = NgramSession(
            start, self.config, self._forest, new_id=new_id, speaks=speaks
        )
        self.source.add(tuple(session.tokens))
        self._due[start.key] = session

    def commit(self, key: tuple[int, int], epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Tokens that the target committed after the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            InvalidRequest: a token beyond the vocabulary; the session is closed.
        """
        session = self._sessions.get(key)
        if session is None or session.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        try:
            check_commit(token_ids, vocab_size=self.config.vocab_size)
            token_ids = new_tokens(session.tokens, position, token_ids)
        except (InvalidRequest, CommitMismatch):
            self._remove(session)
            raise
        if token_ids:
            session.commit(token_ids, self.calibration)
            context = min(self.source.suffix_tokens, len(session.tokens) - len(token_ids))
            self.source.add(session.tokens[-len(token_ids) - context :], start=context)
            self._due[key] = session
            self.leading.discard(key)

    def speak(self, key: tuple[int, int]) -> None:
        """From now on nobody else answers the commits of this open session."""
        self._sessions[key].speaks = True

    def close(self, key: tuple[int, int], epoch: int) -> None:
        """Closes the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            self._remove(session)

    def close_owned(self, owner: Any) -> None:
        """Closes every session of an owner."""
        for session in [held for held in self._sessions.values() if held.owner is owner]:
            self._remove(session)

    def keys_of(self, owner: Any) -> set[tuple[int, int]]:
        """Keys of an owner's sessions."""
        return {key for key, session in self._sessions.items() if session.owner is owner}

    def match(self, left_out: Container[tuple[int, int]] = ()) -> GrowthStep | None:
        """The guesses of all sessions that were opened or committed to; None if there is nothing to say."""
        if not self._due:
            return None
        began = time.perf_counter_ns()
        due = [session for key, session in self._due.items() if key not in left_out]
        for session in due:
            del self._due[session.key]
        step = GrowthStep(GrowthSource.NGRAM)
        for session in due:
            if session.is_silent and session.speaks:
                step.add(_growth(session, _NOTHING, is_all=session.is_sync))
        self._guess([session for session in due if not session.is_silent], step)
        if not step.has_growth:
            return None
        self.steps += 1
        step.step_ns = time.perf_counter_ns() - began
        return step

    def _guess(self, sessions: Sequence[NgramSession], step: GrowthStep) -> None:
        if not sessions:
            return
        texts = TextTails.of([session.tokens for session in sessions], self.source.suffix_tokens)
        roots = GuessEnds.roots([session.tree.number for session in sessions], texts)
        if not self._look(roots):
            self._due |= {session.key: session for session in sessions}
            self.wake()
            return
        going_on = roots
        if any(session.is_sync for session in sessions):
            going_on = roots[np.array([not session.is_sync for session in sessions])]
        for _ in range(_LOOKS_AHEAD):
            leaves = self._forest.likeliest_ends(going_on, _LEAST_AHEAD)
            if not len(leaves) or not self._look(leaves):
                break
        depths, reaches = self._forest.reach(roots, _TREES_DEEP)
        new = self._forest.send([session.tree for session in sessions])
        for session, own, depth, reached in zip(sessions, new, depths, reaches, strict=True):
            # Most of the next tree's depth is expected to be accepted as it is guessed.
            leads = not session.is_sync and reached >= _ENOUGH * depth
            if leads:
                self.leading.add(session.key)
            if own.node_ids or session.speaks or leads:
                step.tokens += len(own.node_ids)
                step.sessions += 1
                step.add(_growth(session, own, is_all=leads or (session.is_sync and session.speaks)))

    def _look(self, ends: GuessEnds) -> bool:
        """Grows trees by what may follow the texts, below these nodes; False: not now."""
        found = self.source.guess(ends.texts)
        if found is None:
            return False
        buckets = self.calibration.buckets(found, self._forest.rules(ends))
        estimates = self.calibration.estimates(buckets)
        self._forest.graft(ends, found, estimates, buckets, min_value=self.config.min_value)
        return True

    # Nothing is ever begun.

    def begin(self, left_out: Container[tuple[int, int]] = ()) -> bool:
        """False: `match` has done everything."""
        del left_out
        return False

    def finish(self) -> GrowthStep:
        """A step without anything."""
        return GrowthStep(GrowthSource.NGRAM)

    overlaps = False
    num_begun = 0
    takes_another = True
    step_tokens = 0
    expected_end_ns = 0
    is_done = True

    def _remove(self, session: NgramSession) -> None:
        del self._sessions[session.key]
        self.leading.discard(session.key)
        self._due.pop(session.key, None)
        session.tree.close()


def _growth(session: NgramSession, new: NewGuesses, *, is_all: bool) -> SessionGrowth:
    return SessionGrowth(
        owner=session.owner,
        session_id=session.key[1],
        epoch=session.epoch,
        as_of=len(session.tokens),
        node_ids=new.node_ids,
        parents=new.parents,
        tokens=new.tokens,
        acceptance=new.acceptance,
        distributions=[None] * len(new.node_ids),
        complete=is_all,
    )


def _nobody() -> None:
    """Wakes nobody: whoever drives the growth by hand asks again."""
