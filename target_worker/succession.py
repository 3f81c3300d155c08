"""Batches that are sent before the step they follow has ended: their trees, made out of what that step leaves.

A successor holds growth below its step's trees for every outcome. What of it hangs below the tokens that were emitted
is found the moment they are known (`outrider.succession`), so that the device goes on without a word from the
coordinator. That moment is the one in which nothing runs: here are columns, and one object a session.

Shapes: S sessions of a successor, N nodes that it has.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.compiled import IS_COMPILED
from outrider.succession import NOTHING_EMITTED, Ints, Succession, surviving, surviving_compiled
from outrider.succession_kernels import are_in_order
from outrider.target_worker.sessions import Code, Outcome, SessionFault, SessionKey, TreeRequest, TreeResult
from outrider.wire import split_by_counts

_ENDED = TreeResult(outcome=Outcome.ENDED)
# A member of an enum is looked up anew wherever it is named.
_ENDED_OUTCOME, _ERROR_OUTCOME = Outcome.ENDED, Outcome.ERROR


def _refused(code: Code, message: str) -> TreeResult:
    return TreeResult(outcome=Outcome.ERROR, fault=SessionFault(code, message))


_TORN = _refused(Code.INVALID_ARGUMENT, "parents: a parent must stand before its children")


@dataclass(frozen=True, kw_only=True, eq=False)
class Successor:
    """A batch that follows a step.

    Attributes:
        follows: number of the step.
        keys: [S]
        epochs: [S]
        lengths: [S] of sessions in the step those that were sent with it.
        sent: its trees, before the step is looked at.
    """

    follows: int
    keys: Sequence[SessionKey]
    epochs: Sequence[int]
    lengths: Sequence[int]
    sent: Succession


class _Left:
    """What the step has left of a successor's sessions, as columns of S.

    Attributes:
        is_in_step: whether it was in the step.
        verified: nodes that the step was asked to verify of it.
        ends: number of the last accepted one, 0 for the root; `NOTHING_EMITTED`.
        tokens: the last that was emitted.
        lengths: tokens that it has now.
        settled: its result, where there is nothing to verify any more.
    """

    def __init__(self, successor: Successor) -> None:
        count = len(successor.keys)
        self.is_in_step = [False] * count
        self.verified = [0] * count
        self.ends = [NOTHING_EMITTED] * count
        self.tokens = [0] * count
        self.lengths = list(successor.lengths)
        self.settled: list[TreeResult | None] = [None] * count


class StreamSteps:
    """What the last finished step of one stream has left. Only the step thread touches it.

    Attributes:
        ended_ns: when it was finished, by `time.perf_counter_ns`.
    """

    def __init__(self) -> None:
        self.ended_ns = 0
        self._step = 0
        self._trees: Sequence[TreeRequest] = ()
        self._results: Sequence[TreeResult] = ()

    def ends(self, step: int, trees: Sequence[TreeRequest], results: Sequence[TreeResult]) -> None:
        """A step is finished: these trees had these results."""
        self._step, self.ended_ns = step, time.perf_counter_ns()
        self._trees, self._results = trees, results

    def has_ended(self, successor: Successor) -> bool:
        """Whether the step that is followed is finished."""
        return self._step >= successor.follows

    def trees_of(self, successor: Successor) -> list[TreeRequest]:
        """[S] what is asked of the sessions, now that the step is finished; in place of faults their results."""
        assert self._step == successor.follows, "a successor follows the step before it"
        left = self._left(successor)
        if not len(successor.sent.tokens):
            # Plain steps, as they all are without drafts.
            return [
                TreeRequest(key=key, epoch=epoch, length=length, tokens=(), parents=(), settled=settled)
                for key, epoch, length, settled in zip(
                    successor.keys, successor.epochs, left.lengths, left.settled, strict=True
                )
            ]
        tokens, parents, counts, torn = _surviving(successor.sent, left)
        for place in torn:
            left.settled[place] = _TORN
        return [
            TreeRequest(
                key=key, epoch=epoch, length=length, tokens=tokens[nodes], parents=parents[nodes], settled=settled
            )
            for key, epoch, length, settled, nodes in zip(
                successor.keys, successor.epochs, left.lengths, left.settled, split_by_counts(counts), strict=True
            )
        ]

    def _left(self, successor: Successor) -> _Left:
        left = _Left(successor)
        places = {tree.key: place for place, tree in enumerate(self._trees)}
        for row, (key, epoch, length) in enumerate(
            zip(successor.keys, successor.epochs, successor.lengths, strict=True)
        ):
            place = places.get(key)
            if place is None or (tree := self._trees[place]).epoch != epoch:
                continue
            result = self._results[place]
            left.is_in_step[row] = True
            left.verified[row] = len(tree.tokens)
            if result.ended or result.outcome is _ENDED_OUTCOME or result.outcome is _ERROR_OUTCOME:
                left.settled[row] = _ENDED
            elif length != tree.length:
                message = f"length {length} given, {tree.length} in the step that is followed: open the session again"
                left.settled[row] = _refused(Code.FAILED_PRECONDITION, message)
            elif result.token_ids:
                left.lengths[row] += len(result.token_ids)
                # What the worker drafted itself was never sent: nothing can hang from it.
                if not tree.resident:
                    left.ends[row] = result.accepted_nodes[-1] if result.accepted_nodes else 0
                    left.tokens[row] = result.token_ids[-1]
        return left


def _surviving(sent: Succession, left: _Left) -> tuple[list[int], list[int], list[int], set[int]]:
    """Tokens [n] and parents [n] of the nodes to verify, how many each session has [S], and who has torn trees."""
    ends, tokens, verified = np.array((left.ends, left.tokens, left.verified))
    parents, torn = _checked_parents(sent, verified)
    is_in_step = np.array(left.is_in_step)
    find = surviving_compiled if IS_COMPILED else surviving
    found = find(replace(sent, is_in_step=is_in_step, verified=verified, parents=parents), ends, tokens)
    return sent.tokens[found.nodes].tolist(), found.parents.tolist(), found.counts.tolist(), torn


def _checked_parents(sent: Succession, verified: Ints) -> tuple[Ints, set[int]]:
    """The parents, and the places of the sessions of which one does not stand before its child; there they are 0."""
    if IS_COMPILED and are_in_order(verified, sent.counts, sent.parents):
        return sent.parents, set()
    place = np.arange(len(verified)).repeat(sent.counts)
    # Of each session, by how much the numbers of its nodes are more than their places among the N.
    more = verified + 1 - sent.counts.cumsum() + sent.counts
    is_torn = sent.parents >= np.arange(len(place)) + more[place]
    if not is_torn.any():
        return sent.parents, set()
    torn = set(place[is_torn].tolist())
    return np.where(np.isin(place, list(torn)), 0, sent.parents), torn
