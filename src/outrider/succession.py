"""What of a batch that was sent ahead is verified: a step's successor, once the step's outcomes are known (torch-free).

A coordinator may send the batch that follows a step while the step still runs. It has growth below the trees of that
step for every outcome; which of it hangs below the tokens that were emitted is found here, by the target when the step
ends and by the coordinator when it hears of it. Both find the same: what is compared are float32 as they travelled.

    nodes of a session:  0 the root of the step's tree | 1 .. m the nodes that the step verifies | m + 1 .. sent now

What grows after it has been sent follows it in additions, for as long as the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider import succession_kernels
from outrider.compiled import IS_COMPILED
from outrider.v1 import target_pb2
from outrider.wire import floats_from_bytes

Ints = npt.NDArray[np.int64]
_ONE = int(np.float32(1.0).view(np.int32))
_LEAST_VALUE = np.float32(1e-30)
NOTHING_EMITTED = -1


@dataclass(frozen=True, kw_only=True)
class Succession:
    """The successor of a step: S sessions, N nodes in all; those of a session stand together, parents before children.

    Attributes:
        is_in_step: [S] whether the session is in the step that is followed; the tree of any other is verified as it is.
        verified: [S] m, the nodes that the step verifies of it; 0 of those that are not in it.
        counts: [S] nodes sent now.
        tokens: [N]
        parents: [N] node numbers of the session, as above.
        values: float32 [N] chance that verification reaches the node, seen from the root of the step's tree: 0 to 1,
            and no higher than the parent's where that is sent now too.
        least_value: a node is verified if its value is at least so much of the new root's.
        max_nodes: [S] most nodes verified.
        max_depths: [S] deepest of them, below the new root.
        max_total_nodes: most nodes verified of all sessions that are in the step.
    """

    is_in_step: npt.NDArray[np.bool_]
    verified: Ints
    counts: Ints
    tokens: Ints
    parents: Ints
    values: npt.NDArray[np.float32]
    least_value: float
    max_nodes: Ints
    max_depths: Ints
    max_total_nodes: int


class Addition(NamedTuple):
    """Nodes more for a successor, n in all; columns as of `Succession`.

    Attributes:
        counts: [S]
        tokens: [n]
        parents: [n] numbered on from the session's nodes that were sent before.
        values: float32 [n] no higher than those of parents that were sent before either.
    """

    counts: Ints
    tokens: Ints
    parents: Ints
    values: npt.NDArray[np.float32]


def extended(successor: Succession, more: Sequence[Addition]) -> tuple[Succession, Ints]:
    """A successor with additions, and [N] where its nodes stand if all columns are put one behind the other."""
    sessions = np.arange(len(successor.counts))
    parts = (successor, *more)
    order = np.concatenate([sessions.repeat(part.counts) for part in parts]).argsort(kind="stable")
    return replace(
        successor,
        counts=sum((part.counts for part in more), successor.counts),
        tokens=np.concatenate([part.tokens for part in parts])[order],
        parents=np.concatenate([part.parents for part in parts])[order],
        values=np.concatenate([part.values for part in parts])[order],
    ), order


def succession_from_proto(trees: target_pb2.TreeBatch) -> Succession:
    """A batch that follows a step, as sent: whoever knows the step adds which sessions are in it, and what of them."""
    sessions = len(trees.session_ids)
    return Succession(
        is_in_step=np.zeros(sessions, dtype=np.bool_),
        verified=np.zeros(sessions, dtype=np.int64),
        counts=np.array(trees.node_counts, dtype=np.int64),
        tokens=np.array(trees.tokens, dtype=np.int64),
        parents=np.array(trees.parents, dtype=np.int64),
        # What is read of bytes is of another kind, for which loops would be compiled anew.
        values=floats_from_bytes(trees.values).copy(),
        least_value=trees.least_value,
        max_nodes=np.array(trees.max_nodes, dtype=np.int64),
        max_depths=np.array(trees.max_depths, dtype=np.int64),
        max_total_nodes=trees.max_total_nodes,
    )


def addition_from_proto(addition: target_pb2.TreeAddition) -> Addition:
    """An addition as sent."""
    return Addition(
        counts=np.array(addition.node_counts, dtype=np.int64),
        tokens=np.array(addition.tokens, dtype=np.int64),
        parents=np.array(addition.parents, dtype=np.int64),
        values=floats_from_bytes(addition.values),
    )


class Survivors(NamedTuple):
    """The trees that are verified, n nodes in all.

    Attributes:
        counts: [S]
        nodes: [n] places among the N, session by session, in the order in which they are verified.
        parents: [n] as numbered by `outrider.tree.parent_numbers` in this order.
    """

    counts: Ints
    nodes: Ints
    parents: Ints


def surviving(successor: Succession, ends: Ints, tokens: Ints) -> Survivors:
    """The trees below what a step has emitted; by one loop where numba is there.

    The new root is the node sent now that hangs below the last accepted one and has the final token; the tree is what
    hangs below it, the best first. Without such a node, or where nothing was emitted, the tree is empty.

    Args:
        successor: of the step; its arrays are contiguous and can be written to.
        ends: [S] number of the last accepted node, 0 for the root; -1 where nothing was emitted. Of sessions that are
            not in the step it is not read.
        tokens: [S] the final one of each; not read there either.
    """
    if not IS_COMPILED:
        return surviving_columns(successor, ends, tokens)
    return Survivors(*succession_kernels.survivors(*_columns(successor, ends, tokens)))


def surviving_columns(successor: Succession, ends: Ints, tokens: Ints) -> Survivors:
    """`surviving` with numpy, whole columns at a time; arguments as there."""
    sessions, nodes = len(successor.counts), len(successor.tokens)
    place = np.arange(sessions).repeat(successor.counts)
    first = (successor.counts.cumsum() - successor.counts)[place]
    below = successor.parents - successor.verified[place] - 1
    """[N] the parent's place among the session's nodes; below 0 where it was not sent now."""
    numbers = np.arange(nodes)
    above = np.where(below < 0, numbers, below + first)
    is_followed = successor.is_in_step[place]
    is_root = (successor.parents == ends[place]) & (successor.tokens == tokens[place]) & is_followed
    root = np.full(sessions, -1)
    # Of several the first, as a tree's first child is the one that counts.
    roots = is_root.nonzero()[0][::-1]
    root[place[roots]] = roots
    above[roots] = roots
    depths, top = _climb(above, numbers)
    own_root = root[place]
    floor = np.zeros(sessions, dtype=np.float32)
    floor[place[roots]] = successor.values[roots] * np.float32(successor.least_value)
    survives = (top == own_root) & (numbers != own_root) & (depths <= successor.max_depths[place])
    survives &= successor.values >= floor[place]
    chosen = _best_first(successor, survives.nonzero()[0], place)
    if len(chosen) > successor.max_total_nodes:
        shares = successor.values[chosen] / np.maximum(successor.values[own_root[chosen]], _LEAST_VALUE)
        best = np.argsort(-shares, kind="stable")[: successor.max_total_nodes]
        chosen = chosen[np.sort(best)]
    if not is_followed.all():
        # Each session's stay together: it is in the one or in the other.
        chosen = np.concatenate((chosen, np.flatnonzero(~is_followed)))
        chosen = chosen[np.argsort(place[chosen], kind="stable")]
    counts, ranks = _ranked(place[chosen], sessions)
    number = np.zeros(nodes, dtype=np.int64)
    number[chosen] = ranks + 1
    # The new root has number 0, and so has whatever was not sent now.
    parents = np.where(below[chosen] < 0, 0, number[above[chosen]])
    return Survivors(counts, chosen, parents)


class SurvivingRows(NamedTuple):
    """The rows of a step that verifies the trees: a root before each session's nodes, A sessions and T rows in all.

    Attributes:
        counts: [A]
        tokens: [T]; 0 of roots.
        parents: [T] node numbers; 0 of roots.
    """

    counts: Ints
    tokens: Ints
    parents: Ints


def surviving_rows(successor: Succession, ends: Ints, tokens: Ints, is_asked: npt.NDArray[np.bool_]) -> SurvivingRows:
    """`surviving`, as rows; by one loop where numba is there, for a device waits.

    Args:
        successor: of the step; its arrays are contiguous and can be written to.
        ends: as there.
        tokens: as there.
        is_asked: [S] of which sessions there are rows; no nodes may survive of the others.
    """
    if not IS_COMPILED:
        return surviving_row_columns(successor, ends, tokens, is_asked)
    columns: Any = (*_columns(successor, ends, tokens), is_asked)
    return SurvivingRows(*succession_kernels.surviving_rows(*columns))


def surviving_row_columns(
    successor: Succession, ends: Ints, tokens: Ints, is_asked: npt.NDArray[np.bool_]
) -> SurvivingRows:
    """`surviving_rows` with numpy, whole columns at a time; arguments as there."""
    found = surviving_columns(successor, ends, tokens)
    counts = found.counts[is_asked]
    rows = SurvivingRows(counts + 1, *np.zeros((2, len(counts) + len(found.nodes)), dtype=np.int64))
    # Before a node stand the roots up to its own.
    places = np.arange(len(found.nodes)) + np.arange(1, len(counts) + 1).repeat(counts)
    rows.tokens[places], rows.parents[places] = successor.tokens[found.nodes], found.parents
    return rows


def _columns(successor: Succession, ends: Ints, tokens: Ints) -> tuple[Any, ...]:
    """As the loops take them."""
    return (
        successor.is_in_step,
        successor.verified,
        successor.counts,
        successor.tokens,
        successor.parents,
        successor.values,
        successor.max_nodes,
        successor.max_depths,
        ends,
        tokens,
        np.float32(successor.least_value),
        successor.max_total_nodes,
    )


def _ranked(place: Ints, sessions: int) -> tuple[Ints, Ints]:
    """[S] how many of these nodes each session has, and [n] how many of its session's stand before each.

    Args:
        place: [n] their sessions, ascending.
        sessions: S.
    """
    counts = np.bincount(place, minlength=sessions)
    return counts, np.arange(len(place)) - (counts.cumsum() - counts)[place]


def _climb(above: Ints, numbers: Ints) -> tuple[Ints, Ints]:
    """[N] how far each node is from the one that it hangs from in the end, and [N] that one: its own `above`."""
    depths = (above != numbers).astype(np.int64)
    # By doubling: after k rounds a node knows the 2^k that are nearest above it.
    for _ in range(len(above).bit_length()):
        further = depths[above]
        if not further.any():
            break
        depths += further
        above = above[above]
    return depths, above


def _best_first(successor: Succession, nodes: Ints, place: Ints) -> Ints:
    """Of each session the best of these, best first; of equal ones the first: a parent stands before its children."""
    # The bits of a float of 0 to 1 are in its order, but for a negative zero's.
    falling = _ONE - np.maximum(successor.values[nodes].view(np.int32), 0).astype(np.int64)
    nodes = nodes[(place[nodes] << 32 | falling).argsort(kind="stable")]
    ranks = _ranked(place[nodes], len(successor.counts))[1]
    return nodes[ranks < successor.max_nodes[place[nodes]]]
