"""The loops over trees of guesses: grafting, the likeliest paths, what is to be sent, and committing.

Compiled by numba; without it the same functions run in plain Python. They stand in one file because what numba keeps on
disk is made anew when a function's own file has changed, not when one that it calls has (`outrider.compiled`).

The nodes of a tree are its rows 0 to SIZE in the order in which they were guessed, parents before their children; row 0
is the root. What a node holds of others (PARENT, FIRST, NEXT) is their rows; 0 as FIRST or NEXT is none, for the root
is nobody's child. A commit moves what survives together, in the same order. `guess_tree.GuessForest` has the columns:

    nodes  int64 [S, M, NODE_FIELDS]      values  float64 [S, M, VALUE_FIELDS]
    trees  int64 [S, TREE_FIELDS]         finals  int64 [S, F]

Shapes: S trees of at most M - 1 nodes below the root, F final tokens; B trees that are grown together, G guesses after
each of their texts, of which the last W tokens are looked at.
"""

from typing import Any

from outrider.compiled import compiled

NODE_ID, TOKEN, BUCKET, PARENT, FIRST, NEXT = range(6)
NODE_FIELDS = 6
"""Of a node: id (0: the root, or not sent yet), token, bucket of the calibration; its parent, its first child, the
sibling that was guessed next."""
ACCEPTANCE, LEFT = range(2)
VALUE_FIELDS = 2
"""Of a node: estimate given the parent; of the chance that the next token is a child's, what no child has yet."""
SIZE, NEW, NEXT_ID, POSITION, MAX_DEPTH, MAX_NODES, LAST_POSITION, FINALS, RULE = range(9)
TREE_FIELDS = 9
"""Of a tree: nodes below the root, the first row that was not sent, the next id (0: given by others); the root's
position; bounds as `GuessBounds` has them, with how many tokens are final; the calibration's rule."""
LEARNED, PRIOR_HITS, HITS, TRIALS = range(4)
TABLES = 4
"""Of a calibration's bucket: the estimate now, hits that the prior is worth, hits and trials so far."""


@compiled
def graft(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    trees: Any,
    finals: Any,
    min_value: float,
    members: Any,
    ends: Any,
    chances: Any,
    tokens: Any,
    parents: Any,
    estimates: Any,
    buckets: Any,
    found: Any,
    places: Any,
    reached: Any,
) -> None:
    """Adds to each tree what is not there yet.

    Args:
        nodes: see above; so are `values`, `trees` and `finals`.
        min_value: guesses less likely to be reached and accepted are left out, with what hangs below them.
        members: int64 [B] trees.
        ends: int64 [B, 2] rows that the guesses hang below, and their depths.
        chances: float64 [B] that all nodes on the way to that row are accepted.
        tokens: int32 [B, G] guesses, parents before their children.
        parents: int32 [B, G] places among these; -1: the row of `ends`.
        estimates: float64 [B, G] that each is accepted, given its parent.
        buckets: int64 [B, G].
        found: int32 [B, 2] how many guesses there are, first.
        places: int64 [G, 2], scratch: of every guess its row (-1: none) and its depth.
        reached: float64 [G], scratch: the chance of its path.
    """
    for member in range(len(members)):
        tree = members[member]
        deepest = _depth_limit(trees, tree)
        for place in range(found[member, 0]):
            above, depth, chance, ends_here = ends[member, 0], ends[member, 1], chances[member], False
            parent = parents[member, place]
            if parent >= 0:
                above, depth, chance = places[parent, 0], places[parent, 1], reached[parent]
                ends_here = _is_final(trees, finals, tree, tokens[member, parent])
            row, last = -1, 0
            if above >= 0 and depth < deepest and not ends_here:
                child = nodes[tree, above, FIRST]
                while child > 0 and nodes[tree, child, TOKEN] != tokens[member, place]:
                    last, child = child, nodes[tree, child, NEXT]
                if child > 0:
                    row = child
                else:
                    acceptance = min(estimates[member, place], values[tree, above, LEFT])
                    if trees[tree, SIZE] < trees[tree, MAX_NODES] and chance * acceptance >= min_value:
                        row = _add(nodes, values, trees, tree, above, last)
                        nodes[tree, row, TOKEN], nodes[tree, row, BUCKET] = (
                            tokens[member, place],
                            buckets[member, place],
                        )
                        values[tree, row, ACCEPTANCE] = acceptance
                        values[tree, above, LEFT] -= acceptance
            places[place, 0], places[place, 1] = row, depth + 1
            reached[place] = chance * values[tree, row, ACCEPTANCE] if row >= 0 else 0.0


@compiled
def likeliest_ends(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    trees: Any,
    finals: Any,
    least: float,
    members: Any,
    tails: Any,
    lengths: Any,
    path: Any,
    chosen: Any,
    ends: Any,
    chances: Any,
    longer: Any,
    longer_lengths: Any,
) -> int:
    """Follows the best child of every node down to a leaf; how many trees go on there.

    Those do whose leaf may have children, where the chance that all nodes on the way are accepted is at least `least`.

    Args:
        nodes: see above; so are `values`, `trees` and `finals`.
        least: see above.
        members: int64 [B] trees.
        tails: int32 [B, W] the texts up to the roots, their last tokens.
        lengths: int32 [B] how many these are.
        path: int64 [M], scratch.
        chosen: int64 [B], written as far as returned: the trees. So are all that follow.
        ends: int64 [B, 2]: rows of the leaves, and their depths.
        chances: float64 [B]: that all nodes on the way are accepted.
        longer: int32 [B, W]: the texts up to the leaves.
        longer_lengths: int32 [B].
    """
    going_on = 0
    for member in range(len(members)):
        tree, row, depth, chance = members[member], 0, 0, 1.0
        while nodes[tree, row, FIRST] > 0:
            row = _best_child(nodes, values, tree, row)
            path[depth] = nodes[tree, row, TOKEN]
            depth += 1
            chance *= values[tree, row, ACCEPTANCE]
        if not 0 < depth < _depth_limit(trees, tree) or _is_final(trees, finals, tree, path[depth - 1]):
            continue
        if chance < least:
            continue
        chosen[going_on], chances[going_on] = tree, chance
        ends[going_on, 0], ends[going_on, 1] = row, depth
        length = lengths[member]
        dropped = max(0, length + depth - tails.shape[1])
        for place in range(dropped, length + depth):
            longer[going_on, place - dropped] = tails[member, place] if place < length else path[place - length]
        longer_lengths[going_on] = length + depth - dropped
        going_on += 1
    return going_on


@compiled
def reach(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, members: Any, parts: int, depths: Any, reaches: Any
) -> None:
    """How many nodes are accepted in the mean on the way down by the best child of each.

    Args:
        nodes: see above; so are `values` and `trees`.
        members: int64 [B] trees.
        parts: the way ends at the deepest that a node may be, divided by this and rounded up.
        depths: int64 [B], written: where the way ends, at the latest.
        reaches: float64 [B], written: so many nodes.
    """
    for member in range(len(members)):
        tree, row, chance, accepted = members[member], 0, 1.0, 0.0
        depths[member] = -(-_depth_limit(trees, tree) // parts)
        for _ in range(depths[member]):
            if nodes[tree, row, FIRST] == 0:
                break
            row = _best_child(nodes, values, tree, row)
            chance *= values[tree, row, ACCEPTANCE]
            accepted += chance
        reaches[member] = accepted


@compiled
def send(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, members: Any, counts: Any, sent: Any, acceptance: Any
) -> int:
    """The nodes that were not sent yet, tree by tree, as guessed; how many. Those of trees that count get their ids.

    Args:
        nodes: see above; so are `values` and `trees`.
        members: int64 [B] trees.
        counts: int64 [B], written: nodes of each.
        sent: int64 [3, n], written as far as returned: ids, ids of the parents (0: the root), tokens.
        acceptance: float64 [n], likewise: the estimates.
    """
    total = 0
    for member in range(len(members)):
        tree = members[member]
        counts[member] = trees[tree, SIZE] + 1 - trees[tree, NEW]
        for row in range(trees[tree, NEW], trees[tree, SIZE] + 1):
            if trees[tree, NEXT_ID] > 0:
                nodes[tree, row, NODE_ID] = trees[tree, NEXT_ID]
                trees[tree, NEXT_ID] += 1
            sent[0, total], sent[2, total] = nodes[tree, row, NODE_ID], nodes[tree, row, TOKEN]
            sent[1, total] = nodes[tree, nodes[tree, row, PARENT], NODE_ID]
            acceptance[total] = values[tree, row, ACCEPTANCE]
            total += 1
        trees[tree, NEW] = trees[tree, SIZE] + 1
    return total


@compiled
def commit(  # noqa: PLR0917
    nodes: Any,
    values: Any,
    trees: Any,
    tree: int,
    tokens: Any,
    kept: Any,
    tables: Any,
    counted: Any,
    predicted: Any,
    edges: Any,
    per_rule: int,
    strength: float,
    decay: float,
) -> None:
    """Moves a tree's root along committed tokens, and counts which guesses came true; what hangs elsewhere is dead.

    Args:
        nodes: see above; so are `values` and `trees`.
        tree: whose.
        tokens: int64 [C], at least one.
        kept: int64 [M], scratch: the rows that survivors have afterwards.
        tables: float64 [TABLES, T] of the calibration, written.
        counted: int64 [2, R] guesses, and those that came true, by bins of the estimate, written.
        predicted: float64 [R] sum of the estimates, written.
        edges: float64 what parts the bins.
        per_rule: buckets of a rule.
        strength: trials that the prior is worth.
        decay: what one trial leaves of the bucket's earlier ones.
    """
    root = 0
    for place in range(len(tokens)):
        child, root_below = nodes[tree, root, FIRST], -1
        while child > 0:
            came_true = 1 if nodes[tree, child, TOKEN] == tokens[place] else 0
            if came_true:
                root_below = child
            bucket, estimate = nodes[tree, child, BUCKET], values[tree, child, ACCEPTANCE]
            bin_of = bucket // per_rule * (len(edges) + 1)
            for edge in range(len(edges)):
                if edges[edge] < estimate:
                    bin_of += 1
            counted[0, bin_of] += 1
            counted[1, bin_of] += came_true
            predicted[bin_of] += estimate
            tables[HITS, bucket] = tables[HITS, bucket] * decay + came_true
            tables[TRIALS, bucket] = tables[TRIALS, bucket] * decay + 1
            tables[LEARNED, bucket] = (tables[PRIOR_HITS, bucket] + tables[HITS, bucket]) / (
                strength + tables[TRIALS, bucket]
            )
            child = nodes[tree, child, NEXT]
        root = root_below
        if root < 0:
            break
    trees[tree, POSITION] += len(tokens)
    if root < 0:
        clear(nodes, values, trees, tree)
    else:
        _settle(nodes, values, trees, tree, root, kept)


@compiled
def clear(nodes: Any, values: Any, trees: Any, tree: int) -> None:
    """Forgets every node below the root; ids go on counting."""
    nodes[tree, 0, FIRST], values[tree, 0, LEFT] = 0, 1.0
    trees[tree, SIZE], trees[tree, NEW] = 0, 1


@compiled
def _settle(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, tree: int, root: int, kept: Any
) -> None:
    """Makes a node the root, and moves what hangs below it together."""
    for row in range(root):
        kept[row] = -1
    kept[root], size = 0, 0
    _move(nodes, values, tree, root, 0)
    for row in range(root + 1, trees[tree, SIZE] + 1):
        kept[row] = -1
        if kept[nodes[tree, row, PARENT]] >= 0:
            size += 1
            kept[row] = size
            nodes[tree, row, PARENT] = kept[nodes[tree, row, PARENT]]
            _move(nodes, values, tree, row, size)
    nodes[tree, 0, NODE_ID] = nodes[tree, 0, PARENT] = nodes[tree, 0, NEXT] = 0
    for row in range(size + 1):
        # All children of a node that is kept are kept as well.
        for link in (FIRST, NEXT):
            if nodes[tree, row, link] > 0:
                nodes[tree, row, link] = kept[nodes[tree, row, link]]
    trees[tree, SIZE], trees[tree, NEW] = size, size + 1


@compiled
def _move(nodes: Any, values: Any, tree: int, row: int, to: int) -> None:
    for field in range(NODE_FIELDS):
        nodes[tree, to, field] = nodes[tree, row, field]
    for field in range(VALUE_FIELDS):
        values[tree, to, field] = values[tree, row, field]


@compiled
def _add(  # noqa: PLR0917
    nodes: Any, values: Any, trees: Any, tree: int, above: int, last: int
) -> int:
    """A node as the last of its parent's children; its token, bucket and estimate are its maker's to write."""
    row = trees[tree, SIZE] + 1
    trees[tree, SIZE] = row
    if last > 0:
        nodes[tree, last, NEXT] = row
    else:
        nodes[tree, above, FIRST] = row
    nodes[tree, row, NODE_ID], nodes[tree, row, PARENT] = 0, above
    nodes[tree, row, FIRST], nodes[tree, row, NEXT] = 0, 0
    values[tree, row, LEFT] = 1.0
    return row


@compiled
def _best_child(nodes: Any, values: Any, tree: int, row: int) -> int:
    """The likeliest child, of equals the first; the node has one."""
    best = child = nodes[tree, row, FIRST]
    while child > 0:
        if values[tree, child, ACCEPTANCE] > values[tree, best, ACCEPTANCE]:
            best = child
        child = nodes[tree, child, NEXT]
    return best


@compiled
def _depth_limit(trees: Any, tree: int) -> int:
    """The deepest that a node may be."""
    return min(trees[tree, MAX_DEPTH], trees[tree, LAST_POSITION] - trees[tree, POSITION])


@compiled
def _is_final(trees: Any, finals: Any, tree: int, token: int) -> bool:
    for place in range(trees[tree, FINALS]):  # noqa: SIM110 - compiled, a generator costs more
        if finals[tree, place] == token:
            return True
    return False
