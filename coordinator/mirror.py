"""The coordinator's copies of the sessions' token trees, merged from the growth of any number of draft workers.

A draft and its mirror are out of step by a network's delay: growth arrives that was made before the draft knew of the
last commits. `as_of` says which committed length the draft had applied; growth that descends from what was committed
since is grafted, the rest is dropped.

A message of growth is grafted as a whole, and a result's commits are applied as a whole: the trees of all sessions are
columns of one forest. Chains (rejection) are lists, and taken one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.forest import Floats, Forest, Ints
from outrider.coordinator.messages import GrowthBatch
from outrider.coordinator.source_mix import Kind

_NOT_WANTED = -1


class TreeMirror:
    """One session's tree: its row of the forest, and what its workers know.

    Args:
        token_ids: the session's committed tokens, prompt and output; the mirror reads this list, and `commit` is called
            after tokens were appended to it.
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


class Commitment(NamedTuple):
    """Tokens that one session has committed: appended to its list already.

    Attributes:
        accepted: slots of the drafted nodes among the first of them, as they were submitted.
        keeps_tree: whether what hangs below them is of use (not in sync mode, which grows every tree afresh).
    """

    mirror: Mirror
    token_ids: Sequence[int]
    accepted: Sequence[int] = ()
    keeps_tree: bool = True


# ------------------------------------------------------------------------------------------------------------- growth


@dataclass(slots=True)
class _Nodes:
    """Growth that is to be grafted, a row a node; `place` is the session's in the message."""

    place: Ints
    view: Ints
    as_of: Ints
    node_id: Ints
    parent: Ints
    token: Ints
    acceptance: Floats
    source: Ints | None
    """None: all are a model's."""

    def only(self, which: np.ndarray) -> "_Nodes":
        columns: list[Any] = [None if (own := getattr(self, name)) is None else own[which] for name in self.__slots__]
        return _Nodes(*columns)


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
        nodes = _nodes(growth, views, as_of)
        if not forest.views.are_new(worker_id, rows.take(nodes.place), nodes.node_id):
            # What comes a second time is dropped.
            nodes = nodes.only(forest.find(nodes.view, nodes.node_id) < 0)
        grafted = _graft_trees(forest, nodes, mirrors, rows).tolist()
    for place, mirror in enumerate(mirrors):
        if isinstance(mirror, ChainMirror):
            grafted[place] = mirror.graft(worker_id, growth.of_session(place))
    return grafted


def _nodes(growth: GrowthBatch, views: Ints, as_of: Ints) -> _Nodes:
    place = np.repeat(np.arange(len(views)), growth.node_counts)
    view = views[place]
    nodes = _Nodes(
        place=place,
        view=view,
        as_of=as_of[place],
        node_id=growth.node_ids,
        parent=growth.parents,
        token=growth.tokens,
        acceptance=growth.acceptance,
        source=growth.sources,
    )
    return nodes if views.min() >= 0 else nodes.only(view >= 0)


def _graft_trees(
    forest: Forest, nodes: _Nodes, mirrors: Sequence[Mirror | None], rows: Ints
) -> npt.NDArray[np.integer]:
    counts = np.zeros(len(mirrors), dtype=np.int64)
    lengths, roots = forest.rows.length.take(rows), forest.root.take(rows)
    # A parent stands before its children, be it in the same message: then they are found the next time round.
    while len(nodes.place):
        slots = forest.find(nodes.view, nodes.parent)
        if slots.min() >= 0 and not forest.length.take(slots).any():
            # Tree nodes all of them, as it mostly is.
            counts += _grow(forest, nodes, slots, len(counts))
            break
        length = lengths[nodes.place]
        # Of parents that are committed, the length they end; of tree nodes 0.
        at = np.where(nodes.parent == 0, nodes.as_of, np.where(slots >= 0, forest.length[slots], 0))
        slots = np.where(at == length, roots[nodes.place], slots)
        alive = (slots >= 0) & ((at == 0) | (at == length))
        if alive.all():
            grown, rest = nodes, None
        else:
            grown, rest = nodes.only(alive), ~alive
            slots = slots[alive]
        if len(slots):
            counts += _grow(forest, grown, slots, len(counts))
        if rest is None:
            break
        passed = (at > 0) & (at < length)
        if passed.any():
            _pass_by(forest, nodes.only(passed), at[passed], mirrors, counts)
            rest &= ~passed
        elif not len(slots):
            break
        nodes = nodes.only(rest)
    return counts


def _grow(forest: Forest, nodes: _Nodes, parents: Ints, sessions: int) -> npt.NDArray[np.integer]:
    """Adds and names nodes whose parents are there; [S] how many of each session."""
    forest.name(nodes.view, nodes.node_id, _add(forest, nodes=nodes, parents=parents))
    return np.bincount(nodes.place, minlength=sessions)


def _add(forest: Forest, parents: Ints, nodes: _Nodes) -> Ints:
    if nodes.source is None and not forest.mix.is_active:
        return forest.add(parents, nodes.token, nodes.acceptance)
    if nodes.source is not None:
        forest.mix.note_drafted(forest.row[parents], nodes.source)
    return forest.mix.add(forest, parents, nodes.token, nodes.acceptance, nodes.source)


def _pass_by(forest: Forest, nodes: _Nodes, at: Ints, mirrors: Sequence[Mirror | None], counts: Ints) -> None:
    """Growth below a committed token that is not the last one: it is the token that was committed there, or dead."""
    for number, (place, token, length) in enumerate(
        zip(nodes.place.tolist(), nodes.token.tolist(), at.tolist(), strict=True)
    ):
        mirror = mirrors[place]
        assert isinstance(mirror, TreeMirror)
        if mirror.token_ids[length] != token:
            continue
        slot = forest.pass_by(mirror.row, token, length + 1)
        forest.name(nodes.view[number : number + 1], nodes.node_id[number : number + 1], np.array([slot]))
        counts[place] += 1
        if nodes.source is not None:
            forest.mix.note_drafted(np.array([mirror.row]), nodes.source[number : number + 1])


# ------------------------------------------------------------------------------------------------------------ commits


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Tokens that S sessions have committed, each once: appended to their lists already.

    Attributes:
        rows: [S] of the forest.
        counts: [S] tokens of each.
        tokens: [T] session by session.
        accepted: [S] how many of them were submitted nodes, the first ones.
        slots: [A] of these nodes.
        keeps_tree: [S] as of `Commitment`.
    """

    rows: Ints
    counts: Ints
    tokens: Ints
    accepted: Ints
    slots: Ints
    keeps_tree: npt.NDArray[np.bool_]

    def only(self, which: npt.NDArray[np.bool_]) -> "Moves":
        """Those of some of the sessions."""
        return Moves(
            rows=self.rows[which],
            counts=self.counts[which],
            tokens=self.tokens[np.repeat(which, self.counts)],
            accepted=self.accepted[which],
            slots=self.slots[np.repeat(which, self.accepted)],
            keeps_tree=self.keeps_tree[which],
        )


def commit(commitments: Sequence[Commitment]) -> None:
    """Moves the roots of all these sessions, each at most once, along their tokens."""
    of_trees: list[tuple[TreeMirror, Sequence[int], Sequence[int], bool]] = []
    for mirror, token_ids, accepted, keeps_tree in commitments:
        if isinstance(mirror, ChainMirror):
            mirror.commit(token_ids, keeps_chain=keeps_tree)
        elif token_ids:
            of_trees.append((mirror, token_ids, accepted[: len(token_ids)], keeps_tree))
    if not of_trees:
        return
    mirrors, tokens, accepted, keeps_tree = zip(*of_trees, strict=True)
    moves = Moves(
        rows=np.array([mirror.row for mirror in mirrors]),
        counts=np.array(list(map(len, tokens))),
        tokens=np.concatenate([np.array(own, dtype=np.int64) for own in tokens]),
        accepted=np.array(list(map(len, accepted))),
        slots=np.concatenate([np.array(own, dtype=np.int64) for own in accepted]),
        keeps_tree=np.array(keeps_tree),
    )
    move_roots(mirrors[0].forest, moves)


def move_roots(forest: Forest, moves: Moves) -> None:
    """Moves the roots of S trees of one forest along their tokens; every session has at least one."""
    rows, counts, accepted = moves.rows, moves.counts, moves.accepted
    ends = np.cumsum(counts)
    lengths = forest.rows.length[rows] + counts
    slots = forest.root[rows]
    have = np.flatnonzero(accepted)
    slots[have] = moves.slots[np.cumsum(accepted)[have] - 1]
    passed, passed_lengths = [moves.slots], [_numbered(lengths - counts + 1, accepted)]
    reached, tails = slots.copy(), counts - accepted
    # The token behind the accepted ones may have a node too, which was not submitted or has come meanwhile.
    for depth in range(int(tails.max())):
        going = np.flatnonzero((tails > depth) & (slots >= 0))
        if not len(going):
            break
        at = ends[going] - tails[going] + depth
        found = slots[going] = forest.child(rows[going], slots[going], moves.tokens[at])
        going, found = going[found >= 0], found[found >= 0]
        reached[going] = found
        passed.append(found)
        passed_lengths.append(lengths[going] - tails[going] + depth + 1)
    all_passed = np.concatenate(passed)
    if forest.mix.is_active:
        forest.mix.observe(forest, forest.root[rows], all_passed, slots)
    was_drafted = slots >= 0
    forest.rows.was_drafted[rows] = was_drafted
    forest.rows.was_missed[rows] = forest.has_children[reached] & ~was_drafted
    slots[~moves.keeps_tree] = -1
    forest.move_roots(
        rows, slots, moves.tokens[ends - 1], lengths, passed=all_passed, passed_lengths=np.concatenate(passed_lengths)
    )


def _numbered(firsts: Ints, counts: Ints) -> Ints:
    """first, first + 1, ... so many times, for each."""
    return np.arange(int(counts.sum())) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
