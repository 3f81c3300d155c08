"""A target worker whose model is small and whose steps take as long as a larger model's.

The worker is the real one. Around every step that it launches stand two kernels of one warp, on the step's stream: the
first notes when the device begins, the second stays on its multiprocessor until the larger model would be done.
Results are copied back after that, so everything but the forward itself is as it is with the larger model: staging,
steps launched while others run, the worker's own estimates. Two things are not: the host launches fewer kernels, and
the larger model's would take the whole GPU. What else runs on this GPU (the draft) runs beside the second kernel only
under NVIDIA's MPS; without it processes take turns, and a step would hold the draft up.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from benchmarks.end_bench.step_times import StepTimes

from outrider.engine import step_runner
from outrider.engine.buckets import Bucket
from outrider.engine.step_buffers import StepLayout
from outrider.engine.step_graphs import Program, StepGraphs
from outrider.engine.step_program import StepOutput
from outrider.kernels.backend import jit, tl

logger = logging.getLogger(__name__)

# By so much more than they were held did steps take, from their first event to their last, whatever was in them: 4.03
# and 4.93 ms for 3.95 and 4.83, steps of 1 and 14 sessions (`benchmarks/gpu.sh imitated` on one H200, commit 595f2d1).
_AROUND_NS = 90_000


class Clock(Protocol):
    """Holds a stream up for a time that began there before."""

    def begin(self) -> None:
        """The time begins when the stream comes to here."""
        ...

    def hold(self, duration_ns: int) -> None:
        """The stream goes on when so much of it is over; at once if it is."""
        ...


class DeviceClock:
    """By the GPU's own timer, on the current stream; nothing of it is waited for on the host.

    Args:
        device: a GPU.

    Attributes:
        times_ns: [2] int64, where the last step began and where its hold ended.
    """

    def __init__(self, device: torch.device) -> None:
        self.times_ns = torch.zeros(2, dtype=torch.int64, device=device)
        # Compiled before a step is.
        self.begin()
        self.hold(0)

    def begin(self) -> None:
        """As the protocol's."""
        _begin_kernel[(1,)](self.times_ns, num_warps=1)

    def hold(self, duration_ns: int) -> None:
        """As the protocol's."""
        _hold_kernel[(1,)](self.times_ns, duration_ns, num_warps=1)


class StretchedGraphs(StepGraphs):
    """Steps that take as long as `times` says, or as their own model takes, if that is longer.

    Args:
        program, max_tokens, enabled, strict: as the base's.
        times: of steps.
        clock: that holds them; by default the program's device's.
    """

    def __init__(
        self,
        program: Program,
        *,
        max_tokens: int,
        enabled: bool,
        strict: bool = False,
        times: StepTimes,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(program, max_tokens=max_tokens, enabled=enabled, strict=strict)
        self._times, self._clock = times, clock or DeviceClock(program.device)
        logger.warning("an imitated target: its steps take %s", times)

    def run(self, bucket: Bucket, step: torch.Tensor) -> StepOutput:
        """As the base's."""
        duration_ns = self._times.step_ns(*rows_and_sessions(bucket, step)) - _AROUND_NS
        self._clock.begin()
        output = super().run(bucket, step)
        self._clock.hold(duration_ns)
        return output


def rows_and_sessions(bucket: Bucket, step: torch.Tensor) -> tuple[int, int]:
    """How many there are in a step.

    Args:
        bucket: that it runs in.
        step: [nbytes] uint8, on the host.
    """
    begins, words = StepLayout.of(bucket).begins, step.numpy().view(np.int32)
    # Sessions that the step does not fill begin where the last row of the others ends, and have no row of the table.
    rows, sessions = begins["query_start"] // 4 + bucket.sessions, begins["rows"] // 4
    return int(words[rows]), int(np.count_nonzero(words[sessions : sessions + bucket.sessions] >= 0))


def imitate(times: StepTimes) -> None:
    """Has the steps of every model that this process loads from now on take so long."""

    def graphs(program: Program, *, max_tokens: int, enabled: bool, strict: bool) -> StretchedGraphs:
        return StretchedGraphs(program, max_tokens=max_tokens, enabled=enabled, strict=strict, times=times)

    setattr(step_runner, "StepGraphs", graphs)  # noqa: B010 a type is replaced


@jit
def _begin_kernel(
    times_ptr,  # [2] int64
):
    tl.store(times_ptr, tl.extra.cuda.globaltimer())


@jit(do_not_specialize=["duration_ns"])
def _hold_kernel(
    times_ptr,  # [2] int64
    duration_ns,
):
    end = tl.load(times_ptr) + duration_ns
    now = tl.extra.cuda.globaltimer()
    while now < end:
        now = tl.extra.cuda.globaltimer()
    tl.store(times_ptr + 1, now)
