"""The batch that is sent ahead: growth below the trees of a step that still runs, for whatever its outcome is.

Once the outcome is known, what of it hangs below the emitted tokens is the next step's tree. The target finds that when
the step ends and goes on at once, the coordinator finds the same when the result has come (`outrider.succession`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.coordinator.candidates import candidates
from outrider.coordinator.forest import Forest
from outrider.coordinator.group import Bools, Group
from outrider.coordinator.messages import SessionVerdict
from outrider.coordinator.rows import Ints
from outrider.coordinator.trees import Trees
from outrider.coordinator.verdicts import Verdicts
from outrider.succession import NOTHING_EMITTED, Succession, surviving

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Flight

# Nodes that are sent of one session, and of all together: what is cut is the least likely to be reached.
_MOST_SENT, _MOST_SENT_TOGETHER = 64, 4096


class _Nodes(NamedTuple):
    """[N] each, session by session; `places` are the sessions'."""

    slots: Ints
    places: Ints
    tokens: Ints
    parents: Ints
    values: npt.NDArray[np.float32]


_NO_INTS = np.zeros(0, dtype=np.int64)
_NONE = _Nodes(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.zeros(0, dtype=np.float32))


class Successor:
    """A batch that follows a step; S sessions, N nodes.

    Attributes:
        group: the sessions.
        epochs: [S]
        lengths: [S] committed tokens, before the step's result.
        succession: what is sent.
        slots: [N] where the forest has each node.
    """

    def __init__(self, group: Group, succession: Succession, slots: Ints) -> None:
        self.group, self.succession, self.slots = group, succession, slots
        self.epochs = [session.target_epoch for session in group.sessions]
        self.lengths = group.states.length[group.rows].tolist()

    def trees(self, forest: Forest | None, ends: Ints, tokens: Ints) -> Trees:
        """What is verified, once the step's roots have moved; `ends` and `tokens` as `outcomes` gives them."""
        if forest is None or not len(self.slots):
            return Trees.empty(len(self.group))
        survivors = surviving(self.succession, ends, tokens)
        slots = self.slots[survivors.nodes]
        return Trees(
            counts=survivors.counts,
            slots=slots,
            tokens=self.succession.tokens[survivors.nodes].tolist(),
            parents=survivors.parents.tolist(),
            values=forest.value[slots],
        )

    def outcomes(self, verdicts: Sequence[SessionVerdict]) -> tuple[Ints, Ints]:
        """[S] last accepted node and [S] final token of each session, as the target has them.

        A session that has ended here alone (cancelled, a stop string) goes on there, and takes its part of what all
        sessions together may have.

        Args:
            verdicts: all of the step.
        """
        ends, tokens = np.full(len(self.group), NOTHING_EMITTED), np.full(len(self.group), NOTHING_EMITTED)
        columns = Verdicts.of(verdicts)
        for session_id, accepted, token_ids in zip(
            columns.session_ids, columns.accepted, columns.token_ids, strict=True
        ):
            place = self.group.places.get(session_id)
            if place is None or not token_ids or self._is_last(place, token_ids):
                continue
            ends[place] = accepted[-1] if accepted else 0
            tokens[place] = token_ids[-1]
        return ends, tokens

    def _is_last(self, place: int, token_ids: Sequence[int]) -> bool:
        """Whether the target, too, ends the session with these."""
        session = self.group.sessions[place]
        return token_ids[-1] in session.stop_ids or self.lengths[place] + len(token_ids) >= session.end


def can_follow(group: Group) -> bool:
    """Whether a batch of these sessions may be sent ahead: none has a chain, or a tree that is grown after a result."""
    return not group.chains and not group.is_sync.any()


def succeed(
    flight: "Flight", group: Group, *, max_tree_nodes: int, max_total_nodes: int, least_value: float
) -> Successor:
    """The batch that follows a flight.

    Args:
        flight: a batch that the target has not answered yet.
        group: sessions of it that may go on, and others, which begin with their root alone.
        max_tree_nodes: most nodes of a session in a step.
        max_total_nodes: most of all sessions.
        least_value: path value that pays for a node's row.
    """
    is_in_step = np.array([session.flight is flight for session in group.sessions], dtype=np.bool_)
    own = [flight.group.places[session.session_id] for session in group.sessions if session.flight is flight]
    verified = np.zeros(len(group), dtype=np.int64)
    verified[is_in_step] = flight.trees.counts[own]
    most = np.where(is_in_step, group.reaches(max_tree_nodes)[0], 0)
    nodes = _NONE
    if group.forest is not None and most.any():
        number = _numbers(group.forest, flight.trees, own)
        nodes = _below(group, group.forest, number, verified, most)
    succession = Succession(
        is_in_step=is_in_step,
        verified=verified,
        counts=np.bincount(nodes.places, minlength=len(group)),
        tokens=nodes.tokens,
        parents=nodes.parents,
        values=nodes.values,
        least_value=float(np.float32(least_value)),
        max_nodes=most,
        max_depths=group.most_depth,
        max_total_nodes=max_total_nodes,
    )
    return Successor(group, succession, nodes.slots)


def _numbers(forest: Forest, trees: Trees, own: Sequence[int]) -> Ints:
    """Of each slot the number of its node among those that are verified now; 0 where it is none, and of roots.

    Args:
        own: places of the sessions that are followed. Others may have ended, and their slots be others' by now.
    """
    is_followed = np.zeros(len(trees), dtype=np.bool_)
    is_followed[list(own)] = True
    number = np.zeros(len(forest.row), dtype=np.int64)
    number[trees.slots[np.repeat(is_followed, trees.counts)]] = _count_up(trees.counts[is_followed])
    return number


def _below(group: Group, forest: Forest, number: Ints, verified: Ints, most: Ints) -> _Nodes:
    """The nodes that are sent; `number` gets theirs."""
    # As deep as the new tree may go, below the deepest of the nodes that are verified now.
    room = group.ends - 1 - group.states.length[group.rows]
    reach = np.where(most > 0, np.minimum(2 * group.most_depth + 1, room), 0)
    wanted = np.where(most > 0, verified + _MOST_SENT, 0)
    found = candidates(group.mirrors, most=wanted.tolist(), deepest=reach.tolist())
    is_new = number[found.slots] == 0
    slots, places = found.slots[is_new], found.places[is_new]
    above = forest.parent[slots]
    # A new root is of use only with something below it.
    has_children = np.zeros(len(forest.row), dtype=np.bool_)
    has_children[above] = True
    is_new_root = (number[above] > 0) | (forest.depth[above] == 0)
    kept = _best(forest.value[slots], ~is_new_root | has_children[slots])
    slots, places = slots[kept], places[kept]
    number[slots] = _count_up(np.bincount(places, minlength=len(group))) + verified[places]
    parents = number[forest.parent[slots]]
    return _Nodes(slots, places, forest.token[slots], parents, forest.value[slots].astype(np.float32))


def _best(values: np.ndarray, kept: Bools) -> Bools:
    """[n] which of those that are kept are among the best of all sessions; of equal ones the first."""
    if np.count_nonzero(kept) <= _MOST_SENT_TOGETHER:
        return kept
    best = np.zeros(len(values), dtype=np.bool_)
    best[np.argsort(np.where(kept, -values, 1.0), kind="stable")[:_MOST_SENT_TOGETHER]] = True
    return best


def _count_up(counts: Ints) -> Ints:
    """1, 2, ... so many, for each."""
    return np.arange(1, int(counts.sum()) + 1) - np.repeat(np.cumsum(counts) - counts, counts)
