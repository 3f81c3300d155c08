"""The batch that is sent ahead: growth below the trees of a step that still runs, for whatever its outcome is.

Once the outcome is known, what of it hangs below the emitted tokens is the next step's tree. The target finds that when
the step ends and goes on at once, the coordinator finds the same when the result has come (`outrider.succession`). What
grows after it has left is sent behind it, for as long as the step runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.coordinator.candidates import reaching_candidates
from outrider.coordinator.forest import Forest
from outrider.coordinator.group import Bools, Group
from outrider.coordinator.messages import SessionVerdict
from outrider.coordinator.rows import Ints
from outrider.coordinator.successor_kernels import number_new
from outrider.coordinator.trees import Trees
from outrider.coordinator.verdicts import Verdicts
from outrider.succession import NOTHING_EMITTED, Addition, Succession, extended, surviving

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Flight

# Nodes that are sent of one session, and of all together: what is cut is the least likely to be reached.
_MOST_SENT, _MOST_SENT_TOGETHER = 64, 4096
# Of few sessions more of each: whatever the outcome is, there is more of a tree below it.
_MOST_SENT_ALONE, _MOST_SENT_OF_FEW = 256, 1024


class _Nodes(NamedTuple):
    """[S] nodes of each session, and [N] slots, tokens, parents' numbers and float32 path values."""

    counts: Ints
    slots: Ints
    tokens: Ints
    parents: Ints
    values: npt.NDArray[np.float32]


class _Numbers:
    """Of the forest's slots, what a target knows their nodes by: the step's, and what was sent after it.

    A slot may be freed and be another node's while the step runs: that has another serial.

    Args:
        group: the sessions.
        forest: of their trees.
        verified: [S] nodes that the step verifies.
        slots: [m] where the forest has them.
        numbers: [m] theirs.
    """

    def __init__(self, group: Group, forest: Forest, verified: Ints, slots: Ints, numbers: Ints) -> None:
        self._group, self._forest, self._verified = group, forest, verified
        size = len(forest.row)
        self._number, self._serial = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._value = np.ones(size, dtype=np.float32)
        self._number[slots], self._serial[slots] = numbers, forest.serial[slots]
        # As deep as the new tree may go, below the deepest of the nodes that are verified now.
        room = group.ends - 1 - group.states.length[group.rows]
        self._deepest, self._most = np.minimum(2 * group.most_depth + 1, room), verified + _most_sent(len(group))

    def new(self, sent: Ints, goes_on: Bools) -> _Nodes:
        """Gives the best nodes numbers that have none.

        Args:
            sent: [S] nodes that were sent before.
            goes_on: [S] whether the session may get some.
        """
        if more := len(self._forest.row) - len(self._number):
            self._number, self._serial = np.pad(self._number, (0, more)), np.pad(self._serial, (0, more))
            self._value = np.pad(self._value, (0, more), constant_values=1.0)
        found = reaching_candidates(self._group, self._most * goes_on, self._deepest * goes_on)
        columns = self._forest.columns(0)
        known = self._number, self._serial, self._value
        return _Nodes(
            *number_new(columns, found.starts, found.slots, *known, self._verified, sent, _MOST_SENT_TOGETHER)
        )


class Successor:
    """A batch that follows a step; S sessions, N nodes.

    Attributes:
        group: the sessions.
        epochs: [S]
        lengths: [S] committed tokens, before the step's result.
        succession: what was sent first.
        additions: what was sent after it.
    """

    def __init__(self, group: Group, succession: Succession, slots: Ints, numbers: _Numbers | None) -> None:
        self.group, self.succession = group, succession
        self.epochs = [session.target_epoch for session in group.sessions]
        self.lengths = group.states.length[group.rows].tolist()
        self.additions: list[Addition] = []
        self._numbers, self._slots, self._counts = numbers, [slots], succession.counts

    def grown(self, additions: int) -> tuple[Succession, Ints]:
        """What was sent with so many additions, and [N] where the forest has each node of it."""
        if not additions:
            return self.succession, self._slots[0]
        grown, order = extended(self.succession, self.additions[:additions])
        return grown, np.concatenate(self._slots[: additions + 1])[order]

    def grow(self, flight: "Flight") -> Addition | None:
        """What has grown below the step's trees since the last time, to be sent; None where there is nothing.

        Args:
            flight: the batch that is followed, which the target has not answered yet.
        """
        if self._numbers is None:
            return None
        goes_on = [session.flight is flight and not session.is_finished for session in self.group.sessions]
        nodes = self._numbers.new(self._counts, np.array(goes_on, dtype=np.bool_) & (self.succession.max_nodes > 0))
        if not len(nodes.slots):
            return None
        more = Addition(nodes.counts, nodes.tokens, nodes.parents, nodes.values)
        self.additions.append(more)
        self._slots.append(nodes.slots)
        self._counts = self._counts + nodes.counts
        return more

    def trees(self, forest: Forest | None, ends: Ints, tokens: Ints, additions: int = 0) -> Trees:
        """What is verified, once the step's roots have moved.

        Args:
            forest: of the sessions.
            ends: [S] as of `outcomes`.
            tokens: [S] as of `outcomes`.
            additions: that the target had got when the step ended.
        """
        sent, slots = self.grown(additions)
        if forest is None or not len(slots):
            return Trees.empty(len(self.group))
        survivors = surviving(sent, ends, tokens)
        slots = slots[survivors.nodes]
        return Trees(
            counts=survivors.counts,
            slots=slots,
            tokens=sent.tokens[survivors.nodes].tolist(),
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
    none, nothing = np.zeros(len(group), dtype=np.int64), np.zeros(0, dtype=np.int64)
    nodes, numbers = _Nodes(none, nothing, nothing, nothing, np.zeros(0, dtype=np.float32)), None
    if group.forest is not None and most.any():
        # Others may have ended, and their slots be others' by now.
        is_followed = np.zeros(len(flight.trees), dtype=np.bool_)
        is_followed[own] = True
        slots = flight.trees.slots[np.repeat(is_followed, flight.trees.counts)]
        numbers = _Numbers(group, group.forest, verified, slots, _count_up(flight.trees.counts[is_followed]))
        nodes = numbers.new(none, most > 0)
    succession = Succession(
        is_in_step=is_in_step,
        verified=verified,
        counts=nodes.counts,
        tokens=nodes.tokens,
        parents=nodes.parents,
        values=nodes.values,
        least_value=float(np.float32(least_value)),
        max_nodes=most,
        max_depths=group.most_depth,
        max_total_nodes=max_total_nodes,
    )
    return Successor(group, succession, nodes.slots, numbers)


def _most_sent(sessions: int) -> int:
    """Nodes that are sent of each of so many sessions."""
    return max(_MOST_SENT, min(_MOST_SENT_ALONE, _MOST_SENT_OF_FEW // max(sessions, 1)))


def _count_up(counts: Ints) -> Ints:
    """1, 2, ... so many, for each."""
    return np.arange(1, int(counts.sum()) + 1) - np.repeat(np.cumsum(counts) - counts, counts)
