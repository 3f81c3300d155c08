"""What only shows in a running worker: idle time between steps, prefill's throughput, decoding beside a long prompt.

All of it goes through the step thread, as batches of a coordinator do: the next batch is handed in when the results of
the one before are there.
"""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from benchmarks.kernel_bench.case import Machine
from benchmarks.target_bench.points import prefill_flops
from benchmarks.target_bench.worker import LaunchClock, SessionGroup, Worker
from numpy.lib.stride_tricks import sliding_window_view

from outrider.target_worker.step_jobs import Batch, BatchResult
from outrider.target_worker.step_thread import StepThread

REQUEST_TOKENS = 64
_WARM_UPS = 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class IdleResult:
    """A saturated worker: two groups of sessions, one's batch always waiting while the other's is computed.

    Attributes:
        sessions, rows, context: of each group; rows of each tree.
        steps: measured.
        idle_p50_ms, idle_p90_ms, idle_max_ms: of the device, from the end of a step to the begin of the next.
        step_ms: median of a step on the device.
    """

    sessions: int
    rows: int
    context: int
    steps: int
    idle_p50_ms: float
    idle_p90_ms: float
    idle_max_ms: float
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """Prompts that arrive at an otherwise idle worker.

    Attributes:
        prompt: tokens of each.
        prompts: how many one after the other.
        max_prefill_tokens: most rows of a step.
        seconds: median of one, from its open to the token that it chooses.
        tokens_per_second: of prompt.
        tflops: FLOPs that the prompt needs, a second.
        share_of_peak: of the measured rate of a large bfloat16 product.
    """

    prompt: int
    prompts: int
    max_prefill_tokens: int
    seconds: float
    tokens_per_second: float
    tflops: float
    share_of_peak: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How evenly running sessions get their tokens.

    Attributes:
        steps: measured.
        gap_p50_ms, gap_p99_ms: between one token of a session and the next.
        tpot_p99_ms: of requests of `REQUEST_TOKENS` tokens that begin at any of the steps, the mean time a token.
    """

    steps: int
    gap_p50_ms: float
    gap_p99_ms: float
    tpot_p99_ms: float

    @classmethod
    def of(cls, gaps_ms: Sequence[float], longer_ms: Sequence[float]) -> Pace:
        """From the gaps of a phase; requests may go on after it, into `longer_ms`."""
        requests = sliding_window_view(np.array(longer_ms), min(REQUEST_TOKENS, len(longer_ms))).mean(axis=1)
        return cls(
            steps=len(gaps_ms),
            gap_p50_ms=float(np.median(gaps_ms)),
            gap_p99_ms=float(np.percentile(gaps_ms, 99)),
            tpot_p99_ms=float(np.percentile(requests, 99)),
        )


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """Running sessions without and with a long prompt beside them.

    Attributes:
        sessions, rows, context: of what runs.
        prompt: tokens of the long prompt.
        prompt_seconds: until the long prompt's first token.
        alone, beside: the running sessions' pace.
        tpot_p99_ratio, gap_p99_ratio: beside / alone.
    """

    sessions: int
    rows: int
    context: int
    prompt: int
    prompt_seconds: float
    alone: Pace
    beside: Pace
    tpot_p99_ratio: float
    gap_p99_ratio: float


@contextmanager
def running(worker: Worker) -> Iterator[StepThread]:
    """The worker's step thread."""
    thread = StepThread(worker.verifier)
    thread.start()
    try:
        thread.ready.result()
        yield thread
    finally:
        thread.stop()
        thread.stopped.exception()


def open_and_prefill(thread: StepThread, group: SessionGroup) -> None:
    """Opens the group's sessions and steps them until each has chosen a token."""
    thread.submit(Batch(opens=group.opens))
    missing = len(group.keys)
    while missing:
        missing = len(group.keys) - group.take(_answer(thread, Batch(trees=group.trees())).results)


def _answer(thread: StepThread, batch: Batch) -> BatchResult:
    return thread.submit(batch).result(_TIMEOUT_S)


def _close(thread: StepThread, groups: Sequence[SessionGroup]) -> None:
    _answer(thread, Batch(closes=[close for group in groups for close in group.closes]))


def take_turns(thread: StepThread, groups: Sequence[SessionGroup], *, steps: int) -> None:
    """So many steps, with one batch of every group always at the worker."""
    answered: queue.SimpleQueue[tuple[SessionGroup, Future[BatchResult]]] = queue.SimpleQueue()

    def submit(group: SessionGroup) -> None:
        thread.submit(Batch(trees=group.trees())).add_done_callback(lambda done: answered.put((group, done)))

    # Half a step apart: what waits at the same time becomes one step.
    apart = _seconds(thread, groups[0]) / len(groups)
    for group in groups:
        submit(group)
        time.sleep(apart)
    for number in range(steps):
        group, done = answered.get(timeout=_TIMEOUT_S)
        result = done.result()
        group.take(result.results)
        if number + len(groups) >= steps:
            continue
        submit(group)
        if result.step is not None and result.step.sessions > len(group.keys):
            # Two groups were one step, and would be for ever.
            time.sleep(apart)


def _seconds(thread: StepThread, group: SessionGroup) -> float:
    """Of one step of the group alone."""
    began = time.perf_counter()
    group.take(_answer(thread, Batch(trees=group.trees())).results)
    return time.perf_counter() - began


def measure_idle(worker: Worker, *, sessions: int, rows: int, context: int, steps: int) -> IdleResult:
    """The device's idle time between the steps of two groups of sessions that take turns."""
    runner = worker.runner
    with running(worker) as thread:
        groups = [
            SessionGroup(count=sessions, context=context, rows=rows, vocab_size=runner.vocab_size, seed=seed)
            for seed in (1, 2)
        ]
        for group in groups:
            open_and_prefill(thread, group)
        take_turns(thread, groups, steps=2 * _WARM_UPS)
        clock = LaunchClock(runner)
        take_turns(thread, groups, steps=steps)
        # The first two steps begin when nothing waits, and the last two have no successor that does.
        idle, step_ms = clock.idle_ms()[2:-2], clock.step_ms()[2:]
        clock.stop()
        _close(thread, groups)
    return IdleResult(
        sessions=sessions,
        rows=rows,
        context=context,
        steps=len(idle),
        idle_p50_ms=float(np.median(idle)),
        idle_p90_ms=float(np.percentile(idle, 90)),
        idle_max_ms=max(idle),
        step_ms=statistics.median(step_ms),
    )


def measure_prefill(worker: Worker, machine: Machine, *, prompt: int, prompts: int) -> PrefillResult:
    """Prompts one after the other, with nothing beside them."""
    seconds = []
    with running(worker) as thread:
        # The first one loads kernels.
        for number in range(prompts + 1):
            group = SessionGroup(count=1, context=prompt, rows=1, vocab_size=worker.runner.vocab_size, seed=number)
            began = time.perf_counter()
            open_and_prefill(thread, group)
            if number:
                seconds.append(time.perf_counter() - began)
            _close(thread, [group])
    median = statistics.median(seconds)
    flops = prefill_flops(worker.model.sizes, prompt)
    return PrefillResult(
        prompt=prompt,
        prompts=prompts,
        max_prefill_tokens=worker.config.prefill_tokens,
        seconds=median,
        tokens_per_second=prompt / median,
        tflops=flops / median / 1e12,
        share_of_peak=flops / median / machine.flops_per_s,
    )


def mixed_config(*, sessions: int, context: int, prompt: int, steps: int) -> dict[str, int]:
    """What a worker's configuration must allow at least, by the name of its field."""
    # Tokens that sessions may emit meanwhile: at least a few rows of the prompt go along with each step.
    room = prompt // 4 + 8 * steps + 4 * REQUEST_TOKENS
    return {
        "max_num_seqs": sessions + 1,
        "max_model_len": max(prompt, context) + room,
        "num_slots": sessions * (context + room) + prompt + room,
    }


def measure_mixed(worker: Worker, *, sessions: int, rows: int, context: int, prompt: int, steps: int) -> MixedResult:
    """The pace of running sessions, alone and while a long prompt is prefilled beside them."""
    vocab_size = worker.runner.vocab_size
    with running(worker) as thread:
        group = SessionGroup(count=sessions, context=context, rows=rows, vocab_size=vocab_size, seed=1)
        open_and_prefill(thread, group)
        # The first long prompt loads kernels.
        for seed in (2, 3):
            alone = _gaps_ms(thread, group, steps=steps)
            long = SessionGroup(count=1, context=prompt, rows=1, vocab_size=vocab_size, seed=seed)
            began = time.perf_counter()
            thread.submit(Batch(opens=long.opens))
            during = _gaps_ms(thread, group, until=long)
            prompt_seconds = time.perf_counter() - began
            after = _gaps_ms(thread, group, steps=REQUEST_TOKENS - 1)
            _close(thread, [long])
        _close(thread, [group])
    pace_alone, pace_beside = Pace.of(alone, alone), Pace.of(during, during + after)
    return MixedResult(
        sessions=sessions,
        rows=rows,
        context=context,
        prompt=prompt,
        prompt_seconds=prompt_seconds,
        alone=pace_alone,
        beside=pace_beside,
        tpot_p99_ratio=pace_beside.tpot_p99_ms / pace_alone.tpot_p99_ms,
        gap_p99_ratio=pace_beside.gap_p99_ms / pace_alone.gap_p99_ms,
    )


def _gaps_ms(
    thread: StepThread, group: SessionGroup, *, steps: int = 0, until: SessionGroup | None = None
) -> list[float]:
    """Times from one answer of the group to the next: for so many steps, or until another group has a token."""
    gaps: list[float] = []
    last = time.perf_counter()
    waits = until is not None
    while waits or len(gaps) < steps:
        trees = group.trees()
        count = len(trees)
        if until is not None:
            trees += until.trees()
        results = _answer(thread, Batch(trees=trees)).results
        now = time.perf_counter()
        gaps.append(1e3 * (now - last))
        last = now
        group.take(results[:count])
        waits = until is not None and until.take(results[count:]) == 0
    return gaps
