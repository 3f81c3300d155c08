"""Tokens committed as a result commits them: the roots of many trees at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.coordinator.forest import Moves
from outrider.coordinator.mirror import TreeMirror, move_roots


@dataclass(frozen=True)
class Commitment:
    """Tokens of one session, which its list has already; `accepted`: slots of the nodes among the first of them."""

    mirror: TreeMirror
    token_ids: Sequence[int]
    accepted: Sequence[int] = ()
    keeps_tree: bool = True


def commit_together(*commitments: Commitment) -> None:
    """Commits of sessions of one forest, each at most once."""
    if not commitments:
        return
    moves = Moves(
        rows=np.array([own.mirror.row for own in commitments]),
        counts=np.array([len(own.token_ids) for own in commitments]),
        tokens=np.concatenate([np.array(own.token_ids, dtype=np.int64) for own in commitments]),
        accepted=np.array([len(own.accepted) for own in commitments]),
        slots=np.concatenate([np.array(own.accepted, dtype=np.int64) for own in commitments]),
        keeps_tree=np.array([own.keeps_tree for own in commitments]),
    )
    move_roots(commitments[0].mirror.forest, moves)
