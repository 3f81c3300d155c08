"""What a fake target remembers of its last step, for the batch that follows it."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from outrider.succession import NOTHING_EMITTED, Succession, surviving
from outrider.wire import split_by_counts

Tree = tuple[list[int], list[int]]
"""Tokens and parents."""


class Outcome(NamedTuple):
    """Of one session: `length` before the step, nodes of its tree, the last accepted one and the final token."""

    length: int
    nodes: int
    end: int
    token: int

    @classmethod
    def of(cls, length: int, nodes: int, accepted: Sequence[int], emitted: Sequence[int], *, most: int) -> Self:
        """A walk's; nothing follows it in a session that has `most` tokens by then."""
        if length + len(emitted) >= most:
            return cls(length, nodes, NOTHING_EMITTED, NOTHING_EMITTED)
        return cls(length, nodes, accepted[-1] if accepted else 0, emitted[-1])


class LastStep:
    """The outcomes of the last step, by session and epoch."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._noted: dict[tuple[int, int], Outcome] = {}

    def note(self, session_id: int, epoch: int, outcome: Outcome) -> None:
        """Of the step that runs."""
        self._noted[session_id, epoch] = outcome

    def end(self) -> None:
        """The step that ran is the last one."""
        self._outcomes, self._noted = self._noted, {}

    def trees(self, successor: Succession, session_ids: Sequence[int], epochs: Sequence[int]) -> list[Tree]:
        """What is verified of each session of a batch that follows the last step.

        Args:
            successor: the batch; what it says of the step is not read.
            session_ids: [S]
            epochs: [S]
        """
        known = [self._outcomes.get(key) for key in zip(session_ids, epochs, strict=True)]
        of_step = Succession(
            is_in_step=np.array([outcome is not None for outcome in known], dtype=np.bool_),
            verified=np.array([0 if outcome is None else outcome.nodes for outcome in known], dtype=np.int64),
            counts=successor.counts,
            tokens=successor.tokens,
            parents=successor.parents,
            values=successor.values,
            least_value=successor.least_value,
            max_nodes=successor.max_nodes,
            max_depths=successor.max_depths,
            max_total_nodes=successor.max_total_nodes,
        )
        ends = np.array([NOTHING_EMITTED if outcome is None else outcome.end for outcome in known], dtype=np.int64)
        tokens = np.array([NOTHING_EMITTED if outcome is None else outcome.token for outcome in known], dtype=np.int64)
        survivors = surviving(of_step, ends, tokens)
        chosen, parents = successor.tokens[survivors.nodes].tolist(), survivors.parents.tolist()
        return [(chosen[span], parents[span]) for span in split_by_counts(survivors.counts.tolist())]

    def length(self, session_id: int, epoch: int, now: int) -> int:
        """Committed length that a batch names which follows the last step; `now` where it was not in that."""
        outcome = self._outcomes.get((session_id, epoch))
        return now if outcome is None else outcome.length
