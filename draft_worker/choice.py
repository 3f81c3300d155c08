"""The children of a step's nodes: the k best under log q + G, with the target's noise and the target's processors.

Shapes: R rows of logits, one an expanded node; V vocabulary size; k children.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.draft_worker.calibration import AcceptanceCalibration
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.row_processors import has_processors, processor_batch
from outrider.draft_worker.session import DraftSession
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.processors import apply_processors

Rows = Sequence[tuple[DraftSession, DraftNode]]


class ChildChooser:
    """Chooses children and estimates how likely the target accepts them.

    Args:
        calibration: gives the estimates.
        branching: children of a node.
        vocab_size: V.
    """

    def __init__(self, calibration: AcceptanceCalibration, *, branching: int, vocab_size: int) -> None:
        self._calibration = calibration
        self._branching = min(branching, vocab_size)
        # The best child's estimate needs the second's score, whether or not that becomes a node.
        self._scored = min(max(branching, 2), vocab_size)

    def choose(
        self, rows: Rows, logits: torch.Tensor
    ) -> tuple[list[list[int]], npt.NDArray[np.int64], list[list[float]]]:
        """The children of R nodes.

        Args:
            rows: [R] the nodes, each with its session.
            logits: [R, V] float32; may be changed.

        Returns:
            tokens [R, k] best first, -1 past the last that may be chosen; calibration buckets [R, k]; estimates [R, k].
        """
        if any(has_processors(session.sampling) for session, _ in rows):
            logits = logits.clone()  # not ours to change, and made under inference mode
            apply_processors(logits, processor_batch(rows, logits.device))
        columns = _SamplingColumns(rows, logits.device)
        found = coupled_topk_scored(
            logits,
            columns.seeds,
            columns.positions,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            choice_index=columns.choice_index,
            k=self._scored,
        )
        tokens, log_q, scores = (column.cpu().numpy() for column in found)
        buckets = self._calibration.buckets(log_q, scores, columns.host_temperature)[:, : self._branching]
        learned = True
        if any(session.is_sync for session, _ in rows):
            learned = np.array([not session.is_sync for session, _ in rows])
        acceptance = self._calibration.estimate(buckets, learned)
        return tokens[:, : self._branching].tolist(), buckets, acceptance.tolist()


class _SamplingColumns:
    """Sampling parameters of R rows as tensors."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        specs = [session.sampling for session, _ in rows]
        self._specs = specs
        self._device = device
        self.host_temperature = np.array([spec.temperature for spec in specs], dtype=np.float32)
        self.temperature = self._put(self.host_temperature)
        self.positions = self._ints([node.position + 1 for _, node in rows])
        self.seeds = self._put(np.array([spec.seed for spec in specs], dtype=np.uint64).view(np.int64))
        self.top_k = self._ints([spec.top_k for spec in specs])
        self.top_p = self._floats([spec.top_p for spec in specs])
        self.min_p = self._floats([spec.min_p for spec in specs])
        self.choice_index = self._ints([spec.choice_index for spec in specs])

    def _ints(self, values: list[int]) -> torch.Tensor:
        return self._put(np.array(values, dtype=np.int64))

    def _floats(self, values: list[float]) -> torch.Tensor:
        return self._put(np.array(values, dtype=np.float32))

    def _put(self, column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device, non_blocking=True)
