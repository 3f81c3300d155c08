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
        submitted: slots of all the nodes that were submitted.
    """

    mirror: Mirror
    token_ids: Sequence[int]
    accepted: Sequence[int] = ()
    keeps_tree: bool = True
    submitted: Sequence[int] = ()


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
        grafted = _graft_trees(forest, _nodes(growth, views, as_of), mirrors, rows).tolist()
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
    # What comes a second time is dropped.
    if (known := forest.find(nodes.view, nodes.node_id) >= 0).any():
        nodes = nodes.only(~known)
    # A parent stands before its children, be it in the same message: then they are found the next time round.
    while len(nodes.place):
        slots = forest.find(nodes.view, nodes.parent)
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
            made = _add(forest, slots, grown)
            forest.name(grown.view, grown.node_id, made)
            counts += np.bincount(grown.place, minlength=len(counts))
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


def note_round(commitments: Sequence[Commitment]) -> None:
    """Counts what was verified by its sources; before anything of it is committed, sessions that end included."""
    forest = next((mirror.forest for mirror, *_ in commitments if isinstance(mirror, TreeMirror)), None)
    if forest is None or not forest.mix.is_active:
        return
    submitted = [slot for commitment in commitments for slot in commitment.submitted]
    accepted = [slot for commitment in commitments for slot in commitment.accepted[: len(commitment.token_ids)]]
    forest.mix.note_round(forest, np.array(submitted, dtype=np.int64), np.array(accepted, dtype=np.int64))


def commit(commitments: Sequence[Commitment]) -> None:
    """Moves the roots of all these sessions, each at most once, along their tokens."""
    moves: list[_Move] = []
    passed: list[int] = []
    passed_lengths: list[int] = []
    for mirror, token_ids, accepted, keeps_tree, _ in commitments:
        if isinstance(mirror, ChainMirror):
            mirror.commit(token_ids, keeps_chain=keeps_tree)
            continue
        count, known = len(token_ids), len(accepted)
        if known > count:
            accepted, known = accepted[:count], count  # noqa: PLW2901 - more than is committed is of no use
        length = len(mirror.token_ids) - count
        if known:
            passed += accepted
            passed_lengths += range(length + 1, length + 1 + known)
        length += count
        if count:
            slot = accepted[-1] if known else _ROOT
            moves.append((mirror, mirror.row, slot, token_ids[-1], length, token_ids[known:], keeps_tree))
    if moves:
        _move_roots(moves, passed, passed_lengths)


# Mirror, row, slot of the last accepted node, last token, length, tokens behind that node, whether the tree is kept.
_Move = tuple[TreeMirror, int, int, int, int, Sequence[int], bool]
_ROOT = -2


def _move_roots(moves: Sequence[_Move], passed: list[int], passed_lengths: list[int]) -> None:
    mirrors, rows_, slots_, tokens, lengths, tails, keep_trees = zip(*moves, strict=True)
    forest = mirrors[0].forest
    rows, slots = np.array(rows_), np.array(slots_)
    slots = np.where(slots == _ROOT, forest.root[rows], slots)
    reached = slots.copy()
    # The token behind the accepted ones may have a node too, which was not submitted or has come meanwhile.
    for depth in range(max(map(len, tails))):
        going = [
            n for n, (tail, slot) in enumerate(zip(tails, slots.tolist(), strict=True)) if tail[depth:] and slot >= 0
        ]
        if not going:
            break
        found = forest.child(rows[going], slots[going], np.array([tails[n][depth] for n in going]))
        slots[going] = found
        for n, slot in zip(going, found.tolist(), strict=True):
            if slot >= 0:
                reached[n] = slot
                passed.append(slot)
                passed_lengths.append(lengths[n] - len(tails[n]) + depth + 1)
    if forest.mix.is_active:
        forest.mix.observe(forest, forest.root[rows], np.array(passed, dtype=np.int64), slots)
    was_drafted = slots >= 0
    forest.rows.was_drafted[rows] = was_drafted
    forest.rows.was_missed[rows] = forest.has_children[reached] & ~was_drafted
    if not all(keep_trees):
        slots[np.logical_not(keep_trees)] = -1
    forest.move_roots(
        rows,
        slots,
        np.array(tokens),
        np.array(lengths),
        passed=np.array(passed, dtype=np.int64),
        passed_lengths=np.array(passed_lengths, dtype=np.int64),
    )
