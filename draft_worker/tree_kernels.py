"""The trees of a worker's sessions as columns, and the loops over them: planning, growing and committing.

Compiled by numba; without it the same functions run in plain Python. They stand in one file because what numba keeps on
disk is made anew when a function's own file has changed, not when one that it calls has (`outrider.compiled`).

A node is a row, which is given back when the node dies and handed out again under another serial number: whoever
remembers a row across a commit compares that number. The rows of a session's frontier are a heap of its own, best value
first, the lower id first among equals.

Shapes: N rows of nodes, K children of a node that are considered, W words of a mask, S trees.
"""

from typing import Any, NamedTuple

import numpy as np

from outrider.compiled import compiled

PARENT, TOKEN, NODE_ID, POSITION, KEY, STATE, SERIAL, TREE, COUNT, IS_LEARNED, PROMISED = range(11)
FIELDS = 11
"""Of a node. Behind them, K entries each: tokens of its children, their calibration buckets, their rows or -1."""
VALUE, ACCEPTANCE = 0, 1
LEAF, TAKEN, EXPANDED, WITHDRAWN, FREE = range(5)
"""States: not taken, in flight, with children, a promise that nobody took and that is still in the heap, no node."""
ROOT, SIZE, NEXT_ID, HEAP, KEYS, MAX_DEPTH, MAX_CHILDREN, LAST_POSITION, FINALS, IN_FLIGHT = range(10)
TREE_FIELDS = 10
"""Of a tree: its root's row, live nodes, ids, entries of its heap, places for KV; as `DraftTree` has them; how many
tokens are final; nodes of the step under way."""
NO_KEY = -1
"""`KEY` of a node without KV, and of the root."""
FREE_ROWS, NEXT_SERIAL, POOL_FIELDS = 0, 1, 2

# Values are products that only become smaller: below this they are made anew.
_SMALLEST_ROOT_VALUE = 1e-100
# How much of the last best child's estimate the guess takes on.
_GUESS_RATE = 0.05
# Bit j of a word that has a sign.
_BITS = np.left_shift(np.int64(1), np.arange(64))


class TreeColumns(NamedTuple):
    """All trees.

    Attributes:
        nodes: int64 [N, FIELDS + 3 K].
        values: float64 [N, 2]: product of the estimates from the root that the tree began with, own estimate.
        masks: int64 [N, W]: bit j: attends to key offset j.
        trees: int64 [S, TREE_FIELDS].
        guesses: float64 [S]: what a best child's estimate should be, by those of late.
        heaps: int64 [S, H] rows that can be expanded.
        finals: int64 [S, M] tokens that have no children.
        keyed: int64 [S, P] the row that has its KV at each key offset, or -1.
        pool: int64 [POOL_FIELDS + N]: how many rows are free, the next serial number, the free rows.
        scratch: int64 [N].
    """

    nodes: Any
    values: Any
    masks: Any
    trees: Any
    guesses: Any
    heaps: Any
    finals: Any
    keyed: Any
    pool: Any
    scratch: Any


@compiled
def _plant(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    masks: Any,
    trees: Any,
    heaps: Any,
    keyed: Any,
    pool: Any,
    scratch: Any,
    tree: int,
    token: int,
    node_id: int,
    position: int,
) -> int:
    """A root in place of everything; its row."""
    root = trees[tree, ROOT]
    if root >= 0:
        _drop_heap(nodes, trees, heaps, keyed, pool, tree)
        _kill(nodes, keyed, pool, scratch, root, -1)
    root = _new(nodes, masks, pool, tree, -1, token, node_id, position)
    values[root, VALUE] = values[root, ACCEPTANCE] = 1.0
    trees[tree, ROOT], trees[tree, SIZE], trees[tree, HEAP], trees[tree, KEYS] = root, 0, 0, 0
    return root


@compiled
def plant(columns: Any, tree: int, token: int, node_id: int, position: int) -> int:
    """A root in place of everything; its row."""
    return _plant(
        columns.nodes, columns.values, columns.masks, columns.trees, columns.heaps, columns.keyed, columns.pool,
        columns.scratch, tree, token, node_id, position,
    )  # fmt: skip


@compiled
def best_value(columns: Any, tree: int) -> float:
    """Path value of the best node that can be expanded; 0 if there is none."""
    return _best_value(columns.nodes, columns.values, columns.trees, columns.heaps, columns.keyed, columns.pool, tree)


@compiled
def take(columns: Any, tree: int, most: int, least: float, taken: Any) -> int:
    """Takes the best nodes, at most `most` of at least the value `least`, into `taken`; how many."""
    return _take(
        columns.nodes, columns.values, columns.trees, columns.heaps, columns.keyed, columns.pool, tree, most, least,
        taken,
    )  # fmt: skip


@compiled
def promise(columns: Any, parent: int, row: int) -> None:
    """Puts the best child of a node in flight into the frontier, unless it is there or may have no children."""
    _promise(
        columns.nodes, columns.values, columns.masks, columns.trees, columns.guesses, columns.heaps, columns.pool,
        parent, row,
    )  # fmt: skip


@compiled
def give_keys(columns: Any, rows: Any, first: int) -> None:
    """Gives nodes, int64 [n], parents before children, consecutive places for KV, and the masks that follow."""
    for number in range(len(rows)):
        _give_key(columns.nodes, columns.masks, columns.trees, columns.keyed, rows[number], first + number)


@compiled
def below(columns: Any, tree: int, found: Any) -> None:
    """The rows of all nodes below a root, int64 [SIZE], into `found`, parents before children."""
    nodes, parent, count, place = columns.nodes, columns.trees[tree, ROOT], 0, 0
    first = FIELDS + 2 * ((nodes.shape[1] - FIELDS) // 3)
    while parent >= 0:
        for number in range(first, first + nodes[parent, COUNT]):
            if nodes[parent, number] >= 0:
                found[count] = nodes[parent, number]
                count += 1
        parent = found[place] if place < count else -1
        place += 1


@compiled
def uproot(columns: Any, tree: int) -> None:
    """Gives every row of a tree back."""
    nodes, trees, heaps, keyed, pool, scratch = (
        columns.nodes,
        columns.trees,
        columns.heaps,
        columns.keyed,
        columns.pool,
        columns.scratch,
    )
    _drop_heap(nodes, trees, heaps, keyed, pool, tree)
    _kill(nodes, keyed, pool, scratch, trees[tree, ROOT], -1)
    trees[tree, ROOT], trees[tree, SIZE], trees[tree, KEYS] = -1, 0, 0


@compiled
def _best_value(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, heaps: Any, keyed: Any, pool: Any, tree: int
) -> float:
    """Path value of the best node that can be expanded; 0 if there is none."""
    node = _top(nodes, values, trees, heaps, keyed, pool, tree)
    if node < 0:
        return 0.0
    return values[node, VALUE] / values[trees[tree, ROOT], VALUE]


@compiled
def _take(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    trees: Any,
    heaps: Any,
    keyed: Any,
    pool: Any,
    tree: int,
    most: int,
    least: float,
    taken: Any,
) -> int:
    """Takes the best nodes, at most `most` of at least the value `least`, into `taken`; how many."""
    lowest, count = least * values[trees[tree, ROOT], VALUE], 0
    while count < most:
        node = _top(nodes, values, trees, heaps, keyed, pool, tree)
        if node < 0 or values[node, VALUE] < lowest:
            break
        _pop(nodes, values, trees, heaps, tree)
        nodes[node, STATE] = TAKEN
        taken[count] = node
        count += 1
    return count


@compiled
def _promise(  # noqa: PLR0917
    nodes: Any, values: Any, masks: Any, trees: Any, guesses: Any, heaps: Any, pool: Any, parent: int, row: int
) -> None:
    """Puts the best child of a node in flight into the frontier, unless it is there or may have no children."""
    tree, position = nodes[parent, TREE], nodes[parent, POSITION] + 1
    if (
        nodes[parent, PROMISED] >= 0
        or position >= trees[tree, LAST_POSITION]
        or position - nodes[trees[tree, ROOT], POSITION] >= trees[tree, MAX_DEPTH]
    ):
        return
    # No other entry has its id.
    child = _new(nodes, masks, pool, tree, parent, -1 - row, -1 - nodes[parent, NODE_ID], position)
    guess = guesses[tree]
    values[child, VALUE] = values[parent, VALUE] * guess
    values[child, ACCEPTANCE] = guess
    nodes[parent, PROMISED] = child
    _push(nodes, values, trees, heaps, tree, child)


@compiled
def _give_key(  # noqa: PLR0917
    nodes: Any, masks: Any, trees: Any, keyed: Any, node: int, offset: int
) -> None:
    """Gives a node its place for KV, and the mask that follows from its parent's."""
    tree, parent = nodes[node, TREE], nodes[node, PARENT]
    nodes[node, KEY] = offset
    keyed[tree, offset] = node
    if offset >= trees[tree, KEYS]:
        trees[tree, KEYS] = offset + 1
    for word in range(masks.shape[1]):
        masks[node, word] = masks[parent, word]
    masks[node, offset // 64] |= _BITS[offset % 64]


@compiled
def _grow(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    masks: Any,
    trees: Any,
    guesses: Any,
    heaps: Any,
    finals: Any,
    keyed: Any,
    pool: Any,
    scratch: Any,
    parent: int,
    row: int,
    tokens: Any,
    acceptance: Any,
    buckets: Any,
    is_learned: int,
    least: float,
) -> int:
    """Gives an unexpanded node its children; how many became nodes.

    Args:
        parent: the node.
        row: which row of the following is its own.
        tokens: int64 [R, k] best first; -1 past the last that may be chosen.
        acceptance: float64 [R, k] estimates given the parent.
        buckets: int64 [R, k] calibration buckets.
        is_learned: whether anything is to be learned from the children.
        least: children below it are remembered for the calibration alone.
    """
    tree, most = nodes[parent, TREE], (nodes.shape[1] - FIELDS) // 3
    count = 0
    for place in range(tokens.shape[1]):
        if tokens[row, place] >= 0:
            nodes[parent, FIELDS + count] = tokens[row, place]
            nodes[parent, FIELDS + most + count] = buckets[row, place]
            nodes[parent, FIELDS + 2 * most + count] = -1
            count += 1
    promised, nodes[parent, PROMISED] = nodes[parent, PROMISED], -1
    if promised >= 0 and nodes[promised, STATE] != TAKEN:
        # It leaves the heap when it comes up there.
        nodes[promised, STATE] = WITHDRAWN
        promised = -1
    nodes[parent, STATE], nodes[parent, COUNT], nodes[parent, IS_LEARNED] = EXPANDED, count, is_learned
    position, made = nodes[parent, POSITION] + 1, 0
    opens = position < trees[tree, LAST_POSITION]
    near = position - nodes[trees[tree, ROOT], POSITION] < trees[tree, MAX_DEPTH]
    for place in range(min(count, trees[tree, MAX_CHILDREN])):
        if not acceptance[row, place] >= least:
            continue
        token, node_id = nodes[parent, FIELDS + place], trees[tree, NEXT_ID]
        trees[tree, NEXT_ID] = node_id + 1
        final = _is_final(trees, finals, tree, token)
        keeps = promised >= 0 and place == 0 and not final
        if keeps:
            child, promised = promised, -1
            nodes[child, TOKEN], nodes[child, NODE_ID] = token, node_id
        else:
            child = _new(nodes, masks, pool, tree, parent, token, node_id, position)
        values[child, VALUE] = values[parent, VALUE] * acceptance[row, place]
        values[child, ACCEPTANCE] = acceptance[row, place]
        nodes[parent, FIELDS + 2 * most + place] = child
        made += 1
        if opens and near and not final and not keeps:
            _push(nodes, values, trees, heaps, tree, child)
    if promised >= 0:
        _kill(nodes, keyed, pool, scratch, promised, -1)
    trees[tree, SIZE] += made
    if count > 0:
        guesses[tree] += _GUESS_RATE * (acceptance[row, 0] - guesses[tree])
    return made


@compiled
def grow_step(  # noqa: PLR0917
    columns: Any,
    rows: Any,
    spans: Any,
    tokens: Any,
    acceptance: Any,
    buckets: Any,
    learned: Any,
    least: float,
    of_rows: Any,
    counts: Any,
    grown: Any,
    estimates: Any,
) -> int:
    """Gives the nodes of a step that are still there their children.

    Args:
        columns: all trees.
        rows: int64 [R, 2] the nodes' rows and serial numbers.
        spans: int64 [P] how many of them each session has, one after the other.
        tokens: as for `grow`, and so are `acceptance`, `buckets` and `least`.
        acceptance: see there.
        buckets: see there.
        learned: int64 [R].
        least: see there.
        of_rows: int64 [R], written: how many children of each became nodes.
        counts: int64 [2, P], written: nodes of each session that were still there, and children that were made.
        grown: int64 [3, R k], written: ids, parents (0 for the root) and tokens of the children.
        estimates: float64 [R k], written.

    Returns:
        How many children were made; -1 if there was no room for them, and nothing has changed.
    """
    nodes, values, masks, trees, guesses, heaps, finals, keyed, pool, scratch = (
        columns.nodes,
        columns.values,
        columns.masks,
        columns.trees,
        columns.guesses,
        columns.heaps,
        columns.finals,
        columns.keyed,
        columns.pool,
        columns.scratch,
    )
    most, room = (nodes.shape[1] - FIELDS) // 3, len(rows) * tokens.shape[1]
    if pool[FREE_ROWS] < room or tokens.shape[1] > most:
        return -1
    for number in range(len(rows)):
        node = rows[number, 0]
        if nodes[node, SERIAL] == rows[number, 1] and trees[nodes[node, TREE], HEAP] + room > heaps.shape[1]:
            return -1
    number = total = 0
    for span in range(len(spans)):
        counts[0, span] = counts[1, span] = 0
        for _ in range(spans[span]):
            node, of_rows[number] = rows[number, 0], 0
            if nodes[node, SERIAL] == rows[number, 1]:
                made = _grow(
                    nodes,
                    values,
                    masks,
                    trees,
                    guesses,
                    heaps,
                    finals,
                    keyed,
                    pool,
                    scratch,
                    node,
                    number,
                    tokens,
                    acceptance,
                    buckets,
                    learned[number],
                    least,
                )
                of_rows[number] = made
                counts[0, span] += 1
                counts[1, span] += made
                parent = 0 if trees[nodes[node, TREE], ROOT] == node else nodes[node, NODE_ID]
                for place in range(nodes[node, COUNT]):
                    child = nodes[node, FIELDS + 2 * most + place]
                    if child >= 0:
                        grown[0, total] = nodes[child, NODE_ID]
                        grown[1, total] = parent
                        grown[2, total] = nodes[child, TOKEN]
                        estimates[total] = values[child, ACCEPTANCE]
                        total += 1
            number += 1
    return total


@compiled
def observe(columns: Any, tree: int, tokens: Any, seen: Any) -> int:
    """What committed tokens say of the estimates.

    Args:
        columns: all trees.
        tree: whose.
        tokens: int64 [n] below its root.
        seen: int64 [n, 2 + K], written: which child was committed (negative if none was), how many there are, and their
            calibration buckets.

    Returns:
        Parents in `seen`.
    """
    nodes, trees = columns.nodes, columns.trees
    node, count = trees[tree, ROOT], 0
    most = (nodes.shape[1] - FIELDS) // 3
    for number in range(len(tokens)):
        if node < 0 or nodes[node, STATE] != EXPANDED:
            break
        if nodes[node, IS_LEARNED]:
            seen[count, 0], seen[count, 1] = -1, nodes[node, COUNT]
            for place in range(nodes[node, COUNT]):
                seen[count, 2 + place] = nodes[node, FIELDS + most + place]
                if seen[count, 0] < 0 and nodes[node, FIELDS + place] == tokens[number]:
                    seen[count, 0] = place
            count += 1
        node = _taken_child(nodes, node, tokens[number])
    return count


@compiled
def reroot(columns: Any, tree: int, tokens: Any, kept: Any) -> tuple[int, int]:
    """Moves the root along committed tokens.

    Args:
        columns: all trees.
        tree: which.
        tokens: int64 [n], at least one.
        kept: int64 [n + KEYS], written: the key offsets of the nodes on the way, as far as they have KV, and of those
            that survive, ascending, which is parents before children; they have the offsets from 0 on afterwards.

    Returns:
        How many are on the way, and how many all are.
    """
    nodes, values, masks, trees, heaps, finals, keyed, pool, scratch = (
        columns.nodes,
        columns.values,
        columns.masks,
        columns.trees,
        columns.heaps,
        columns.finals,
        columns.keyed,
        columns.pool,
        columns.scratch,
    )
    root = trees[tree, ROOT]
    node, path = root, 0
    for number in range(len(tokens)):
        node = _taken_child(nodes, node, tokens[number])
        if node < 0:
            # One that was not taken has nothing below it.
            _plant(
                nodes,
                values,
                masks,
                trees,
                heaps,
                keyed,
                pool,
                scratch,
                tree,
                tokens[len(tokens) - 1],
                0,
                nodes[root, POSITION] + len(tokens),
            )
            return path, path
        kept[path] = nodes[node, KEY]
        path += 1
    _drop_heap(nodes, trees, heaps, keyed, pool, tree)
    _kill(nodes, keyed, pool, scratch, root, node)
    _settle(nodes, values, masks, trees, heaps, finals, keyed, scratch, tree, node)
    keys, count = trees[tree, KEYS], 0
    trees[tree, KEYS] = 0
    for offset in range(keys):
        node = keyed[tree, offset]
        if node >= 0:
            kept[path + count] = offset
            keyed[tree, offset] = -1
            _give_key(nodes, masks, trees, keyed, node, count)
            count += 1
    return path, path + count


@compiled
def commit(columns: Any, tree: int, tokens: Any, seen: Any, kept: Any) -> tuple[int, int, int]:
    """`observe` and `reroot`; what they return."""
    parents = observe(columns, tree, tokens, seen)
    path, total = reroot(columns, tree, tokens, kept)
    return parents, path, total


@compiled
def plan_trees(  # noqa: PLR0917
    columns: Any,
    before: Any,
    candidates: Any,
    lengths: Any,
    settings: tuple[int, int, int, int, int, int, int, int],
    least: float,
    ranked: Any,
    sessions: Any,
    picked: Any,
    rows: Any,
    sights: Any,
    records: Any,
) -> int:
    """Takes the best nodes over all sessions, and gives them their places: everybody's minimum first, then the best.

    Args:
        columns: all trees.
        before: int64 [B, 2] rows and serial numbers of the step under way, whose best children compete.
        candidates: int64 [C] trees that may have a part.
        lengths: int64 [S] slots of each tree's row of the slot table.
        settings: most nodes of a step, branching, most nodes of a session in a step, nodes of each session that come
            first, most nodes of a session, most slots of a row, which session comes first, most nodes that have their
            best child promised.
        least: of a path value.
        ranked: int32 [S, 8] how the children of each tree's nodes are ranked.
        sessions: int64 [4, C], written: trees, key index of bit 0 of the masks and of the end, nodes of each.
        picked: int64 [width, 2], written: rows and serial numbers.
        rows: int64 [4, width], written: tokens, positions, own key indices, and those of bit 0 of the masks.
        sights: int64 [width, W], written: masks.
        records: int32 [width, 8], written: of `ranked`.

    Returns:
        How many sessions have nodes, those that could have had some in the upper half: count + 2**32 * growing. -1
        where there is no room for promises; nothing has changed.
    """
    nodes, values, masks, trees, guesses, heaps, keyed, pool = (
        columns.nodes,
        columns.values,
        columns.masks,
        columns.trees,
        columns.guesses,
        columns.heaps,
        columns.keyed,
        columns.pool,
    )
    if not _promise_best(nodes, values, masks, trees, guesses, heaps, keyed, pool, before, settings[7]):
        return -1
    growing = 0
    for number in range(len(candidates)):
        tree = candidates[number]
        value = _best_value(nodes, values, trees, heaps, keyed, pool, tree)
        room = _room(nodes, trees, tree, lengths[tree], settings) if value > 0 and value >= least else 0
        if room > 0:
            sessions[0, growing], sessions[1, growing] = tree, room
            growing += 1
    if growing == 0:
        return 0
    # Where there are more sessions than width, another one comes first at every step.
    turn = (settings[6] + 1) % growing if growing > 1 else 0
    order, rooms = np.empty(growing, np.int64), np.empty(growing, np.int64)
    for number in range(growing):
        place = (number + turn) % growing
        order[number], rooms[number] = sessions[0, place], sessions[1, place]
    counts, taken = np.zeros(growing, np.int64), np.empty((2, settings[0]), np.int64)
    total = _share_out(nodes, values, trees, heaps, keyed, pool, order, rooms, counts, taken, settings, least)
    sharing = begin = 0
    for number in range(growing):
        if counts[number] == 0:
            continue
        tree = order[number]
        base, index = nodes[trees[tree, ROOT], POSITION] + 1, lengths[tree]
        sessions[0, sharing], sessions[1, sharing] = tree, base
        sessions[2, sharing], sessions[3, sharing] = index + counts[number], counts[number]
        sharing += 1
        for place in range(total):
            if taken[1, place] == number:
                node = taken[0, place]
                _give_key(nodes, masks, trees, keyed, node, index - base)
                picked[begin, 0], picked[begin, 1] = node, nodes[node, SERIAL]
                rows[0, begin], rows[1, begin] = nodes[node, TOKEN], nodes[node, POSITION]
                rows[2, begin], rows[3, begin] = index, base
                for word in range(masks.shape[1]):
                    sights[begin, word] = masks[node, word]
                for word in range(8):
                    records[begin, word] = ranked[tree, word]
                index += 1
                begin += 1
    return sharing + (growing << 32)


@compiled
def _promise_best(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    masks: Any,
    trees: Any,
    guesses: Any,
    heaps: Any,
    keyed: Any,
    pool: Any,
    before: Any,
    most: int,
) -> bool:
    """Has the best children of the nodes in flight compete, and counts these nodes; False where there is no room."""
    if pool[FREE_ROWS] < len(before):
        return False
    for number in range(len(before)):
        node = before[number, 0]
        if nodes[node, SERIAL] == before[number, 1] and trees[nodes[node, TREE], HEAP] + len(before) > heaps.shape[1]:
            return False
    for tree in range(len(trees)):
        trees[tree, IN_FLIGHT] = 0
    for number in range(len(before)):
        node = before[number, 0]
        if nodes[node, SERIAL] == before[number, 1]:
            # Their children need credit.
            trees[nodes[node, TREE], IN_FLIGHT] += 1
            if number < most:
                _promise(nodes, values, masks, trees, guesses, heaps, pool, node, number)
    return True


@compiled
def _room(nodes: Any, trees: Any, tree: int, length: int, settings: tuple[int, ...]) -> int:
    """Nodes of the tree that its credit, its row of slots and its share of a step allow to expand."""
    most_live = trees[tree, MAX_CHILDREN]
    credit = (most_live - trees[tree, SIZE]) // min(settings[1], most_live) - trees[tree, IN_FLIGHT]
    # Promises that were not kept hold their places until a commit, and masks have no bits beside a tree's.
    places = settings[4] - (length - nodes[trees[tree, ROOT], POSITION] - 1)
    return min(credit, places, settings[5] - length, settings[2])


@compiled
def _share_out(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    trees: Any,
    heaps: Any,
    keyed: Any,
    pool: Any,
    order: Any,
    rooms: Any,
    counts: Any,
    taken: Any,
    settings: tuple[int, ...],
    least: float,
) -> int:
    """Takes nodes of trees in this order: everybody's minimum first, then the best of all; how many.

    Args:
        order: int64 [G] trees, `rooms` [G] most nodes of each.
        counts: int64 [G], written: nodes of each.
        taken: int64 [2, width], written: the nodes, and the places in `order` of their trees.
    """
    growing, width, total = len(order), taken.shape[1], 0
    best = np.empty(growing, np.float64)
    for number in range(growing):
        tree = order[number]
        share = min(rooms[number], width - total, settings[2] if growing == 1 else settings[3])
        count = _take(nodes, values, trees, heaps, keyed, pool, tree, share, least, taken[0, total:])
        for place in range(total, total + count):
            taken[1, place] = number
        counts[number] = count
        total += count
        value = _best_value(nodes, values, trees, heaps, keyed, pool, tree) if count < rooms[number] else 0.0
        best[number] = value if value >= least else 0.0
    while total < width:
        place = 0
        for number in range(1, growing):
            if best[number] > best[place]:
                place = number
        if best[place] <= 0:
            break
        node = _pop(nodes, values, trees, heaps, order[place])
        nodes[node, STATE] = TAKEN
        taken[0, total], taken[1, total] = node, place
        total += 1
        counts[place] += 1
        value = 0.0
        if counts[place] < rooms[place]:
            value = _best_value(nodes, values, trees, heaps, keyed, pool, order[place])
        best[place] = value if value >= least else 0.0
    return total


@compiled
def _settle(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    masks: Any,
    trees: Any,
    heaps: Any,
    finals: Any,
    keyed: Any,
    scratch: Any,
    tree: int,
    root: int,
) -> None:
    """Makes a node the root: the frontier and the size follow from what hangs below it."""
    key = nodes[root, KEY]
    if key >= 0:
        keyed[tree, key] = -1
    nodes[root, PARENT], nodes[root, KEY] = -1, NO_KEY
    for word in range(masks.shape[1]):
        masks[root, word] = 0
    trees[tree, ROOT], trees[tree, HEAP] = root, 0
    factor = 1 / values[root, VALUE] if values[root, VALUE] < _SMALLEST_ROOT_VALUE else 1.0
    values[root, VALUE] *= factor
    deepest = min(trees[tree, LAST_POSITION] - 1, nodes[root, POSITION] + trees[tree, MAX_DEPTH] - 1)
    most = (nodes.shape[1] - FIELDS) // 3
    scratch[0], waiting, size = root, 1, 0
    while waiting > 0:
        waiting -= 1
        parent = scratch[waiting]
        # A promised child comes last, and is not counted.
        for place in range(nodes[parent, COUNT] + 1):
            is_promised = place == nodes[parent, COUNT]
            child = nodes[parent, PROMISED] if is_promised else nodes[parent, FIELDS + 2 * most + place]
            if child < 0:
                continue
            values[child, VALUE] *= factor
            if not is_promised:
                size += 1
            if nodes[child, STATE] != LEAF:
                scratch[waiting] = child
                waiting += 1
            elif nodes[child, POSITION] <= deepest and not _is_final(trees, finals, tree, nodes[child, TOKEN]):
                _push(nodes, values, trees, heaps, tree, child)
    trees[tree, SIZE] = size


@compiled
def _taken_child(nodes: Any, parent: int, token: int) -> int:
    """The child of this token that has KV, or -1."""
    most = (nodes.shape[1] - FIELDS) // 3
    for place in range(nodes[parent, COUNT]):
        child = nodes[parent, FIELDS + 2 * most + place]
        if child >= 0 and nodes[child, TOKEN] == token:
            return child if nodes[child, KEY] >= 0 else -1
    return -1


@compiled
def _is_final(trees: Any, finals: Any, tree: int, token: int) -> bool:
    for place in range(trees[tree, FINALS]):  # noqa: SIM110 - compiled, a generator costs more
        if finals[tree, place] == token:
            return True
    return False


@compiled
def _new(  # noqa: PLR0917
    nodes: Any, masks: Any, pool: Any, tree: int, parent: int, token: int, node_id: int, position: int
) -> int:
    """A row for a node that has not been taken; its values are its maker's to write."""
    pool[FREE_ROWS] -= 1
    node = pool[POOL_FIELDS + pool[FREE_ROWS]]
    nodes[node, PARENT], nodes[node, TOKEN], nodes[node, NODE_ID], nodes[node, POSITION] = (
        parent, token, node_id, position,
    )  # fmt: skip
    nodes[node, KEY], nodes[node, STATE], nodes[node, SERIAL], nodes[node, TREE] = NO_KEY, LEAF, pool[NEXT_SERIAL], tree
    nodes[node, COUNT], nodes[node, IS_LEARNED], nodes[node, PROMISED] = 0, 0, -1
    for word in range(masks.shape[1]):
        masks[node, word] = 0
    pool[NEXT_SERIAL] += 1
    return node


@compiled
def _give_back(nodes: Any, keyed: Any, pool: Any, node: int) -> None:
    if nodes[node, KEY] >= 0:
        keyed[nodes[node, TREE], nodes[node, KEY]] = -1
    nodes[node, STATE], nodes[node, SERIAL] = FREE, -1
    pool[POOL_FIELDS + pool[FREE_ROWS]] = node
    pool[FREE_ROWS] += 1


@compiled
def _kill(  # noqa: PLR0917
    nodes: Any, keyed: Any, pool: Any, scratch: Any, top: int, spared: int
) -> None:
    """Gives back a node and all below it, but for what hangs at `spared`; those in the heap stay there."""
    most = (nodes.shape[1] - FIELDS) // 3
    scratch[0], waiting = top, 1
    while waiting > 0:
        waiting -= 1
        node = scratch[waiting]
        if node == spared:
            continue
        if nodes[node, PROMISED] >= 0:
            scratch[waiting] = nodes[node, PROMISED]
            waiting += 1
        for place in range(nodes[node, COUNT]):
            child = nodes[node, FIELDS + 2 * most + place]
            if child >= 0 and nodes[child, STATE] == LEAF:
                _give_back(nodes, keyed, pool, child)
            elif child >= 0:
                scratch[waiting] = child
                waiting += 1
        _give_back(nodes, keyed, pool, node)


@compiled
def _drop_heap(  # noqa: PLR0917
    nodes: Any, trees: Any, heaps: Any, keyed: Any, pool: Any, tree: int
) -> None:
    """Empties a frontier; what only it still holds is given back."""
    for place in range(trees[tree, HEAP]):
        node = heaps[tree, place]
        if nodes[node, STATE] == WITHDRAWN:
            _give_back(nodes, keyed, pool, node)
    trees[tree, HEAP] = 0


@compiled
def _top(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, heaps: Any, keyed: Any, pool: Any, tree: int
) -> int:
    """The best node of a frontier, or -1; withdrawn promises above it leave."""
    while trees[tree, HEAP] > 0:
        node = heaps[tree, 0]
        if nodes[node, STATE] != WITHDRAWN:
            return node
        _pop(nodes, values, trees, heaps, tree)
        _give_back(nodes, keyed, pool, node)
    return -1


@compiled
def _is_better(nodes: Any, values: Any, one: int, other: int) -> bool:
    first, second = values[one, VALUE], values[other, VALUE]
    return first > second or (first == second and nodes[one, NODE_ID] < nodes[other, NODE_ID])


@compiled
def _push(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, heaps: Any, tree: int, node: int
) -> None:
    place = trees[tree, HEAP]
    trees[tree, HEAP] = place + 1
    while place > 0:
        above = (place - 1) // 2
        if not _is_better(nodes, values, node, heaps[tree, above]):
            break
        heaps[tree, place] = heaps[tree, above]
        place = above
    heaps[tree, place] = node


@compiled
def _pop(nodes: Any, values: Any, trees: Any, heaps: Any, tree: int) -> int:
    size = trees[tree, HEAP] - 1
    trees[tree, HEAP] = size
    best, node, place = heaps[tree, 0], heaps[tree, size], 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _is_better(nodes, values, heaps[tree, below + 1], heaps[tree, below]):
            below += 1
        if not _is_better(nodes, values, heaps[tree, below], node):
            break
        heaps[tree, place] = heaps[tree, below]
        place = below
    heaps[tree, place] = node
    return best
