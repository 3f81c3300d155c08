"""The coordinator's copies of the sessions' token trees, merged from the growth of any number of draft workers.

A draft and its mirror are out of step by a network's delay: growth arrives that was made before the draft knew of the
last commits. `as_of` says which committed length the draft had applied; growth that descends from what was committed
since is grafted, the rest is dropped.

A message of growth is grafted as a whole, and a result's commits are applied as a whole: the trees of all sessions are
columns of one forest. Chains (rejection) are lists, and taken one by one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.compiled import IS_COMPILED, entries
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.forest import MOST_PASSED, Forest, Ints, Moves
from outrider.coordinator.forest_kernels import GRAFTED, LATE, PASSED, PENDING, Arriving, Passed
from outrider.coordinator.messages import GrowthBatch
from outrider.coordinator.source_mix import Kind
from outrider.growth_source import GrowthSource


class TreeMirror:
    """One session's tree: its row of the forest, and what its workers know.

    Args:
        token_ids: the session's committed tokens, prompt and output; the mirror reads this list where growth comes
            late, and it has all of them by then (its root may move before they are appended).
        kind: of the session, for what is learned of its sources.
    """

    is_chain = False

    def __init__(self, forest: Forest, token_ids: list[int], kind: Kind = Kind.OTHER) -> None:
        self.forest = forest
        self.token_ids = token_ids
        self.row = forest.add_session(token_ids[-1], len(token_ids))
        forest.mix.open(self.row, kind)
        self._last_counts: npt.NDArray[np.int64] | None = None

    @property
    def length(self) -> int:
        """Committed tokens."""
        return int(self.forest.rows.length[self.row])

    @property
    def root_was_drafted(self) -> bool:
        """Whether the root was a node of the tree before it was committed: a draft may be expanding it by now."""
        return bool(self.forest.rows.was_drafted[self.row])

    @property
    def root_was_missed(self) -> bool:
        """Whether its parent had been expanded, and it was none of the children."""
        return bool(self.forest.rows.was_missed[self.row])

    @property
    def is_complete(self) -> bool:
        """Whether some worker has said that the tree of this round is whole (sync mode)."""
        return int(self.forest.rows.complete_at[self.row]) == self.length

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, or opens the session anew: its ids mean nothing any more; its nodes stay."""
        self.forest.views.forget(worker_id, self.row)

    def close(self) -> None:
        """The session has ended."""
        self._last_counts = self.source_counts.copy()
        self.forest.remove_session(self.row)

    @property
    def source_counts(self) -> npt.NDArray[np.int64]:
        """[3, 4] as of `SourceMix.counts`; after the session's end what they were then."""
        return self.forest.mix.counts[self.row] if self._last_counts is None else self._last_counts


Mirror = TreeMirror | ChainMirror


# ------------------------------------------------------------------------------------------------------------- growth


def graft(worker_id: str, growth: GrowthBatch, mirrors: Sequence[Mirror | None]) -> list[int]:
    """Adds a message's growth.

    Args:
        mirrors: [S] of its sessions; None where the growth is not wanted.

    Returns:
        [S] how many of each session's nodes stand in its tree now, or are committed tokens, and did not before under
        the same id.
    """
    rows = np.array([mirror.row if isinstance(mirror, TreeMirror) else 0 for mirror in mirrors], dtype=np.int64)
    forest = next((mirror.forest for mirror in mirrors if isinstance(mirror, TreeMirror)), None)
    grafted = [0] * len(mirrors)
    if forest is not None:
        as_of = np.array(growth.as_of)
        complete = np.array(growth.complete) if any(growth.complete) else None
        views = forest.views.hear(worker_id, rows, as_of, complete)
        grafted = _graft_trees(forest, growth, mirrors, rows=rows, views=views, as_of=as_of).tolist()
    # None, or without a tree.
    for place in np.flatnonzero(rows == 0).tolist():
        if isinstance(mirror := mirrors[place], ChainMirror):
            grafted[place] = mirror.graft(worker_id, growth.of_session(place))
    return grafted


def _graft_trees(
    forest: Forest, growth: GrowthBatch, mirrors: Sequence[Mirror | None], *, rows: Ints, views: Ints, as_of: Ints
) -> Ints:
    nodes, mix = len(growth.node_ids), forest.mix
    status, slots, grafted = (np.zeros(size, dtype=np.int64) for size in (nodes, nodes, len(rows)))
    raised, places = np.zeros(nodes, dtype=np.bool_), np.arange(len(rows)).repeat(growth.node_counts)
    lengths, roots = forest.rows.length.take(rows), forest.root.take(rows)
    acceptance, sources, of_nodes = growth.acceptance, growth.sources, rows
    if sources is not None:
        mix.begin(forest)
    if mix.is_active:
        # Beside other sources a model's estimates are corrected, and its nodes noted as its own.
        sources = np.full(nodes, int(GrowthSource.MODEL)) if sources is None else sources
        of_nodes = rows[places]
        acceptance = mix.corrected(of_nodes, sources, acceptance)
    told = (views, as_of, lengths, roots, places, growth.node_ids, growth.parents, growth.tokens, acceptance)
    arriving = Arriving(*map(entries, (*told, status, slots, raised, grafted)))
    if forest.graft(arriving, Passed(*map(entries, (lengths, lengths, lengths[:0])))):
        late = np.flatnonzero(status == LATE)
        status[late] = PENDING
        forest.graft(arriving, _passed(mirrors, places[late], slots[late], lengths))
    if mix.is_active and sources is not None:
        placed = np.flatnonzero((status == GRAFTED) | (status == PASSED))
        mix.note_drafted(of_nodes[placed], sources[placed])
        placed = placed[status[placed] == GRAFTED]
        mix.note_grafted(forest, slots[placed], growth.acceptance[placed], sources[placed])
    return grafted


def _passed(mirrors: Sequence[Mirror | None], places: Ints, ends: Ints, lengths: Ints) -> Passed:
    """What follows the committed lengths that n nodes hang below.

    Args:
        places: [n] of their sessions.
        ends: [n] these lengths.
        lengths: [S] all that is committed.
    """
    since, starts, tokens = lengths.copy(), np.zeros_like(lengths), list[int]()
    np.minimum.at(since, places, ends)
    np.maximum(since, lengths - MOST_PASSED, out=since)
    for place in np.unique(places).tolist():
        if isinstance(mirror := mirrors[place], TreeMirror):
            starts[place] = len(tokens)
            tokens += mirror.token_ids[since[place] : lengths[place]]
    return Passed(*map(entries, (since, starts, np.array(tokens, dtype=np.int64))))


# ------------------------------------------------------------------------------------------------------------ commits


def move_roots(forest: Forest, moves: Moves) -> None:
    """Moves the roots of S trees of one forest along their tokens; every session has at least one."""
    if IS_COMPILED and not forest.mix.is_active:
        forest.follow(moves)
        return
    ways = forest.ways(moves)
    if forest.mix.is_active:
        forest.mix.observe(forest, forest.root[moves.rows], ways.passed, ways.new)
    if IS_COMPILED:
        forest.follow(moves)
    else:
        forest.move_roots(moves, ways)
