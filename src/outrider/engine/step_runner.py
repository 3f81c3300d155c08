"""Runs steps of one model on its device: staged as bytes, launched without waiting, answered through an event.

Shapes: as in `outrider.engine.step_buffers`, V vocabulary size.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from outrider.engine.batch import ForwardBatch, TreeChoices
from outrider.engine.buckets import Bucket, BucketLadder
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.kv_slots import SlotTable
from outrider.engine.step_buffers import StagedStep, StepBuffer, StepBuffers
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.step_program import StepOutput, StepProgram, answer_len
from outrider.engine.step_staging import StepAnswer, stage_step
from outrider.engine.step_trees import TreeColumns, need_of_trees, read_answer, stage_trees
from outrider.engine.tensor_parallel import Alone, Ranks

logger = logging.getLogger(__name__)

# A capture compiles what its bucket needs, on every rank.
_CAPTURE_TIMEOUT_S = 900.0
# Of entries that found no place in a step: a kernel is compiled for each way that so many lie in memory.
_UPDATE_COUNTS = (1, 2, 3, 4, 16)
# Of steps of trees whose buckets are kept.
_MOST_SIZES = 4096


class LaunchedStep:
    """A step under way.

    Args:
        staged: what was launched.
        buffer: whose event says that it is done.
        output: its results; valid until the next launch, on the device's stream.
        ranks: that run it.

    Attributes:
        logits: [R, V] of the wanted rows, or None.
        features: [at least T, F] of the tapped layers, or None.
    """

    def __init__(self, staged: StagedStep, buffer: StepBuffer, output: StepOutput, ranks: Ranks) -> None:
        self._staged, self._buffer, self._ranks = staged, buffer, ranks
        self.logits = None if output.logits is None else output.logits[: staged.logit_rows]
        self.features = output.features

    def wait(self) -> None:
        """Until the device is done.

        Raises:
            WorkerUnavailable: another rank was lost.
        """
        with self._ranks.guard():
            self._buffer.wait()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._buffer.is_done

    def device_ns(self) -> int:
        """How long the device worked on the step, once it is done."""
        return self._buffer.elapsed_ns()

    def result(self) -> StepAnswer:
        """The walks of a step with choices, once the device is done."""
        self.wait()
        return read_answer(self._buffer.answer_words(answer_len(self._staged.bucket)), self._staged)


class StepRunner:
    """One rank's model, driven by staged steps. One thread calls it.

    Args:
        program: the model on its device.
        ladder: which buckets there are.
        slots: the slot table that steps are staged from.
        unrolled: whether tree rows are sessions of their own (`outrider.engine.step_staging`).
        graphs: whether CUDA graphs are captured.
        ranks: the processes that share the model; rank 0 has the others run what it runs.
    """

    def __init__(
        self,
        program: StepProgram,
        ladder: BucketLadder,
        slots: SlotTable,
        *,
        unrolled: bool,
        graphs: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self._program, self._ladder, self._slots, self._unrolled = program, ladder, slots, unrolled
        self._ranks = ranks or Alone(program.device)
        self._buffers = StepBuffers(program.device)
        # By rows, trees and rows of the largest.
        self._tree_buckets: dict[tuple[int, int, int], Bucket] = {}
        # A rank that gave a capture up would stop half-way in what the others run to its end.
        strict = self._ranks.world_size > 1
        self._graphs = StepGraphs(program, max_tokens=ladder.max_tokens, enabled=graphs, strict=strict)
        self.features: torch.Tensor | None = None
        """[at least T, F] of the last step that was launched, where layers are tapped."""

    @property
    def program(self) -> StepProgram:
        """What steps run."""
        return self._program

    @property
    def ladder(self) -> BucketLadder:
        """The buckets that there are."""
        return self._ladder

    def tap(self, taps: tuple[int, ...]) -> None:
        """See `StepProgram.tap`; before anything is captured."""
        assert not self.graphs, "layers are tapped before graphs are captured"
        self._program.tap(taps, rows=self._ladder.max_tokens)

    @property
    def graphs(self) -> int:
        """Captured graphs."""
        return len(self._graphs)

    @property
    def takes_trees(self) -> bool:
        """Whether `stage_trees` may be called."""
        return not self._unrolled

    def stage_trees(self, trees: TreeColumns) -> StagedStep:
        """`stage` of trees to verify and nothing else, in less time."""
        size = len(trees.tokens), len(trees.rows), max(trees.counts)
        wanted = self._tree_buckets.get(size)
        if wanted is None:
            wanted = self._ladder.bucket(need_of_trees(trees))
            if size[0] <= self._ladder.max_tokens:
                # There the length of contexts bounds nothing.
                if len(self._tree_buckets) >= _MOST_SIZES:
                    self._tree_buckets.clear()
                self._tree_buckets[size] = wanted
        bucket = self._graphs.choose(wanted)
        return stage_trees(trees, slots=self._slots, bucket=bucket, buffer=self._buffers.take())

    def stage(self, batch: ForwardBatch, choices: TreeChoices | None = None) -> StagedStep:
        """The step as bytes; its slots are reserved. It must be launched before the next one is staged.

        Args:
            batch: the forward.
            choices: how its logits choose; None where the logits themselves are wanted.
        """
        return stage_step(
            batch,
            choices,
            slots=self._slots,
            choose=self._choose,
            buffer=self._buffers.take(),
            unrolled=self._unrolled,
        )

    def _choose(self, need: Bucket) -> Bucket:
        return self._graphs.choose(self._ladder.bucket(need))

    @torch.inference_mode()
    def launch(self, staged: StagedStep) -> LaunchedStep:
        """Starts a step; nothing is waited for.

        Raises:
            WorkerUnavailable: another rank was lost.
        """
        buffer = staged.buffer
        if buffer is not None and self._ranks.world_size > 1:
            # Guarded: a rank that stands still reads no commands, and they do not fit into its socket for ever.
            with self._ranks.guard():
                self._ranks.lead("launch", replace(staged, buffer=None))
        if buffer is None:
            buffer = self._buffers.take()
            buffer.copy_in(staged.data)
        buffer.note_begin()
        if staged.more_updates.size:
            more = torch.from_numpy(np.ascontiguousarray(staged.more_updates))
            self._program.update_slots(more.to(self._program.device))
        with self._ranks.guard():
            output = self._graphs.run(staged.bucket, buffer.step_tensor(len(staged.data)))
        if len(output.answer):
            buffer.answer(len(output.answer)).copy_(output.answer, non_blocking=True)
        buffer.note_end()
        self.features = output.features
        return LaunchedStep(staged, buffer, output, self._ranks)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The wanted logits [R, V] float32, a copy; without waiting for the device, but where a graph is captured."""
        if (due := self.due) is not None:
            self.capture(due)
        launched = self.launch(self.stage(batch))
        if launched.logits is None or not len(batch.logit_rows):
            vocab_size = self._program.vocab_size
            return torch.empty((0, vocab_size), dtype=torch.float32, device=self._program.device)
        return launched.logits.to(torch.float32, copy=True)

    @property
    def missing(self) -> Bucket | None:
        """The bucket that `capture` should be called for when there is time, if any."""
        return self._graphs.missing

    @property
    def due(self) -> Bucket | None:
        """The same, where a capture is worth holding steps up."""
        return self._graphs.due

    def capture(self, bucket: Bucket) -> None:
        """Captures a bucket's graph.

        Raises:
            WorkerUnavailable: another rank was lost.
        """
        with self._ranks.guard(_CAPTURE_TIMEOUT_S):
            self._ranks.lead("capture", bucket)
            self._graphs.capture(bucket)

    def compile(self, buckets: Sequence[Bucket], advance: Callable[[], object] = lambda: None) -> None:
        """Compiles what buckets need, several kernels at a time, on every rank by itself.

        Args:
            buckets: which.
            advance: called after each, in any thread.

        Raises:
            WorkerUnavailable: another rank was lost.
        """
        with self._ranks.guard(_CAPTURE_TIMEOUT_S):
            self._ranks.lead("compile", list(buckets))
            # Ranks run the same steps in the same order, and threads have none: here they do not wait for one another.
            with self._ranks.apart():
                self._graphs.compile(buckets, advance)

    def rehearse(self, buckets: Sequence[Bucket]) -> None:
        """Compiles what the layers of buckets need that are not captured yet, on every rank by itself.

        Raises:
            WorkerUnavailable: another rank was lost.
        """
        with self._ranks.guard(_CAPTURE_TIMEOUT_S):
            self._ranks.lead("rehearse", list(buckets))
            with self._ranks.apart():
                self._graphs.rehearse(buckets, layers=_layers_of_each_kind(self._program.decoder.spec))
                for count in _UPDATE_COUNTS:
                    # Entries that point nowhere.
                    self._program.update_slots(
                        torch.full((3, count), -1, dtype=torch.int32, device=self._program.device)
                    )

    def warm_up(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Compiles what any step may need, and captures what serving begins with, showing how far it is.

        Args:
            buckets: that are captured; by default the ladder's first set.
        """
        wanted = self._ladder.first_set() if buckets is None else buckets
        if self._program.device.type != "cuda" or not wanted:
            return
        begin = time.perf_counter()
        logger.info("compiling and capturing %d CUDA graphs", len(wanted))
        with _progress(2 * len(wanted)) as advance:
            self.compile(wanted, advance)
            self.rehearse(self._ladder.rehearsal())
            # From the largest on: what smaller ones need of memory is then there.
            for bucket in sorted(wanted, reverse=True):
                self.capture(bucket)
                advance()
        logger.info("%d CUDA graphs captured in %.1f s", self.graphs, time.perf_counter() - begin)


def _layers_of_each_kind(spec: DecoderSpec) -> int:
    """How many layers, from the first on, have between them every kind of layer, after another layer and first."""
    first = {layer: place for place, layer in reversed(list(enumerate(spec.layers)))}
    return max(1 + max(first.values()), 2)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A progress bar where there is a terminal, and what moves it on."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling and capturing CUDA graphs", total=total)
        yield lambda: progress.advance(task)
