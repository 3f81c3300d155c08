"""Rounds of a resident draft on a device: staged as bytes, one CUDA graph replayed, one answer copied back.

Sizes are few, and rounds are filled up: sessions to the next rung, rows to four or eight a session. A size without a
graph is captured when it first comes up, in a step that takes so much longer; `warm_up` captures the usual ones.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StepBuffers
from outrider.engine.step_staging import pack_changes
from outrider.target_worker.resident_choice import ranking_columns
from outrider.target_worker.resident_program import MOST_ROWS, RoundLayout, RoundProgram, RoundSize
from outrider.target_worker.sessions import Session

logger = logging.getLogger(__name__)

_SESSIONS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROWS_OF_EACH = (MOST_ROWS // 2, MOST_ROWS)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RoundPart:
    """One session of a round: the last rows of a forward that it keeps, up to its root's predecessor."""

    session: Session
    rows: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    data: torch.Tensor
    packed: torch.Tensor


class DraftRounds:
    """Runs rounds of one program.

    Args:
        program: what runs.
        slots: of the target.
        tree_slots: M.
        max_sessions: of a round.
        device: of the program.
        graphs: whether they are captured.
    """

    def __init__(
        self,
        program: RoundProgram,
        slots: SlotTable,
        *,
        tree_slots: int,
        max_sessions: int,
        device: torch.device,
        graphs: bool,
    ) -> None:
        self._program, self._slots, self._tree_slots, self._device = program, slots, tree_slots, device
        self._sessions = (*(rung for rung in _SESSIONS if rung < max_sessions), max_sessions)
        self._graphs = graphs and device.type == "cuda"
        self._captured: dict[RoundSize, _Captured] = {}
        self._refused: set[RoundSize] = set()
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self._stream = torch.cuda.Stream(device) if self._graphs else None
        self._buffers = StepBuffers(device)

    @property
    def graphs(self) -> int:
        """Captured graphs."""
        return len(self._captured)

    def reads(self, features: torch.Tensor) -> bool:
        """Whether a round reads these hidden states of the target."""
        return features.data_ptr() == self._program.features.data_ptr()

    def warm_up(self) -> None:
        """Captures the sizes that there are, from the largest on: what smaller ones need of memory is then there."""
        if self._graphs:
            for sessions in reversed(self._sessions):
                for each in reversed(_ROWS_OF_EACH):
                    size = RoundSize(sessions=sessions, rows=each * sessions, tree_slots=self._tree_slots)
                    self._graph(size)
            logger.info("%d CUDA graphs of resident drafts captured", self.graphs)

    def run(self, parts: Sequence[RoundPart]) -> npt.NDArray[np.int32]:
        """A round; [S, words] of `CandidateTrees.of`.

        Args:
            parts: sessions whose tree slots are reserved behind their own.
        """
        size = self._size(len(parts), sum(len(part.rows) for part in parts))
        layout, buffer = RoundLayout.of(size), self._buffers.take()
        staged = buffer.step_tensor(layout.nbytes)
        data = staged.numpy()
        data[:] = layout.template
        self._stage(parts, layout.arrays(data))
        captured = self._graph(size)
        if captured is None:
            packed = self._program.run(size, staged.to(self._device, non_blocking=True))
        else:
            captured.data.copy_(staged, non_blocking=True)
            captured.graph.replay()
            packed = captured.packed
        answer = buffer.answer(packed.numel()).view(packed.shape)
        buffer.note_begin()
        answer.copy_(packed, non_blocking=True)
        buffer.note_end()
        buffer.wait()
        # A copy: trees are kept until their session's next step, and other rounds use the buffer before.
        return answer.numpy()[: len(parts)].copy()

    def _size(self, sessions: int, rows: int) -> RoundSize:
        rung = self._sessions[bisect_left(self._sessions, sessions)]
        each = next(each for each in _ROWS_OF_EACH if each * rung >= rows)
        return RoundSize(sessions=rung, rows=each * rung, tree_slots=self._tree_slots)

    def _stage(self, parts: Sequence[RoundPart], arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """Writes the parts into a round of nothing."""
        table = self._slots.table
        sessions = [part.session for part in parts]
        count = len(sessions)
        roots = np.array([session.root_index for session in sessions])
        rows = np.array([session.row for session in sessions], dtype=np.int32)
        lengths = np.array([len(part.rows) for part in parts])
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        # Each row's session and its place in that session's tokens.
        of_row = np.repeat(np.arange(count), lengths)
        places = np.arange(total) - np.repeat(ends - lengths, lengths) + np.repeat(roots - lengths, lengths)
        tokens = [part.session.tokens[-len(part.rows) :] for part in parts]
        arrays["feature_rows"][:total] = np.concatenate([part.rows for part in parts])
        arrays["token_ids"][:total] = np.concatenate(tokens)
        arrays["row_positions"][:total] = places
        arrays["write_slots"][:total] = table[rows[of_row], places]
        arrays["query_start"][1 : count + 1] = ends
        arrays["query_start"][count + 1 :] = total
        arrays["last_rows"][:count] = ends - 1
        arrays["table_rows"][:count] = rows
        arrays["roots"][:count] = roots
        nodes = np.arange(self._tree_slots)
        arrays["tree_slots"][:count] = table[rows[:, None], roots[:, None] + nodes]
        for name, values in ranking_columns(sessions).items():
            arrays[name][:count] = values
        more = pack_changes(rows, self._slots, arrays)
        if more.size:
            self._program.update_slots(torch.from_numpy(more).to(self._device))

    def _graph(self, size: RoundSize) -> _Captured | None:
        """The size's graph, captured if it is not yet; None where there is none."""
        if not self._graphs or size in self._refused:
            return None
        if size not in self._captured:
            try:
                self._captured[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                self._refused.add(size)
                logger.warning("no GPU memory for a CUDA graph of %s: such steps run slower: %s", size, error)
                return None
        return self._captured[size]

    def _capture(self, size: RoundSize) -> _Captured:
        assert self._stream is not None
        data = torch.from_numpy(RoundLayout.of(size).template).to(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._program.run(size, data)
        # While a graph is captured, no memory is given back for it.
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            packed = self._program.run(size, data)
        return _Captured(graph=graph, data=data, packed=packed)
