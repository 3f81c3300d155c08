"""Compiled loops over the n-gram drafter's pool: which proposals are new nodes, and where its trees go on.

The pool's operators change the pool; these loops read it. Shapes: B rows that take part, P proposals of a row, W tokens
of a text's tail; S, C as in `outrider.kernels.pool.columns`.
"""

from typing import Any

import numpy as np

from outrider.kernels.compiled import compiled
from outrider.kernels.pool.columns import PoolArrays
from outrider.kernels.pool.entries import find_child, is_stop
from outrider.kernels.pool.records import RecordKind

# Kind of a record of growth, of place 0, by the pool's only drafter.
_GROWTH = int(RecordKind.GROWTH) | 1 << 16
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# Least value of a leaf below which a tree goes on.
_MIN_LEAF_VALUE = 0.1
# Coordinators ask for trees this many rounds deep. No other drafter is needed if this share of the first round's depth
# is expected to be accepted.
_ROUNDS_DEEP, _ENOUGH = 2, 2 / 3


@compiled
def new_nodes(
    arrays: Any, rows: Any, tops: Any, tokens: Any, parents: Any, found: Any, estimates: Any, buckets: Any,
    min_value: float, next_ids: Any, entry_buckets: Any, records: Any, floats: Any,
) -> int:  # fmt: skip
    """Write a record of growth for each proposal that is no entry yet and may be one; return how many there are.

    Estimates of siblings come from suffixes of different lengths, and their sum may exceed 1: each proposal gets at
    most what its elder siblings leave.

    Args:
        tops: [B] int64, the entry below which the row's proposals hang; -1 for the root.
        tokens, parents, found: as in `Proposals`.
        estimates, buckets: [B, P] float64 and int64, as in `NgramCalibration`.
        min_value: proposals of a lower value are left out, with what hangs below them.
        next_ids: [S] int32, the id of each row's next node; written.
        entry_buckets: [S, C] int64, written for the new entries.
        records: [B * P or more, 8] int32, written as `outrider.kernels.pool.records` lays them out.
        floats: the same memory as float32.
    """
    pool = PoolArrays(*arrays)
    nodes = pool.token.shape[1] + 1
    # Of the root, at 0, and of entry n, at n + 1; `left` is what its children leave of the chance of 1.
    ids, depths, is_end = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32), np.zeros(nodes, np.bool_)
    values, left = np.empty(nodes, np.float32), np.empty(nodes, np.float32)
    # Where each proposal is among these, -1 if it is left out.
    places = np.empty(tokens.shape[1], np.int64)
    total = 0
    for number in range(len(rows)):
        row = rows[number]
        known = size = pool.count[row]
        depth_limit = min(pool.max_depth[row], pool.end[row] - pool.length[row])
        values[0] = left[0] = _ONE
        for entry in range(known):
            node = entry + 1
            left[pool.parent[row, entry] + 1] -= pool.acceptance[row, entry]
            ids[node], depths[node] = pool.ids[row, entry, 0], pool.depth[row, entry]
            values[node], left[node], is_end[node] = pool.value[row, entry], _ONE, pool.stopped[row, entry]
        for proposal in range(found[number, 0]):
            token, parent = tokens[number, proposal], parents[number, proposal]
            above = places[parent] if parent >= 0 else tops[number] + 1
            places[proposal] = -1
            if above < 0 or is_end[above] or depths[above] >= depth_limit:
                continue
            entry = -1
            if above <= known:
                entry = find_child(pool.parent[row], pool.token[row], known, int(above - 1), token)
            if entry >= 0:
                places[proposal] = entry + 1
                continue
            acceptance = max(min(np.float32(estimates[number, proposal]), left[above]), _ZERO)
            if size == pool.max_nodes[row] or values[above] * acceptance < min_value:
                continue
            entry_buckets[row, size] = buckets[number, proposal]
            size += 1
            places[proposal] = size
            ids[size], depths[size], left[size] = next_ids[row], depths[above] + 1, _ONE
            values[size] = values[above] * acceptance
            is_end[size] = is_stop(pool.stops[row], pool.min_end[row], token, pool.length[row] - 1 + depths[size])
            left[above] -= acceptance
            next_ids[row] += 1
            records[total, 0], records[total, 1], records[total, 2] = _GROWTH, row, pool.generation[row]
            records[total, 3], records[total, 4], records[total, 5] = ids[size], ids[above], pool.length[row]
            records[total, 6], floats[total, 7] = token, acceptance
            total += 1
    return total


@compiled
def follow_likeliest(
    arrays: Any, rows: Any, tails: Any, lengths: Any, leads: Any, leaves: Any, longer_tails: Any, longer_lengths: Any
) -> None:
    """Follow the likeliest children, of equals the first, from each root to a leaf.

    Args:
        tails, lengths: [B, W] and [B] int32, the texts that end with the roots, as in `TextTails`.
        leads: [B] bool, written: whether most of a round's depth is expected to be accepted on the way.
        leaves: [B] int64, written: the leaf's entry; -1 if there is none, or none below which the tree goes on.
        longer_tails, longer_lengths: written for each leaf: the text that ends with it.
    """
    pool = PoolArrays(*arrays)
    capacity = pool.token.shape[1]
    path, best = np.empty(capacity, np.int64), np.empty(capacity + 1, np.int64)
    for number in range(len(rows)):
        row, length = rows[number], lengths[number]
        depth_limit = min(pool.max_depth[row], pool.end[row] - pool.length[row])
        round_depth = -(-depth_limit // _ROUNDS_DEEP)
        best[: pool.count[row] + 1] = -1
        for entry in range(pool.count[row]):
            above = pool.parent[row, entry] + 1
            if best[above] < 0 or pool.acceptance[row, entry] > pool.acceptance[row, best[above]]:
                best[above] = entry
        depth, leaf, accepted = 0, -1, 0.0
        while best[leaf + 1] >= 0:
            leaf = path[depth] = best[leaf + 1]
            if depth < round_depth:
                accepted += pool.value[row, leaf]
            depth += 1
        leads[number] = accepted >= _ENOUGH * round_depth
        leaves[number] = -1
        if not 0 < depth < depth_limit or pool.stopped[row, leaf] or pool.value[row, leaf] < _MIN_LEAF_VALUE:
            continue
        leaves[number] = leaf
        dropped = max(0, length + depth - tails.shape[1])
        for place in range(dropped, length + depth):
            token = tails[number, place] if place < length else pool.token[row, path[place - length]]
            longer_tails[number, place - dropped] = token
        longer_lengths[number] = length + depth - dropped


@compiled
def follow_entries(arrays: Any, num_commits: Any, ids_before: Any, entry_buckets: Any) -> None:
    """Move the buckets of entries to where `re_root` has moved the entries of rows with commits.

    Args:
        ids_before: [S, C] int32, ids of the entries before. Ids rise with the index, before and after.
        entry_buckets: [S, C] int64, changed.
    """
    pool = PoolArrays(*arrays)
    for row in range(len(num_commits)):
        before = 0
        for entry in range(pool.count[row] if num_commits[row] > 0 else 0):
            while ids_before[row, before] != pool.ids[row, entry, 0]:
                before += 1
            entry_buckets[row, entry] = entry_buckets[row, before]
