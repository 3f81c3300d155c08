"""Roots of trees that move down along what was committed, as loops over the forest's columns.

Machine code where numba is there. Without it the way is found by the same loop, as it goes along the committed tokens
alone, and `Forest.move_roots` does the rest with numpy, whole columns at a time.
"""

from typing import Any, NamedTuple

import numpy as np

from outrider.compiled import compiled
from outrider.coordinator.forest_kernels import DEEPEST, FREE, NEXT_SERIAL, Columns

_NOWHERE = -1
_ALIVE, _DEAD = 1, 2


class States(NamedTuple):
    """Those columns of `Rows` that a commit is about."""

    root: Any
    length: Any
    as_of: Any
    was_drafted: Any
    was_missed: Any


class Moving(NamedTuple):
    """S sessions' commits as of `Moves`."""

    rows: Any
    counts: Any
    tokens: Any
    accepted: Any
    slots: Any
    keeps_tree: Any


class Ways(NamedTuple):
    """Where S commits lead.

    Attributes:
        reached: [S] the last node on the way.
        new: [S] the new root; -1 where no node is known for it.
        passed: [m] nodes on the way.
        passed_lengths: [m] committed tokens up to and with each.
    """

    reached: Any
    new: Any
    passed: Any
    passed_lengths: Any


@compiled
def find_ways(columns: Columns, states: States, moving: Moving) -> Ways:
    """Goes along the nodes that were accepted, and on where there are nodes for the tokens behind these: they were not
    submitted, or have come meanwhile. Nothing is moved.
    """
    rows, counts, accepted, slots, tokens = moving.rows, moving.counts, moving.accepted, moving.slots, moving.tokens
    first_child, next_sibling, token = columns.first_child, columns.next_sibling, columns.token
    roots, lengths = states.root, states.length
    reached, new = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    passed, passed_lengths = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64)
    met, start, first = 0, 0, 0
    for session in range(len(rows)):
        reached[session] = new[session] = roots[rows[session]]
        for step in range(counts[session]):
            if step < accepted[session]:
                child = slots[first + step]
            else:
                child = first_child[new[session]]
                while child != 0 and token[child] != tokens[start + step]:
                    child = next_sibling[child]
            if child == 0:
                new[session] = _NOWHERE
                break
            reached[session] = new[session] = passed[met] = child
            passed_lengths[met] = lengths[rows[session]] + step + 1
            met += 1
        start += counts[session]
        first += accepted[session]
    return Ways(reached, new, passed[:met], passed_lengths[:met])


@compiled
def move_roots(columns: Columns, states: States, moving: Moving, most_passed: int, least_value: float) -> None:
    """Moves roots along their tokens (`find_ways`) and drops what hangs elsewhere.

    Args:
        columns: with S free slots at least.
        states: of all rows.
        moving: each session once.
        most_passed: committed tokens whose nodes growth may still name.
        least_value: what values are divided by at least.
    """
    reached, new, passed, passed_lengths = find_ways(columns, states, moving)
    rows, counts, lengths, first_child = moving.rows, moving.counts, states.length, columns.first_child
    was_drafted, was_missed = states.was_drafted, states.was_missed
    place, scale, shift = np.full(len(lengths), _NOWHERE, np.int64), np.ones(len(rows)), np.zeros(len(rows), np.int64)
    for session in range(len(rows)):
        row = rows[session]
        place[row] = session
        lengths[row] += counts[session]
        was_drafted[row] = new[session] >= 0
        was_missed[row] = first_child[reached[session]] != 0 and new[session] < 0
        if not moving.keeps_tree[session]:
            new[session] = _NOWHERE
        if new[session] >= 0:
            # Where a path was too unlikely for a float, its nodes stay at next to nothing.
            scale[session] = 1.0 / max(columns.value[new[session]], least_value)
            shift[session] = columns.depth[new[session]]
    _plant_roots(columns, states, moving, new)
    for number in range(len(passed)):
        _stand_alone(columns.length, columns.parent, columns.depth, passed[number], passed_lengths[number])
        columns.value[passed[number]] = columns.acceptance[passed[number]] = 1.0
    _drop_dead(columns, states, rows, place, scale, shift, most_passed)


@compiled
def _plant_roots(columns: Columns, states: States, moving: Moving, new: Any) -> None:
    """Makes new roots where there is no node for them, and has all roots stand alone."""
    rows, end, missing = moving.rows, 0, 0
    for session in range(len(rows)):
        missing += new[session] < 0
    left = columns.state[FREE] - missing
    columns.state[FREE] = left
    for session in range(len(rows)):
        end += moving.counts[session]
        row, slot = rows[session], new[session]
        if slot < 0:
            slot = columns.free[left]
            left += 1
            columns.serial[slot] = columns.state[NEXT_SERIAL]
            columns.state[NEXT_SERIAL] += 1
            columns.row[slot] = row
            columns.token[slot] = moving.tokens[end - 1]
            columns.first_child[slot] = 0
        _stand_alone(columns.length, columns.parent, columns.depth, slot, states.length[row])
        columns.value[slot] = columns.acceptance[slot] = 1.0
        states.root[row] = slot


@compiled
def _stand_alone(length: Any, parent: Any, depth: Any, slot: int, at: int) -> None:
    """This is committed, so many tokens up to and with it."""
    length[slot], parent[slot], depth[slot] = at, slot, 0


@compiled
def _drop_dead(  # noqa: PLR0917
    columns: Columns, states: States, rows: Any, place: Any, scale: Any, shift: Any, most_passed: int
) -> None:
    """Frees what hangs elsewhere, and what no growth can name any more; the rest is nearer to its root now."""
    row, parent, depth, length, value = columns.row, columns.parent, columns.depth, columns.length, columns.value
    serial, free, lengths = columns.serial, columns.free, states.length
    verdicts = _verdicts(row, parent, depth, place, states.root)
    forgotten = np.zeros(len(rows), np.int64)
    for session in range(len(rows)):
        own = lengths[rows[session]]
        forgotten[session] = max(min(states.as_of[rows[session]], own - 1), own - most_passed)
    count, deepest = columns.state[FREE], 0
    for slot in range(len(row)):
        session = place[row[slot]]
        if session >= 0:
            if verdicts[slot] == _DEAD or 0 < length[slot] <= forgotten[session]:
                row[slot] = depth[slot] = length[slot] = parent[slot] = serial[slot] = 0
                free[count] = slot
                count += 1
            elif depth[slot] > 0:
                value[slot] *= scale[session]
                depth[slot] -= shift[session]
        deepest = max(deepest, depth[slot])
    columns.state[FREE], columns.state[DEEPEST] = count, deepest


@compiled
def _verdicts(row: Any, parent: Any, depth: Any, place: Any, roots: Any) -> Any:
    """[slots] whether tree nodes hang below their session's root; 0 of everything else."""
    verdicts = np.zeros(len(row), np.int8)
    for slot in range(len(row)):
        if depth[slot] == 0 or place[row[slot]] < 0 or verdicts[slot]:
            continue
        node = slot
        while verdicts[node] == 0 and parent[node] != node:
            node = parent[node]
        verdict = verdicts[node]
        if verdict == 0:
            verdict = _ALIVE if node == roots[row[slot]] else _DEAD
        node = slot
        while verdicts[node] == 0 and parent[node] != node:
            verdicts[node] = verdict
            node = parent[node]
    return verdicts


@compiled
def all_go_on(lengths: Any, emitted: Any, accepted: Any, ends: Any) -> bool:
    """Whether S sessions are shorter than they may get, and each accepted node has its token.

    Args:
        lengths: [S] committed tokens before.
        emitted: [S] tokens more.
        accepted: [S] nodes.
        ends: [S] length with which it ends.
    """
    for session in range(len(lengths)):
        if lengths[session] + emitted[session] >= ends[session] or accepted[session] > emitted[session]:
            return False
    return True


class Told(NamedTuple):
    """Those columns of `Rows` that tell of commits, rather than of trees."""

    told_ns: Any
    committed_ns: Any
    unanswered: Any
    draft: Any


@compiled
def note_commits(  # noqa: PLR0917
    told: Told, rows: Any, is_on: Any, numbers: Any, accepted: Any, starts: Any, slots: Any, at_ns: int
) -> Any:
    """What S commits leave in their rows, and which nodes they are of.

    Args:
        told: of all rows.
        rows: [S]
        is_on: [S] whether it goes on: its draft is to answer.
        numbers: [A] of accepted nodes in their trees, from 1.
        accepted: [S] how many of them each has.
        starts: [S] where its nodes begin.
        slots: [n] of all nodes that were verified.
        at_ns: when the result came.

    Returns:
        [S] when each had its last tokens before, [S] whether a draft grows for it, [A] slots of the accepted nodes.
    """
    before, is_drafted = np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_)
    own, node = np.empty(len(numbers), np.int64), 0
    for session in range(len(rows)):
        row = rows[session]
        before[session], is_drafted[session] = told.told_ns[row], told.draft[row] != 0
        told.told_ns[row] = told.committed_ns[row] = at_ns
        if is_drafted[session] and is_on[session]:
            told.unanswered[row] += 1
        for _ in range(accepted[session]):
            own[node] = slots[starts[session] + numbers[node] - 1]
            node += 1
    return before, is_drafted, own


@compiled
def count_misses(  # noqa: PLR0917
    is_on: Any, is_drafted: Any, is_async: Any, is_covered: Any, is_wrong: Any, nodes: Any, emitted: Any
) -> tuple[int, int, int, int, int, int]:
    """Of S rounds those that drafts run ahead of: how many, their tokens, misses, and of these the wrong ones; with
    trees, and misses of these. All [S] as of `Committed`.
    """
    rounds, tokens, misses, wrong, tree_rounds, tree_misses = 0, 0, 0, 0, 0, 0
    for session in range(len(is_on)):
        if is_on[session] and is_drafted[session] and is_async[session]:
            rounds += 1
            tokens += emitted[session]
            missed, has_tree = not is_covered[session], nodes[session] > 0
            misses += missed
            wrong += missed and is_wrong[session]
            tree_rounds += has_tree
            tree_misses += missed and has_tree
    return rounds, tokens, misses, wrong, tree_rounds, tree_misses
