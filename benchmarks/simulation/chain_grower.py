"""What a fake n-gram worker says: one branch below the root, once a commit."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.tree_grower import GrownRows


@dataclass(kw_only=True)
class _Text:
    key: int
    epoch: int
    length: int
    is_answered: bool = False


class ChainGrower:
    """Branches of all sessions.

    Args:
        model: whose best guesses they are.
        depth: nodes of a branch.
    """

    def __init__(self, model: PathModel, *, depth: int) -> None:
        self._model, self._depth = model, depth
        self._texts: dict[int, _Text] = {}
        self._next_id = 1

    def open(self, session_id: int, *, key: int, epoch: int, length: int) -> None:
        """Begins a session's text."""
        self._texts[session_id] = _Text(key=key, epoch=epoch, length=length)

    def commit(self, session_id: int, *, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """The text goes on.

        Raises:
            ValueError: another length is held than the commit begins at.
        """
        text = self._texts[session_id]
        if text.epoch == epoch:
            if text.length != position:
                raise ValueError(f"session {session_id}: commit at {position}, {text.length} held")
            text.length, text.is_answered = position + len(token_ids), False

    def step(self) -> dict[int, GrownRows]:
        """A branch for each session that had a commit since the last time."""
        grown = {}
        for session_id, text in self._texts.items():
            if not text.is_answered:
                text.is_answered = True
                grown[session_id] = GrownRows(epoch=text.epoch, as_of=text.length, rows=self._branch(text))
        return grown

    def _branch(self, text: _Text) -> list[tuple[int, int, int, float]]:
        rows: list[tuple[int, int, int, float]] = []
        path_hash = None
        for position in range(text.length, text.length + self._depth):
            best = self._model.guesses(text.key, position, path_hash)[0]
            rows.append((self._next_id, self._next_id - 1 if rows else 0, best.token, best.acceptance))
            path_hash = best.path_hash
            self._next_id += 1
        return rows
