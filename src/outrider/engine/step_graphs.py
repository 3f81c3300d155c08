"""CUDA graphs of the step program, one a bucket, captured when they are asked for.

All graphs share one memory pool: steps follow one another, so nothing of one step is alive in another. What a replay
leaves is read, or copied on the device, before the next.

A launch takes the host more than a microsecond a kernel, and the device begins when it is over. So a step is captured
as several graphs, short ones first: the device computes the first layers while the host launches the others.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.buckets import Bucket
from outrider.engine.step_buffers import StepLayout
from outrider.engine.step_program import StepOutput
from outrider.step_holdups import note_preparation

logger = logging.getLogger(__name__)

# A capture holds steps up for as long as some hundred of a small model take, and saves each of those that follow a part
# of its time: it is worth it when as much has been lost for want of it. A bucket is captured after so many steps that
# ran in a larger one instead, or a few that had to run without a graph.
_WORTH_CAPTURING = 128
_WEIGHT_WITHOUT_GRAPH = 32
_COMPILING_THREADS = 8
# Graphs at a time, a few megabytes each.
_MOST_GRAPHS = 192
CUTS = (2, 8)
"""The layers that graphs of a step end with, but for its last: a layer takes the device several times as long as the
host takes to launch it, so each graph may be about that many times as long as the one before."""


class Program(Protocol):
    """What is captured: launches that depend on the bucket alone."""

    device: torch.device

    def run(self, bucket: Bucket, data: torch.Tensor, after_layer: Callable[[int], object] | None = None) -> StepOutput:
        """Runs a step from its bytes on the device; `after_layer` is called where it may be cut."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Captured:
    """The graphs of a step in their order, the bytes that they read and where they leave their results."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    data: torch.Tensor
    output: StepOutput


class _Rehearsed(Exception):
    """The layers that matter have run."""


@dataclass(slots=True)
class _Want:
    """How many steps asked for a bucket without a graph, and how much it would have helped them."""

    steps: int = 0
    weight: int = 0


class StepGraphs:
    """The captured buckets of one program. On a CPU nothing is ever captured.

    Args:
        program: what is captured.
        max_tokens: rows of the largest bucket that is captured.
        enabled: whether anything is.
        strict: whether it is an error where there is no memory for a graph; then nothing is ever `due`.

    Attributes:
        cuts: the layers that graphs of a step end with, but for its last; set before anything is captured.
    """

    def __init__(self, program: Program, *, max_tokens: int, enabled: bool, strict: bool = False) -> None:
        self._program, self._max_tokens, self._strict = program, max_tokens, strict
        self.cuts: Collection[int] = CUTS
        self._enabled = enabled and program.device.type == "cuda"
        self._captured: dict[Bucket, _Captured] = {}
        self._missing: dict[Bucket, _Want] = {}
        self._refused: set[Bucket] = set()
        # Where steps of a bucket without a graph run, until another is captured.
        self._larger: dict[Bucket, Bucket] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._stream = torch.cuda.Stream(program.device) if self._enabled else None

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def missing(self) -> Bucket | None:
        """What steps were most in want of; None where nothing was asked for twice."""
        asked = {bucket: want for bucket, want in self._missing.items() if want.steps > 1}
        return max(asked, key=lambda bucket: asked[bucket].weight, default=None)

    @property
    def due(self) -> Bucket | None:
        """The same, where a capture is worth holding steps up, and may fail without harm."""
        if self._strict:
            return None
        most = self.missing
        return None if most is None or self._missing[most].weight < _WORTH_CAPTURING else most

    def choose(self, wanted: Bucket) -> Bucket:
        """Where a step of this bucket runs: there, or in the next larger one whose graph is there.

        A bucket without a graph is noted in `missing`, and runs without one if no other holds it.
        """
        if not self._enabled or wanted in self._captured or wanted.tokens > self._max_tokens:
            return wanted
        if wanted not in self._larger:
            kinds = (bucket for bucket in self._captured if bool(bucket.nodes) == bool(wanted.nodes))
            self._larger[wanted] = min((bucket for bucket in kinds if bucket.holds(wanted)), default=wanted)
        larger = self._larger[wanted]
        if wanted not in self._refused and len(self._captured) < _MOST_GRAPHS:
            want = self._missing.setdefault(wanted, _Want())
            want.steps += 1
            want.weight += _WEIGHT_WITHOUT_GRAPH if larger == wanted else 1
        return larger

    def run(self, bucket: Bucket, step: torch.Tensor) -> StepOutput:
        """Runs a step from its bytes on the host; nothing is waited for.

        Args:
            bucket: of the step.
            step: [nbytes] uint8, pinned, unchanged until the step is done.
        """
        captured = self._captured.get(bucket)
        if captured is None:
            return self._program.run(bucket, step.to(self._program.device, non_blocking=True))
        captured.data.copy_(step, non_blocking=True)
        for graph in captured.graphs:
            graph.replay()
        return captured.output

    def capture(self, bucket: Bucket) -> None:
        """Captures a bucket, or compiles one that is too large; steps under way are waited for.

        Out of memory, the bucket stays without a graph.
        """
        self._missing.pop(bucket, None)
        if not self._enabled or bucket in self._captured or bucket in self._refused:
            return
        begun = time.perf_counter()
        try:
            if bucket.tokens > self._max_tokens:
                self._program.run(bucket, self._nothing(bucket))
            else:
                self._captured[bucket] = self._capture(bucket)
                self._larger.clear()
        except torch.OutOfMemoryError as error:
            if self._strict:
                raise
            self._refused.add(bucket)
            logger.warning("no GPU memory for a CUDA graph of %s: such steps run slower: %s", bucket, error)
        note_preparation(
            f"graph captured: {bucket.tokens} rows, {bucket.sessions} sessions", time.perf_counter() - begun
        )

    def compile(self, buckets: Sequence[Bucket], advance: Callable[[], object] = lambda: None) -> None:
        """Compiles what buckets need, several kernels at a time: most of a compilation runs beside others in threads.

        Two threads may compile the same kernel; one of the results is kept. What fails is left to `capture`.

        Args:
            buckets: which.
            advance: called after each, in any thread.
        """
        if not self._enabled or not buckets:
            return

        def run(bucket: Bucket) -> None:
            with suppress(torch.OutOfMemoryError), torch.cuda.device(self._program.device):
                self._program.run(bucket, self._nothing(bucket))
            advance()

        # What all buckets need is compiled once, before threads would do so each.
        run(buckets[0])
        with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
            list(pool.map(run, buckets[1:]))
        torch.cuda.synchronize(self._program.device)

    def rehearse(self, buckets: Sequence[Bucket], *, layers: int) -> None:
        """Compiles what the first layers of buckets need that need not be captured, several kernels at a time.

        Args:
            buckets: which.
            layers: so many; the others' kernels are the same.
        """
        if not self._enabled:
            return

        def after_layer(count: int) -> None:
            if count >= layers:
                raise _Rehearsed

        def run(bucket: Bucket) -> None:
            with suppress(torch.OutOfMemoryError, _Rehearsed), torch.cuda.device(self._program.device):
                self._program.run(bucket, self._nothing(bucket), after_layer)

        with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
            list(pool.map(run, buckets))
        torch.cuda.synchronize(self._program.device)

    def _nothing(self, bucket: Bucket) -> torch.Tensor:
        """A step that stores nothing; running it compiles what the bucket needs."""
        return torch.from_numpy(StepLayout.of(bucket).template).to(self._program.device)

    def _capture(self, bucket: Bucket) -> _Captured:
        data = self._nothing(bucket)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._program.device))
        with torch.cuda.stream(self._stream):
            self._program.run(bucket, data)
        # While a graph is captured, no memory is given back for it.
        torch.cuda.synchronize(self._program.device)
        torch.cuda.empty_cache()
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.stream(self._stream), ExitStack() as capture:

            def begin() -> None:
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
                capture.callback(graphs[-1].capture_end)

            def after_layer(count: int) -> None:
                if count in self.cuts:
                    capture.close()
                    begin()

            begin()
            output = self._program.run(bucket, data, after_layer)
        if bucket.nodes:
            # The logits' memory may go to other graphs: who wants logits has buckets without walks.
            output = StepOutput(logits=None, answer=output.answer, features=output.features)
        return _Captured(graphs=graphs, data=data, output=output)
