"""The shape of the tree that a one-graph round verifies: the same for every session and round, so that it is captured.

    root ─ 1 ─ c + 1 ─ 2c + 1 ...      the best candidate of every level goes on
         ├ 2 ├ c + 2
         └ c └ 2c                      the others end there

`steps` levels of `candidates` nodes each. With one candidate it is a chain; with one step as well it is the smallest
draft there is, two tokens a round at best.

Shapes: n rows of a session (the root and its nodes), k steps, c candidates of a step.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# What one word of a mask holds, the sign left out: root, nodes, and the rows by which the head drafts on.
_MOST_KEYS = 63


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """What every session drafts in a round.

    Attributes:
        steps: k, tokens that a draft reaches ahead.
        candidates: c, tokens that it offers for each of them.

    Raises:
        ValueError: below 1, or more than one mask word holds.
    """

    steps: int = 1
    candidates: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"one_graph_{name}: {getattr(self, name)} given, at least 1 needed")
        if self.slots > _MOST_KEYS:
            raise ValueError(
                f"one_graph_steps, one_graph_candidates: {self.steps} and {self.candidates} given, which take "
                f"{self.slots} keys a session (1 + steps * candidates + steps - 1), at most {_MOST_KEYS} fit"
            )

    @property
    def nodes(self) -> int:
        """Drafted nodes of a session."""
        return self.steps * self.candidates

    @property
    def rows(self) -> int:
        """n, the root and its nodes."""
        return 1 + self.nodes

    @property
    def slots(self) -> int:
        """KV slots of a session in a round: those of its rows, and of the rows by which its head drafts on."""
        return self.rows + self.steps - 1

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """[n - 1] of nodes 1 to n - 1."""
        return tuple(
            1 + (level - 1) * self.candidates if level else 0
            for level in range(self.steps)
            for _ in range(self.candidates)
        )

    @functools.cached_property
    def depths(self) -> npt.NDArray[np.int32]:
        """[n], the root's 0 first."""
        levels = np.repeat(np.arange(1, self.steps + 1, dtype=np.int32), self.candidates)
        return np.concatenate([np.zeros(1, dtype=np.int32), levels])

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """[n] the nodes from below the root to each row's own."""
        paths: list[tuple[int, ...]] = [()]
        for number, parent in enumerate(self.parents, start=1):
            paths.append((*paths[parent], number))
        return tuple(paths)

    @functools.cached_property
    def masks(self) -> npt.NDArray[np.int64]:
        """[n] bit j of row i: node i attends to node j."""
        return np.array([sum(1 << node for node in (0, *path)) for path in self.paths], dtype=np.int64)

    @functools.cached_property
    def first_child(self) -> npt.NDArray[np.int32]:
        """[n], -1 for none."""
        return np.array(
            [
                next((node for node, above in enumerate(self.parents, 1) if above == row), -1)
                for row in range(self.rows)
            ],
            dtype=np.int32,
        )

    @functools.cached_property
    def next_sibling(self) -> npt.NDArray[np.int32]:
        """[n], -1 for none."""
        last = [node % self.candidates == 0 for node in range(self.rows)]
        return np.array([-1 if last[node] else node + 1 for node in range(self.rows)], dtype=np.int32)
