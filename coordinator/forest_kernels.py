"""Loops over the forest's columns: what a message of growth adds, where roots move, which nodes may go into a batch.

Machine code where numba is there (`outrider.compiled`). Without it growth is grafted by the same loop in plain Python,
which is as fast as numpy there, as it goes through a message's nodes and never through all slots; what does is left to
numpy then (`forest.py`, `candidates.py`).

    slot   a node's place in every column      row    a session's      place  a session's in a message or a batch
"""

from typing import Any, NamedTuple

from outrider.compiled import compiled

# Entries of Columns.state.
FREE, NEXT_SERIAL, DEEPEST = 0, 1, 2
# What became of a node of growth.
NEW, PENDING, GRAFTED, UNWANTED, LATE, PASSED = 0, 1, 2, 3, 4, 5

_NONE = 0
# A path value may get small, but it is divided by: no estimate below this counts as such.
_LEAST_ACCEPTANCE = 1e-6


class Columns(NamedTuple):
    """The forest's columns as of `Forest`, and its spare slots.

    Attributes:
        first_child: [slots] the child that was made last; 0 where there is none.
        next_sibling: [slots] the child of the same parent that was made before it; 0 where there is none. A node that
            is alive loses no children, so nothing has to be taken out.
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
    first_child: Any
    next_sibling: Any
    serial: Any
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
        slot: [n] of those that are GRAFTED or have PASSED their own, of those that are LATE the length they hang below.
        raised: [n] whether it was there before, with a lower estimate.
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
    raised: Any
    grafted: Any


class Passed(NamedTuple):
    """What S sessions have committed of late, T tokens in all.

    Attributes:
        since: [S] committed length that the first of its tokens here follows; as long as all of it: there are none.
        starts: [S] where they begin.
        tokens: [T]
    """

    since: Any
    starts: Any
    tokens: Any


@compiled
def graft_nodes(columns: Columns, ring: Ring, growth: Arriving, passed: Passed, size: int) -> int:
    """Adds nodes, or finds them, each below its parent: those that come before theirs in further turns.

    A node is looked for among its parent's children, and what hangs below nodes that are worth more now is valued once.
    No other slots are looked at: the cost is that of the message, however large the forest.

    Args:
        columns: with as many free slots as there are nodes.
        ring: of all views.
        growth: what is neither NEW nor PENDING is left as it is.
        passed: what was committed, for nodes that hang below it.
        size: of a view's ring.

    Returns:
        How many nodes are LATE.
    """
    free, slots, raised = columns.state[FREE], growth.slot, growth.raised
    _drop_known(columns, ring, growth, size)
    while _place_nodes(columns, ring, growth, passed, size):
        pass
    late = _raise_estimates(columns, growth)
    _value_new(columns, free)
    for node in range(len(raised)):
        if raised[node]:
            _revalue(columns, slots[node])
    return late


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
def _place_nodes(columns: Columns, ring: Ring, growth: Arriving, passed: Passed, size: int) -> bool:
    """One turn over those that are PENDING: whether some found their place, and others are left that may hang there."""
    views, as_of, lengths, roots, status = growth.views, growth.as_of, growth.length, growth.root, growth.status
    places, node_ids, parents, tokens, found = growth.place, growth.node_id, growth.parent, growth.token, growth.slot
    slots, ids, named, serials, ends = ring.slots, ring.ids, ring.serials, columns.serial, columns.length
    row, token, parent_of, acceptance = columns.row, columns.token, columns.parent, columns.acceptance
    first_child, next_sibling, free, state = columns.first_child, columns.next_sibling, columns.free, columns.state
    grafted, have_found, are_left = growth.grafted, False, False
    for node in range(len(places)):
        if status[node] != PENDING:
            continue
        place, parent = places[node], _NONE
        at, view = as_of[place], views[place] * size
        if parents[node] != 0:
            entry = view + (parents[node] & (size - 1))
            if ids[entry] == parents[node] and serials[slots[entry]] == named[entry]:
                parent = slots[entry]
            at = ends[parent]
        if at == lengths[place]:
            parent = roots[place]
        elif at > 0:
            status[node], parent = _after(passed, place, at, tokens[node]), _NONE
        if parent != _NONE:
            slot, status[node] = first_child[parent], GRAFTED
            while slot != _NONE and token[slot] != tokens[node]:
                slot = next_sibling[slot]
            if slot == _NONE:
                slot = _take(free, serials, state)
                parent_of[slot], ends[slot], acceptance[slot] = parent, 0, 0.0
                next_sibling[slot], first_child[parent], first_child[slot] = first_child[parent], slot, _NONE
        elif status[node] == PASSED:
            # Its children can be found now.
            slot = _take(free, serials, state)
            parent_of[slot], ends[slot], acceptance[slot], first_child[slot] = slot, at + 1, 1.0, _NONE
        else:
            found[node], are_left = at, are_left or status[node] == PENDING
            continue
        row[slot], token[slot], found[node], have_found = row[roots[place]], tokens[node], slot, True
        entry = view + (node_ids[node] & (size - 1))
        ids[entry], slots[entry], named[entry] = node_ids[node], slot, serials[slot]
        grafted[place] += 1
    return have_found and are_left


@compiled
def _after(passed: Passed, place: int, at: int, token: int) -> int:
    """What becomes of a node with this token that hangs below so many committed ones."""
    since = passed.since[place]
    if at < since:
        return LATE
    return PASSED if passed.tokens[passed.starts[place] + at - since] == token else UNWANTED


@compiled
def _take(free: Any, serials: Any, state: Any) -> int:
    """A free slot, for a node."""
    state[FREE] -= 1
    slot = free[state[FREE]]
    serials[slot] = state[NEXT_SERIAL]
    state[NEXT_SERIAL] += 1
    return slot


@compiled
def _raise_estimates(columns: Columns, growth: Arriving) -> int:
    """Nodes get the highest estimate that was given for them; how many nodes are LATE."""
    acceptance, status, slots = columns.acceptance, growth.status, growth.slot
    told, raised, late = growth.acceptance, growth.raised, 0
    for node in range(len(status)):
        late += status[node] == LATE
        if status[node] != GRAFTED:
            continue
        # What is no number is not above it either.
        own = min(told[node], 1.0) if told[node] > _LEAST_ACCEPTANCE else _LEAST_ACCEPTANCE
        before = acceptance[slots[node]]
        if own > before:
            acceptance[slots[node]], raised[node] = own, before > 0
    return late


@compiled
def _value_new(columns: Columns, before: int) -> None:
    """Depths and path values of the slots that were taken, parents first.

    Args:
        before: how many were free.
    """
    parent, depth, acceptance, value = columns.parent, columns.depth, columns.acceptance, columns.value
    free, state = columns.free, columns.state
    for number in range(before - 1, state[FREE] - 1, -1):
        slot = free[number]
        above = parent[slot]
        depth[slot], value[slot] = depth[above] + 1, value[above] * acceptance[slot]
        if above == slot:
            depth[slot], value[slot] = 0, 1.0
        state[DEEPEST] = max(state[DEEPEST], depth[slot])


@compiled
def _revalue(columns: Columns, top: int) -> None:
    """A node's estimate has gone up, and with it the values of all that hangs below; nothing if these are right."""
    parent, acceptance, value = columns.parent, columns.acceptance, columns.value
    first_child, next_sibling = columns.first_child, columns.next_sibling
    if value[top] == value[parent[top]] * acceptance[top]:
        return
    node = top
    while True:
        value[node] = value[parent[node]] * acceptance[node]
        if first_child[node] != _NONE:
            node = first_child[node]
            continue
        while node != top and next_sibling[node] == _NONE:
            node = parent[node]
        if node == top:
            return
        node = next_sibling[node]
