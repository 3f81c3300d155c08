"""Batches that are sent before the step they follow has ended: their trees, made out of what that step leaves.

A successor holds growth below its step's trees for every outcome. What of it hangs below the tokens that were emitted
is found the moment they are known (`outrider.succession`), so that the device goes on without a word from the
coordinator. That moment is the one in which nothing runs: here are columns, and one object a session.

Shapes: S sessions of a successor, N nodes that it has.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outrider.succession import NOTHING_EMITTED, Ints, Succession, surviving
from outrider.target_worker.sessions import Code, Outcome, SessionFault, SessionKey, TreeRequest, TreeResult

_ENDED = TreeResult(outcome=Outcome.ENDED)


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


class _Left(NamedTuple):
    """What the step has left of one session.

    Attributes:
        is_in_step: whether it was in the step.
        verified: nodes that the step was asked to verify of it.
        end: number of the last accepted one, 0 for the root; `NOTHING_EMITTED`.
        token: the last that was emitted.
        length: tokens that it has now.
        settled: its result, where there is nothing to verify any more.
    """

    is_in_step: bool
    verified: int
    end: int
    token: int
    length: int
    settled: TreeResult | None = None


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
        places = {tree.key: place for place, tree in enumerate(self._trees)}
        left = [
            self._left(places.get(key), epoch, length)
            for key, epoch, length in zip(successor.keys, successor.epochs, successor.lengths, strict=True)
        ]
        tokens, parents, counts, torn = _surviving(successor.sent, left)
        trees: list[TreeRequest] = []
        first = 0
        for place, (one, count) in enumerate(zip(left, counts, strict=True)):
            nodes = slice(first, first + count)
            first += count
            trees.append(
                TreeRequest(
                    key=successor.keys[place],
                    epoch=successor.epochs[place],
                    length=one.length,
                    tokens=tokens[nodes],
                    parents=parents[nodes],
                    settled=_TORN if place in torn else one.settled,
                )
            )
        return trees

    def _left(self, place: int | None, epoch: int, length: int) -> _Left:
        """Of the session at this place in the step, under this epoch and with this length in the successor."""
        if place is None or (tree := self._trees[place]).epoch != epoch:
            return _Left(False, 0, NOTHING_EMITTED, 0, length)
        result, verified = self._results[place], len(tree.tokens)
        if result.ended or result.outcome in (Outcome.ENDED, Outcome.ERROR):
            return _Left(True, verified, NOTHING_EMITTED, 0, length, _ENDED)
        if length != tree.length:
            message = f"length {length} given, {tree.length} in the step that is followed: open the session again"
            return _Left(True, verified, NOTHING_EMITTED, 0, length, _refused(Code.FAILED_PRECONDITION, message))
        if not result.token_ids:
            return _Left(True, verified, NOTHING_EMITTED, 0, length)
        length += len(result.token_ids)
        if tree.resident:
            # Its nodes were never sent: nothing can hang from them.
            return _Left(True, verified, NOTHING_EMITTED, 0, length)
        end = result.accepted_nodes[-1] if result.accepted_nodes else 0
        return _Left(True, verified, end, result.token_ids[-1], length)


def _surviving(sent: Succession, left: Sequence[_Left]) -> tuple[list[int], list[int], list[int], set[int]]:
    """Tokens [n] and parents [n] of the nodes to verify, how many each session has [S], and who has torn trees."""
    if not len(sent.tokens):
        # Plain steps, as they all are without drafts.
        return [], [], [0] * len(left), set()
    verified = np.array([one.verified for one in left], dtype=np.int64)
    parents, torn = _checked_parents(sent, verified)
    is_in_step = np.array([one.is_in_step for one in left], dtype=np.bool_)
    ends, tokens = np.array([(one.end, one.token) for one in left], dtype=np.int64).T
    found = surviving(replace(sent, is_in_step=is_in_step, verified=verified, parents=parents), ends, tokens)
    return sent.tokens[found.nodes].tolist(), found.parents.tolist(), found.counts.tolist(), torn


def _checked_parents(sent: Succession, verified: Ints) -> tuple[Ints, set[int]]:
    """The parents, and the places of the sessions of which one does not stand before its child; there they are 0."""
    place = np.repeat(np.arange(len(verified)), sent.counts)
    first = np.cumsum(sent.counts) - sent.counts
    own = verified[place] + 1 + np.arange(len(place)) - first[place]
    is_torn = sent.parents >= own
    if not is_torn.any():
        return sent.parents, set()
    torn = set(place[is_torn].tolist())
    return np.where(np.isin(place, list(torn)), 0, sent.parents), torn
