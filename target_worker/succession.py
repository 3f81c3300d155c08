"""Batches that are sent before the step they follow has ended: their trees, made out of what that step leaves.

A successor holds growth below its step's trees for every outcome. What of it hangs below the tokens that were emitted
is found the moment they are known (`outrider.succession`), so that the device goes on without a word from the
coordinator. That moment is the one in which nothing runs: here are columns, and one object a session.

Shapes: S sessions of a successor, N nodes that it has.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from outrider.succession import NOTHING_EMITTED, Addition, Ints, Succession, extended, surviving_rows
from outrider.target_worker.asked_trees import AskedTrees
from outrider.target_worker.sessions import Code, Outcome, SessionFault, SessionKey, TreeRequest, TreeResult

_ENDED = TreeResult(outcome=Outcome.ENDED)
# A member of an enum is looked up anew wherever it is named.
_ENDED_OUTCOME, _ERROR_OUTCOME = Outcome.ENDED, Outcome.ERROR


def _refused(code: Code, message: str) -> TreeResult:
    return TreeResult(outcome=Outcome.ERROR, fault=SessionFault(code, message))


_TORN = _refused(Code.INVALID_ARGUMENT, "parents: a parent must stand before its children")


class Sent(NamedTuple):
    """A successor's trees before the step is looked at, with so many additions."""

    trees: Succession
    additions: int


class Successor:
    """A batch that follows a step.

    Whoever reads the stream adds to it, the step thread says when that ends: each by assigning one reference.

    Args:
        trees: as sent.

    Attributes:
        follows: number of the step.
        keys: [S]
        epochs: [S]
        lengths: [S] of sessions in the step those that were sent with it.
        sent: what has come of it by now.
    """

    def __init__(
        self,
        *,
        follows: int,
        keys: Sequence[SessionKey],
        epochs: Sequence[int],
        lengths: Sequence[int],
        trees: Succession,
    ) -> None:
        self.follows, self.keys, self.epochs, self.lengths = follows, keys, epochs, lengths
        self.sent = self._first = Sent(trees, 0)
        self._settled: Sent | None = None

    def add(self, more: Addition) -> None:
        """Nodes that have grown since; once it is settled they change nothing."""
        trees, additions = self.sent
        self.sent = Sent(extended(trees, [more])[0], additions + 1)

    def settle(self, *, alone: bool = False) -> Sent:
        """What its trees are found in, from the first call on; `alone`: without additions."""
        if self._settled is None:
            self._settled = self._first if alone else self.sent
        return self._settled


class _Checked(NamedTuple):
    """Trees that were checked against the step: `found` has what is known of it, `torn` places of broken sessions."""

    trees: Succession
    found: Succession
    torn: set[int]


class Followed:
    """What is known of a successor before the step that it follows is finished.

    Attributes:
        successor: itself.
        trees: of the step.
    """

    def __init__(self, successor: Successor, trees: Sequence[TreeRequest]) -> None:
        self.successor, self.trees = successor, trees
        own = {tree.key: place for place, tree in enumerate(trees)}
        self._places: list[int | None] = []
        self._refused: dict[int, TreeResult] = {}
        verified: list[int] = []
        for row, (key, epoch, length) in enumerate(
            zip(successor.keys, successor.epochs, successor.lengths, strict=True)
        ):
            place = own.get(key)
            if place is None or (tree := trees[place]).epoch != epoch:
                self._places.append(None)
                verified.append(0)
                continue
            self._places.append(place)
            verified.append(len(tree.tokens))
            if length != tree.length:
                message = f"length {length} given, {tree.length} in the step that is followed: open the session again"
                self._refused[row] = _refused(Code.FAILED_PRECONDITION, message)
        self._verified = np.array(verified, dtype=np.int64)
        self._checked = self._check(successor.sent.trees)

    def check(self) -> None:
        """Makes out what can be known of what has come by now; for any thread."""
        self._checked = self._check(self.successor.sent.trees)

    def _check(self, trees: Succession) -> _Checked:
        parents, torn = _checked_parents(trees, self._verified)
        # Where nothing was emitted, nothing is left of a session that was in the step.
        is_in_step = [place is not None or row in torn for row, place in enumerate(self._places)]
        found = replace(
            trees, is_in_step=np.array(is_in_step, dtype=np.bool_), verified=self._verified, parents=parents
        )
        return _Checked(trees, found, torn)

    def rows(self, trees: Succession, results: Sequence[TreeResult]) -> AskedTrees:
        """What is asked of the sessions, now that the step's trees had these results.

        Args:
            trees: of the successor, as they were settled.
            results: of the step.
        """
        successor, count, checked = self.successor, len(self._places), self._checked
        if checked.trees is not trees:
            checked = self._check(trees)
        lengths = list(successor.lengths)
        settled: list[TreeResult | None] = [None] * count
        ends, finals, is_asked = [NOTHING_EMITTED] * count, [0] * count, [True] * count
        for row, place in enumerate(self._places):
            if place is None:
                continue
            result = results[place]
            if result.ended or result.outcome is _ENDED_OUTCOME or result.outcome is _ERROR_OUTCOME:
                settled[row], is_asked[row] = _ENDED, False
            elif row in self._refused:
                settled[row], is_asked[row] = self._refused[row], False
            elif token_ids := result.token_ids:
                lengths[row] += len(token_ids)
                # What the worker drafted itself was never sent: nothing can hang from it.
                if not self.trees[place].resident:
                    ends[row] = result.accepted_nodes[-1] if result.accepted_nodes else 0
                    finals[row] = token_ids[-1]
        for row in checked.torn:
            settled[row], is_asked[row], ends[row] = _TORN, False, NOTHING_EMITTED
        rows = surviving_rows(
            checked.found,
            np.array(ends, dtype=np.int64),
            np.array(finals, dtype=np.int64),
            np.array(is_asked, dtype=np.bool_),
        )
        return AskedTrees(
            successor.keys, successor.epochs, lengths, settled, (rows.counts.tolist(), rows.tokens, rows.parents)
        )


def _checked_parents(sent: Succession, verified: Ints) -> tuple[Ints, set[int]]:
    """The parents, and the places of the sessions of which one does not stand before its child; there they are 0."""
    place = np.arange(len(verified)).repeat(sent.counts)
    # Of each session, by how much the numbers of its nodes are more than their places among the N.
    more = verified + 1 - sent.counts.cumsum() + sent.counts
    is_torn = sent.parents >= np.arange(len(place)) + more[place]
    if not is_torn.any():
        return sent.parents, set()
    torn = set(place[is_torn].tolist())
    return np.where(np.isin(place, list(torn)), 0, sent.parents), torn


class StreamSteps:
    """What the last finished step of one stream has left. Only the step thread touches it, but for `expect` and `add`.

    Attributes:
        ended_ns: when it was finished, by `time.perf_counter_ns`.
    """

    def __init__(self) -> None:
        self.ended_ns = 0
        self._step = self._answered = 0
        self._expected: Successor | None = None
        self._begun: Successor | None = None
        self._trees: Sequence[TreeRequest] = ()
        self._results: Sequence[TreeResult] = ()
        self._followed: Followed | None = None

    def ends(self, step: int, trees: Sequence[TreeRequest], results: Sequence[TreeResult]) -> None:
        """A step is finished: these trees had these results."""
        self._step, self.ended_ns = step, time.perf_counter_ns()
        self._trees, self._results = trees, results

    def has_ended(self, successor: Successor) -> bool:
        """Whether the step that is followed is finished."""
        return self._step >= successor.follows

    def prepare(self, successor: Successor, step: int, trees: Sequence[TreeRequest]) -> None:
        """Makes out what can be known of a successor while the step that it follows runs, over these trees."""
        if step == successor.follows:
            self._followed = Followed(successor, trees)

    def trees_of(self, successor: Successor) -> AskedTrees:
        """[S] what is asked of the sessions, now that the step is finished; in place of faults their results."""
        assert self._step == successor.follows, "a successor follows the step before it"
        # The answer to that step may have said that it has got none.
        trees = successor.settle(alone=self._answered >= successor.follows).trees
        self._begun = successor
        followed, self._followed = self._followed, None
        if followed is None or followed.successor is not successor or followed.trees is not self._trees:
            followed = Followed(successor, self._trees)
        return followed.rows(trees, self._results)

    def answers(self, step: int) -> int:
        """A finished step is answered; additions that the successor has got by then, the last ones that it gets."""
        self._answered = step
        # Where it has begun already, another batch may have come behind it.
        for successor in (self._begun, self._expected):
            if successor is not None and successor.follows == step:
                return successor.settle().additions
        return 0

    def expect(self, successor: Successor | None) -> None:
        """The last batch that came; None where it is no successor. For the stream's reader."""
        self._expected = successor

    def add(self, more: Addition) -> None:
        """Nodes for the successor that is expected. For the stream's reader."""
        successor, followed = self._expected, self._followed
        if successor is None:
            return
        successor.add(more)
        if followed is not None and followed.successor is successor:
            followed.check()
