"""Rounds of a resident draft on a device: staged as bytes, one CUDA graph replayed, one answer copied back.

Sizes are few, and rounds are filled up: sessions to the next rung, rows to four or eight a session. `warm_up` captures
all of them. Sessions that a graph does not take (their paths are needed on the host, or their coins are their own) have
a round for themselves, of the same sizes, one launch after the other: it needs no other kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StepBuffers
from outrider.engine.step_staging import pack_changes
from outrider.sampling import VerificationRule
from outrider.target_worker.resident_choice import ranking_columns, reads_path
from outrider.target_worker.resident_graphs import SizedGraphs
from outrider.target_worker.resident_head import Kept, kept_columns
from outrider.target_worker.resident_program import MOST_ROWS, RoundLayout, RoundProgram, RoundSize

_SESSIONS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROWS_OF_EACH = (MOST_ROWS // 2, MOST_ROWS)
# Where a round has what `kept_columns` gives.
_ROW_COLUMNS = ("feature_rows", "token_ids", "row_positions", "write_slots")


class DraftRounds:
    """Runs rounds of one program.

    Args:
        program: what runs.
        runner: the target.
        tree_slots: M.
        max_sessions: of a round.
        graphs: whether they are captured.
    """

    def __init__(
        self, program: RoundProgram, runner: ModelRunner, *, tree_slots: int, max_sessions: int, graphs: bool
    ) -> None:
        self._program, self._runner, self._tree_slots = program, runner, tree_slots
        self._sessions = (*(rung for rung in _SESSIONS if rung < max_sessions), max_sessions)
        self._graphs = SizedGraphs[RoundSize](
            program.run,
            lambda size: RoundLayout.of(size).template,
            what="resident drafts",
            device=runner.device,
            enabled=graphs,
        )
        self._buffers = StepBuffers(runner.device)

    def warm_up(self) -> None:
        """Compiles and captures the sizes that there are, from the largest on."""
        sizes = [
            RoundSize(sessions=sessions, rows=each * sessions, tree_slots=self._tree_slots)
            for sessions in reversed(self._sessions)
            for each in reversed(_ROWS_OF_EACH)
        ]
        self._graphs.warm_up(sizes)
        self._graphs.rehearse(sizes, self._run_independent)

    def run(self, kept: Sequence[Kept]) -> npt.NDArray[np.int32]:
        """Extends the head and grows a tree of each session; [S, words] of `CandidateTrees.of`.

        Args:
            kept: of sessions whose tree slots are reserved behind their own: the last rows that each keeps, up to its
                root's predecessor, at most `MOST_ROWS`.
        """
        alone = np.array([_needs_host(part) for part in kept])
        if not alone.any():
            return self._run(kept)
        trees: list[npt.NDArray[np.int32]] = []
        order = np.argsort(alone, kind="stable")
        for places in np.split(order, [len(order) - int(alone.sum())]):
            if len(places):
                trees.append(self._run([kept[place] for place in places]))
        return np.concatenate(trees)[np.argsort(order)]

    def _run(self, kept: Sequence[Kept]) -> npt.NDArray[np.int32]:
        """A round, of sessions that all need the host or all do not."""
        size = self._size(len(kept), sum(len(part.rows) for part in kept))
        layout, buffer = RoundLayout.of(size), self._buffers.take()
        staged = buffer.step_tensor(layout.nbytes)
        data = staged.numpy()
        data[:] = layout.template
        self._stage(kept, layout.arrays(data))
        packed = self._launched(kept, size, staged)
        answer = buffer.answer(packed.numel()).view(packed.shape)
        buffer.note_begin()
        answer.copy_(packed, non_blocking=True)
        buffer.note_end()
        buffer.wait()
        # A copy: trees are kept until their session's next step, and other rounds use the buffer before.
        return answer.numpy()[: len(kept)].copy()

    def _launched(self, kept: Sequence[Kept], size: RoundSize, staged: torch.Tensor) -> torch.Tensor:
        """[S, words] on the device."""
        features, beside_host = self._runner.features, [part.session for part in kept if _needs_host(part)]
        # A step too large to be captured leaves its hidden states elsewhere.
        if not beside_host and features.data_ptr() == self._program.features.data_ptr():
            return self._graphs.run(size, staged)
        return self._program.run_beside_host(
            size,
            staged.to(self._runner.device, non_blocking=True),
            features=features,
            sessions=beside_host,
            any_independent=any(session.sampling.rule is VerificationRule.TARGET_ONLY for session in beside_host),
        )

    def _run_independent(self, size: RoundSize, data: torch.Tensor) -> torch.Tensor:
        return self._program.run_beside_host(size, data, features=self._program.features, any_independent=True)

    def _size(self, sessions: int, rows: int) -> RoundSize:
        rung = self._sessions[bisect_left(self._sessions, sessions)]
        each = next(each for each in _ROWS_OF_EACH if each * rung >= rows)
        return RoundSize(sessions=rung, rows=each * rung, tree_slots=self._tree_slots)

    def _stage(self, kept: Sequence[Kept], arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """Writes what is kept into a round of nothing."""
        slots = self._runner.slots
        sessions = [part.session for part in kept]
        count = len(sessions)
        roots = np.array([session.root_index for session in sessions])
        rows = np.array([session.row for session in sessions], dtype=np.int32)
        ends = np.cumsum([len(part.rows) for part in kept])
        for name, values in zip(_ROW_COLUMNS, kept_columns(kept, slots), strict=True):
            arrays[name][: len(values)] = values
        arrays["query_start"][1 : count + 1] = ends
        arrays["query_start"][count + 1 :] = ends[-1]
        arrays["last_rows"][:count] = ends - 1
        arrays["table_rows"][:count] = rows
        arrays["roots"][:count] = roots
        nodes = np.arange(self._tree_slots)
        arrays["tree_slots"][:count] = slots.table[rows[:, None], roots[:, None] + nodes]
        for name, values in ranking_columns(sessions).items():
            arrays[name][:count] = values
        more = pack_changes(rows, slots, arrays)
        if more.size:
            self._program.update_slots(torch.from_numpy(more).to(self._runner.device))


def _needs_host(part: Kept) -> bool:
    """Whether no graph grows the session's tree."""
    spec = part.session.sampling
    return reads_path(spec) or spec.rule is not VerificationRule.COUPLED
