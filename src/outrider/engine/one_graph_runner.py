"""Runs one-graph rounds on a device: staged as bytes, one graph replayed, answered through an event.

Shapes: as in `outrider.engine.one_graph_buckets`.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.buckets import Bucket
from outrider.engine.kv_slots import SlotTable
from outrider.engine.one_graph_buckets import RoundBucket, RoundLadder, RoundLayout, RoundNeeds
from outrider.engine.one_graph_program import RoundProgram, answer_len
from outrider.engine.one_graph_shape import RoundShape
from outrider.engine.one_graph_staging import RoundAnswer, RoundColumns, stage_round
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepBuffers
from outrider.engine.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


class LaunchedRound:
    """A round under way.

    Args:
        staged: what was launched.
        buffer: whose event says that it is done.
    """

    def __init__(self, staged: StagedStep, buffer: StepBuffer) -> None:
        self._staged, self._buffer = staged, buffer

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self._buffer.is_done

    def device_ns(self) -> int:
        """How long the device worked on the round, once it is done."""
        return self._buffer.elapsed_ns()

    def result(self) -> RoundAnswer:
        """The walks, once the device is done."""
        self._buffer.wait()
        assert isinstance(self._staged.bucket, RoundBucket)
        return RoundAnswer.of(self._buffer.answer(answer_len(self._staged.bucket)).numpy(), self._staged)


class RoundGraphs(StepGraphs):
    """The captured rounds of one program, each a single graph."""

    def _nothing(self, bucket: Bucket) -> torch.Tensor:
        assert isinstance(bucket, RoundBucket)
        return torch.from_numpy(RoundLayout.of_round(bucket).template).to(self._program.device)


class RoundRunner:
    """One model and its head, driven by staged rounds. One thread calls it, the one that runs the model's steps.

    Args:
        program: the rounds on their device.
        shape: of every session's tree.
        ladder: which buckets there are.
        slots: the slot table that rounds are staged from.
        graphs: whether CUDA graphs are captured.
    """

    def __init__(
        self, program: RoundProgram, shape: RoundShape, ladder: RoundLadder, slots: SlotTable, *, graphs: bool
    ) -> None:
        self.shape, self.ladder = shape, ladder
        self.program, self._slots = program, slots
        self._buffers = StepBuffers(program.device)
        self._graphs = RoundGraphs(program, max_tokens=ladder.max_sessions * shape.rows, enabled=graphs)

    @property
    def graphs(self) -> int:
        """Captured graphs."""
        return len(self._graphs)

    @property
    def missing(self) -> Bucket | None:
        """The bucket that `capture` should be called for when there is time, if any."""
        return self._graphs.missing

    @property
    def due(self) -> Bucket | None:
        """The bucket whose capture is worth holding rounds up, if any."""
        return self._graphs.due

    def capture(self, bucket: Bucket) -> None:
        """Captures a bucket's graph; rounds under way are waited for."""
        self._graphs.capture(bucket)

    @torch.inference_mode()
    def launch(self, columns: RoundColumns, needs: RoundNeeds) -> LaunchedRound:
        """Stages and starts a round; nothing is waited for.

        Args:
            columns: its sessions, at most `ladder.max_sessions`.
            needs: what they ask for, of which `columns.lists` holds the tokens.
        """
        wanted = self.ladder.bucket(len(columns.rows), needs)
        bucket = self._graphs.choose(wanted)
        assert isinstance(bucket, RoundBucket)
        buffer = self._buffers.take()
        staged = stage_round(columns, shape=self.shape, slots=self._slots, bucket=bucket, buffer=buffer)
        buffer.note_begin()
        if staged.more_updates.size:
            more = torch.from_numpy(np.ascontiguousarray(staged.more_updates))
            self.program.update_slots(more.to(self.program.device))
        output = self._graphs.run(bucket, buffer.step_tensor(len(staged.data)))
        buffer.answer(len(output.answer)).copy_(output.answer, non_blocking=True)
        buffer.note_end()
        return LaunchedRound(staged, buffer)

    def warm_up(self, buckets: Sequence[RoundBucket] | None = None) -> None:
        """Compiles and captures rounds.

        Args:
            buckets: which; by default those that serving begins with, and what any other needs is compiled as well.
        """
        wanted = self.ladder.first_set() if buckets is None else buckets
        others = self.ladder.rehearsal() if buckets is None else []
        if self.program.device.type != "cuda" or not wanted:
            return
        begin = time.perf_counter()
        self._graphs.compile([*wanted, *others])
        for bucket in sorted(wanted, reverse=True):
            self._graphs.capture(bucket)
        logger.info("%d CUDA graphs of one-graph rounds in %.1f s", self.graphs, time.perf_counter() - begin)
