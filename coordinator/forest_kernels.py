"""Loops over the forest's columns: what a message of growth adds, where roots move, which nodes may go into a batch.

Machine code where numba is there (`outrider.compiled`). Without it growth is grafted by the same loop in plain Python,
which is as fast as numpy there; what goes through all slots is left to numpy (`forest.py`, `candidates.py`).

    slot   a node's place in every column      row    a session's      place  a session's in a message or a batch
"""

from typing import Any, NamedTuple

from outrider.compiled import compiled

# Entries of Columns.state.
FREE, NEXT_SERIAL, DEEPEST = 0, 1, 2
# What became of a node of growth.
NEW, PENDING, GRAFTED, UNWANTED, TO_MERGE, PASSED = 0, 1, 2, 3, 4, 5

_NOWHERE = -1
_LEAST_ACCEPTANCE, _LEAST_VALUE = 1e-6, 1e-300


class Columns(NamedTuple):
    """The forest's columns as of `Forest`, and its spare slots.

    Attributes:
        newest: [slots] scratch: the last child of each that was met; -1 in between.
        free: [slots] the first `state[FREE]` of them may be taken, from the end.
        state: int64 [3]
    """

    row: Any
    parent: Any
    token: Any
    depth: Any
    length: Any
    acceptance: Any
    value: Any
    has_children: Any
    serial: Any
    newest: Any
    free: Any
    state: Any


class Ring(NamedTuple):
    """Workers' node ids as of `NodeIds`: `size` entries a view."""

    slots: Any
    ids: Any
    serials: Any


class Arriving(NamedTuple):
    """Growth of S sessions, n nodes in all.

    Attributes:
        views: [S] of its ids; -1 where it is not wanted.
        as_of: [S] committed length that the draft knew of.
        length: [S] committed tokens.
        root: [S] slot of the last one.
        place: [n] session.
        node_id: [n]
        parent: [n]
        token: [n]
        acceptance: [n]
        status: [n] what became of it, at first NEW.
        slot: [n] of those that are PENDING or TO_MERGE the parent's, of those that have PASSED the length it ends, of
            those that the loop has GRAFTED their own.
        before: [n] scratch: the child of the same parent that came before it.
        grafted: [S] how many of each session's.
    """

    views: Any
    as_of: Any
    length: Any
    root: Any
    place: Any
    node_id: Any
    parent: Any
    token: Any
    acceptance: Any
    status: Any
    slot: Any
    before: Any
    grafted: Any


@compiled
def graft_nodes(columns: Columns, ring: Ring, growth: Arriving, size: int, merges: bool) -> int:
    """Adds nodes whose parents are there, then those whose parents these are, and so on.

    Args:
        columns: with as many free slots as there are nodes.
        ring: of all views.
        growth: what it does not add itself is marked.
        size: of a view's ring.
        merges: whether even what has no like is `TO_MERGE`.

    Returns:
        How many nodes are TO_MERGE or have PASSED: others that are still PENDING may hang below these.
    """
    _drop_known(columns, ring, growth, size)
    while True:
        alive, passed = _find_parents(columns, ring, growth, size)
        if alive and (merges or _have_like(columns, growth)):
            for node in range(len(growth.place)):
                if growth.status[node] == PENDING and growth.slot[node] >= 0:
                    growth.status[node] = TO_MERGE
            return alive + passed
        if alive:
            _sprout(columns, ring, growth, size, alive)
        if passed or not alive:
            return passed


# Columns have names of their own in what follows: in a loop, each look into a tuple counts a reference up and down.


@compiled
def _drop_known(columns: Columns, ring: Ring, growth: Arriving, size: int) -> None:
    """New nodes that are not wanted, or have come before, are dropped; the others are looked for a parent for."""
    serials, views, places, node_ids, status = columns.serial, growth.views, growth.place, growth.node_id, growth.status
    slots, ids, named = ring.slots, ring.ids, ring.serials
    for node in range(len(places)):
        if status[node] != NEW:
            continue
        entry = views[places[node]] * size + (node_ids[node] & (size - 1))
        is_known = entry < 0 or (ids[entry] == node_ids[node] and serials[slots[entry]] == named[entry])
        status[node] = UNWANTED if is_known else PENDING


@compiled
def _find_parents(columns: Columns, ring: Ring, growth: Arriving, size: int) -> tuple[int, int]:
    """How many nodes have a parent in a tree, and how many hang below what was committed."""
    serials, ends, views, places, parents = columns.serial, columns.length, growth.views, growth.place, growth.parent
    slots, ids, named = ring.slots, ring.ids, ring.serials
    as_of, lengths, roots, status, found = growth.as_of, growth.length, growth.root, growth.status, growth.slot
    alive, passed = 0, 0
    for node in range(len(places)):
        if status[node] != PENDING:
            continue
        place, parent = places[node], parents[node]
        at, slot = as_of[place], _NOWHERE
        if parent != 0:
            entry = views[place] * size + (parent & (size - 1))
            slot, at = slots[entry], 0
            if ids[entry] != parent or serials[slot] != named[entry]:
                slot = _NOWHERE
            else:
                at = ends[slot]
        if at == lengths[place]:
            slot = roots[place]
        elif at > 0:
            status[node], found[node] = PASSED, at
            passed += 1
            continue
        found[node] = slot
        alive += slot >= 0
    return alive, passed


@compiled
def _have_like(columns: Columns, growth: Arriving) -> bool:
    """Whether any of the nodes that have a parent may be there already."""
    has_children, newest = columns.has_children, columns.newest
    status, parents, tokens, before = growth.status, growth.slot, growth.token, growth.before
    have_like = False
    for node in range(len(parents)):
        parent = parents[node]
        if status[node] != PENDING or parent < 0:
            continue
        other = before[node] = newest[parent]
        newest[parent] = node
        have_like = have_like or has_children[parent]
        while other >= 0 and not have_like:
            have_like = tokens[other] == tokens[node]
            other = before[other]
    for node in range(len(parents)):
        if status[node] == PENDING and parents[node] >= 0:
            newest[parents[node]] = _NOWHERE
    return have_like


@compiled
def _sprout(columns: Columns, ring: Ring, growth: Arriving, size: int, count: int) -> None:
    """Makes and names nodes whose parents had no children."""
    row, parent_of, token, depth, length = columns.row, columns.parent, columns.token, columns.depth, columns.length
    acceptance, value, has_children = columns.acceptance, columns.value, columns.has_children
    serials, free, slots, ids, named = columns.serial, columns.free, ring.slots, ring.ids, ring.serials
    places, status, parents, grafted = growth.place, growth.status, growth.slot, growth.grafted
    tokens, told, node_ids, views = growth.token, growth.acceptance, growth.node_id, growth.views
    left = columns.state[FREE] - count
    columns.state[FREE] = left
    serial, deepest = columns.state[NEXT_SERIAL], columns.state[DEEPEST]
    for node in range(len(places)):
        parent = parents[node]
        if status[node] != PENDING or parent < 0:
            continue
        slot = free[left]
        left += 1
        # What is no number is not above it either.
        own = min(told[node], 1.0) if told[node] > _LEAST_ACCEPTANCE else _LEAST_ACCEPTANCE
        row[slot] = row[parent]
        parent_of[slot] = parent
        token[slot] = tokens[node]
        depth[slot] = depth[parent] + 1
        length[slot] = 0
        acceptance[slot] = own
        value[slot] = value[parent] * own
        has_children[slot] = False
        has_children[parent] = True
        serials[slot] = serial
        deepest = max(deepest, depth[slot])
        entry = views[places[node]] * size + (node_ids[node] & (size - 1))
        ids[entry], slots[entry], named[entry] = node_ids[node], slot, serial
        serial += 1
        status[node], parents[node] = GRAFTED, slot
        grafted[places[node]] += 1
    columns.state[NEXT_SERIAL], columns.state[DEEPEST] = serial, deepest
