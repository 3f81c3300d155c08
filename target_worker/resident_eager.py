"""Drafting one operator after the other, beside a target that runs as transformers' code.

Shapes: T rows of the target that sessions keep, S sessions that grow, N hidden, k children.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.batch import BatchBuilder
from outrider.engine.model_runner import ModelRunner
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.resident_head import HeadLayer, Kept, TreeLevels
from outrider.target_worker.resident_trees import grow_trees, own_bits
from outrider.target_worker.sessions import Session


class EagerDraft:
    """A head beside a target.

    Args:
        layer: the head.
        runner: the target, whose layers are tapped.
        ranker: ranks children.
        config: of the trees.
    """

    def __init__(self, layer: HeadLayer, runner: ModelRunner, ranker: CandidateRanker, config: ResidentConfig) -> None:
        self._layer, self._runner, self._ranker, self._config = layer, runner, ranker, config
        self._bits = own_bits(config.depth, ranker.top_k, runner.device)

    def warm_up(self) -> None:
        """Nothing is compiled or captured."""

    def run(self, kept: Sequence[Kept]) -> npt.NDArray[np.int32]:
        """As of `DraftRounds.run`."""
        lasts = np.cumsum([len(part.rows) for part in kept]) - 1
        return self._grow([part.session for part in kept], self._extend(kept).index_select(0, self._put(lasts)))

    def _extend(self, kept: Sequence[Kept]) -> torch.Tensor:
        """The head over what sessions keep, session after session; its rows [T, N]. All have some."""
        builder = BatchBuilder()
        rows: list[int] = []
        for part in kept:
            builder.add_chain(part.session.row, part.tokens, part.first_index, want_last_logits=False)
            rows.extend(part.rows)
        batch = builder.build()
        step = self._runner.attention_step(batch)
        features = self._runner.features.index_select(0, self._put(np.array(rows, dtype=np.int64)))
        assert step.batch.positions is not None
        return self._layer.forward(
            self._layer.head.fuse(features),
            self._put(batch.token_ids),
            positions=step.batch.positions,
            write_slots=step.write_slots,
            batch=step.batch,
        )

    def _grow(self, sessions: Sequence[Session], hidden: torch.Tensor) -> npt.NDArray[np.int32]:
        """A tree of each session, [S, words] of `CandidateTrees.of`.

        Args:
            sessions: their tree slots are reserved behind their own.
            hidden: [S, N] the head's at the end of each.
        """
        slots = self._runner.slots
        roots = np.array([session.root_index for session in sessions], dtype=np.int32)
        rows = np.array([session.row for session in sessions])
        nodes = np.arange(self._config.tree_slots(self._ranker.top_k))
        most = int(roots.max()) + len(nodes)
        tree_slots = slots.table[rows[:, None], roots[:, None] + nodes].astype(np.int64)
        levels = TreeLevels(
            self._layer,
            self._put(slots.table[rows, :most]),
            self._put(roots),
            self._put(tree_slots),
            top_k=self._ranker.top_k,
        )
        packed = grow_trees(
            self._layer.head,
            levels.step,
            self._ranker,
            RankedSessions.of(sessions, self._runner.device),
            hidden,
            depth=self._config.depth,
            top_k=self._ranker.top_k,
            bits=self._bits,
        )
        return packed.cpu().numpy()

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._runner.device, non_blocking=True)
