"""A target and its rounds, loaded, and what starting them takes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.model_runner import ModelRunner
from outrider.engine.weight_source import WeightSource
from outrider.kernels.verification.report import RoundTime, mark_time
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.drafters.loading import load_draft, room_for_draft
from outrider.target_worker.rounds.buckets import round_buckets
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram

# A bucket's graphs: up to packing, the forward pass, and what follows for sessions without and with processors.
_GRAPHS = 4
_CLOCK_READINGS = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A target that is ready.

    Attributes:
        runner: the model.
        loop: its rounds.
        start_up: seconds and bytes: see `load_target`.
    """

    runner: ModelRunner
    loop: RoundLoop
    start_up: dict[str, Any]


def load_target(config: TargetWorkerConfig, *, source: WeightSource | None = None) -> Target:
    """Load a target as its worker does; with a source, its weights come from there.

    `start_up` has the seconds of loading the model, those of compiling and capturing rounds, how many buckets and
    graphs there are, and on a GPU the memory that rounds take beside weights and KV: what torch has reserved for them,
    and what the device has less.
    """
    began = time.perf_counter()
    engine, folder = config.engine(), config.draft_model
    runner = ModelRunner(engine, source=source, neighbour=folder and room_for_draft(engine, folder))
    draft = folder and load_draft(runner, folder, prefill_tokens=config.prefill_tokens)
    loaded = time.perf_counter()
    rounds = config.rounds(max_model_len=runner.info.max_model_len)
    on_gpu = runner.device.type == "cuda"
    before = _memory(runner.device)
    loop = RoundLoop(runner, rounds, program=RoundProgram.of_runner(runner, rounds, draft=draft))
    ready = time.perf_counter()
    buckets = len(round_buckets(rounds, on_gpu=on_gpu))
    start_up: dict[str, Any] = {
        "load_s": round(loaded - began, 2),
        "warm_up_s": round(ready - loaded, 2),
        "buckets": buckets,
        "graphs": _GRAPHS * buckets if on_gpu else 0,
        "kv_slots": runner.slots.num_slots,
    }
    if on_gpu:
        after = _memory(runner.device)
        start_up |= {"rounds_reserved_bytes": after[0] - before[0], "rounds_device_bytes": before[1] - after[1]}
    return Target(runner=runner, loop=loop, start_up=start_up)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that torch has reserved, and free bytes of the device."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]


def clock_offset(device: torch.device) -> tuple[int, int]:
    """Return what the device's clock is ahead of `time.perf_counter_ns`, and the most by which that may be wrong."""
    if device.type != "cuda":
        return 0, 0
    times = torch.zeros(len(RoundTime), dtype=torch.int64, device=device)
    readings = list[tuple[int, int]]()
    for _ in range(_CLOCK_READINGS):
        torch.cuda.synchronize(device)
        began = time.perf_counter_ns()
        mark_time(times, RoundTime.BEGAN)
        torch.cuda.synchronize(device)
        ended = time.perf_counter_ns()
        readings.append((ended - began, int(times[RoundTime.BEGAN]) - (began + ended) // 2))
    width, offset = min(readings)
    return offset, width // 2
