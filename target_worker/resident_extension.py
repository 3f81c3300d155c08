"""Extends a draft head's KV by what sessions keep of a forward, where nothing is drafted from these rows.

    features of the kept rows -> fuse -> keys and values into the rows' slots

A head is one layer, so what it stores for a row follows from the target's hidden state there and from the token behind
it: no row sees another, and there is nothing to attend. So rows of all sessions are alike, and the kernels that they
need follow from how many they are: prompts, sessions that do not grow and long accepted paths in one.

Rows are filled up to few sizes, each of which is a CUDA graph on a GPU. What fills a size up stores nothing.

Shapes: R rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StepBuffers
from outrider.target_worker.resident_graphs import SizedGraphs
from outrider.target_worker.resident_head import HeadLayer, Kept, kept_columns

# R of the sizes that are captured; more rows are filled up to a multiple of the last.
_ROWS = (8, 16, 32, 64, 128, 256, 512)
# Those of `kept_columns`, each [R] int64.
_COLUMNS = 4


class HeadExtension:
    """Extends one head's KV.

    Args:
        layer: the head.
        runner: the target, whose layers are tapped.
        graphs: whether CUDA graphs are captured.
    """

    def __init__(self, layer: HeadLayer, runner: ModelRunner, *, graphs: bool) -> None:
        self._layer, self._runner = layer, runner
        self._buffers = StepBuffers(runner.device)
        # Beside transformers' code every step leaves its hidden states elsewhere.
        enabled = graphs and runner.steps is not None
        self._graphs = SizedGraphs[int](
            self._run, _nothing, what="a head's extension", device=runner.device, enabled=enabled
        )

    def warm_up(self) -> None:
        """Compiles what any number of rows needs, and captures the sizes that there are."""
        self._graphs.warm_up(_ROWS[::-1])
        # Deterministic products of more rows have kernels of their own, until they fill the device by themselves.
        self._graphs.rehearse([factor * _ROWS[-1] for factor in (2, 4, 8)], self._run)

    def run(self, kept: Sequence[Kept]) -> None:
        """Extends the head's KV by what these keep of the last forward; nothing is waited for.

        Args:
            kept: all of them keep some rows, whose slots are reserved.
        """
        count = sum(len(part.rows) for part in kept)
        size = _size(count)
        buffer = self._buffers.take()
        staged = buffer.step_tensor(8 * _COLUMNS * size)
        staged.numpy()[:] = _nothing(size)
        staged.numpy().view(np.int64).reshape(_COLUMNS, size)[:, :count] = kept_columns(kept, self._runner.slots)
        buffer.note_begin()
        features, steps = self._runner.features, self._runner.steps
        # A step too large to be captured leaves its hidden states elsewhere.
        is_static = steps is not None and features.data_ptr() == steps.program.features.data_ptr()
        if is_static and size <= _ROWS[-1]:
            self._graphs.run(size, staged)
        else:
            self._store(features, size, staged.to(self._runner.device, non_blocking=True))
        buffer.note_end()

    def _run(self, size: int, data: torch.Tensor) -> torch.Tensor:
        assert self._runner.steps is not None
        return self._store(self._runner.steps.program.features, size, data)

    @torch.inference_mode()
    def _store(self, features: torch.Tensor, size: int, data: torch.Tensor) -> torch.Tensor:
        """Stores R rows; the slots that these went to.

        Args:
            features: [at least as many as rows are named, F].
            size: R.
            data: [nbytes] uint8 on the device.
        """
        rows, token_ids, positions, write_slots = data.view(torch.int64).view(_COLUMNS, size)
        self._layer.store(
            self._layer.head.fuse(features.index_select(0, rows)),
            token_ids,
            positions=positions,
            write_slots=write_slots,
        )
        return write_slots


def _size(rows: int) -> int:
    if rows <= _ROWS[-1]:
        return _ROWS[bisect_left(_ROWS, rows)]
    return -(-rows // _ROWS[-1]) * _ROWS[-1]


def _nothing(size: int) -> npt.NDArray[np.uint8]:
    """[nbytes] of a run that stores nothing."""
    columns = np.zeros((_COLUMNS, size), dtype=np.int64)
    columns[3] = -1
    return columns.reshape(-1).view(np.uint8)
