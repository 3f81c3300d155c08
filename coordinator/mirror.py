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
from outrider.coordinator.source_mix import NO_COUNTS, Kind

_NOT_WANTED = -1


@dataclass(slots=True)
class _Worker:
    """A draft worker of a session: the view of its node ids, and the committed length that it knows of."""

    view: int
    as_of: int = 0


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
        self.length = len(token_ids)
        self.row = forest.add_session(token_ids[-1], self.length)
        forest.mix.open(self.row, kind)
        self.source_counts = NO_COUNTS
        """As of `SourceMix.counts`, when the session has ended."""
        self.root_was_drafted = False
        """Whether the root was a node of the tree before it was committed: a draft may be expanding it by now."""
        self.root_was_missed = False
        """Whether its parent had been expanded, and it was none of the children."""
        self._workers: dict[str, _Worker] = {}
        self._complete_at = -1

    def hear(self, worker_id: str, as_of: int, *, complete: bool) -> int:
        """Growth has come: the view its ids are of, or -1 for growth from the future."""
        if as_of > self.length:
            return _NOT_WANTED
        worker = self._workers.get(worker_id)
        if worker is not None and as_of == worker.as_of and not complete:
            return worker.view
        if worker is None:
            worker = self._workers[worker_id] = _Worker(self.forest.add_view())
            self._note_as_of()
        if as_of > worker.as_of:
            worker.as_of = as_of
            self._note_as_of()
        if complete and as_of > self._complete_at:
            self._complete_at = as_of
        return worker.view

    def _note_as_of(self) -> None:
        self.forest.note_as_of(self.row, min((worker.as_of for worker in self._workers.values()), default=None))

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, or opens the session anew: its ids mean nothing any more; its nodes stay."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self.forest.remove_view(worker.view)
            self._note_as_of()

    def close(self) -> None:
        """The session has ended."""
        for worker in self._workers.values():
            self.forest.remove_view(worker.view)
        self._workers.clear()
        if self.forest.mix.is_active:
            self.source_counts = self.forest.mix.counts[self.row].copy()
        self.forest.remove_session(self.row)

    @property
    def is_complete(self) -> bool:
        """Whether some worker has said that the tree of this round is whole (sync mode)."""
        return self._complete_at == self.length


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
    views, rows, lengths = [], [], []
    chains: list[tuple[int, ChainMirror]] = []
    for place, (mirror, as_of, complete) in enumerate(zip(mirrors, growth.as_of, growth.complete, strict=True)):
        if isinstance(mirror, TreeMirror):
            views.append(mirror.hear(worker_id, as_of, complete=complete))
            rows.append(mirror.row)
            lengths.append(mirror.length)
            continue
        if mirror is not None:
            chains.append((place, mirror))
        views.append(_NOT_WANTED)
        rows.append(0)
        lengths.append(0)
    forest = next((mirror.forest for mirror in mirrors if isinstance(mirror, TreeMirror)), None)
    grafted = [0] * len(mirrors)
    if forest is not None:
        grafted = _graft_trees(forest, _nodes(growth, views), mirrors, np.array(rows), np.array(lengths)).tolist()
    for place, chain in chains:
        grafted[place] = chain.graft(worker_id, growth.of_session(place))
    return grafted


def _nodes(growth: GrowthBatch, views: Sequence[int]) -> _Nodes:
    place = np.repeat(np.arange(len(views)), growth.node_counts)
    view = np.array(views)[place]
    nodes = _Nodes(
        place=place,
        view=view,
        as_of=np.array(growth.as_of)[place],
        node_id=growth.node_ids,
        parent=growth.parents,
        token=growth.tokens,
        acceptance=growth.acceptance,
        source=growth.sources,
    )
    return nodes if min(views) >= 0 else nodes.only(view >= 0)


def _graft_trees(
    forest: Forest, nodes: _Nodes, mirrors: Sequence[Mirror | None], rows: Ints, lengths: Ints
) -> npt.NDArray[np.integer]:
    counts = np.zeros(len(mirrors), dtype=np.int64)
    # What comes a second time is dropped.
    if (known := forest.find(nodes.view, nodes.node_id) >= 0).any():
        nodes = nodes.only(~known)
    # A parent stands before its children, be it in the same message: then they are found the next time round.
    while len(nodes.place):
        slots = forest.find(nodes.view, nodes.parent)
        length = lengths[nodes.place]
        # Of parents that are committed, the length they end; of tree nodes 0.
        at = np.where(nodes.parent == 0, nodes.as_of, np.where(slots >= 0, forest.length[slots], 0))
        slots = np.where(at == length, forest.root[rows[nodes.place]], slots)
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
        length = mirror.length
        if known:
            passed += accepted
            passed_lengths += range(length + 1, length + 1 + known)
        mirror.length = length = length + count
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
    for mirror, slot, was_expanded in zip(mirrors, slots.tolist(), forest.has_children[reached].tolist(), strict=True):
        mirror.root_was_drafted = was_drafted = slot >= 0
        mirror.root_was_missed = was_expanded and not was_drafted
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
