"""The draft worker's process: `outrider draft-worker`, with its parts timed, and with bare steps before it serves.

Told by lines on standard input: `begin` a measurement, `end` it, which prints one of JSON. Ends with standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import uvloop
from benchmarks.draft_bench.drive import Point, started, stop
from benchmarks.draft_bench.models import idle_checkpoint
from benchmarks.draft_service_bench.standing_in import timed_launch
from benchmarks.target_bench.models import BenchModel, folder_model, shape_model

from outrider.awake import cores_awake
from outrider.draft_worker import growth_parts, server
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.growth_launch import GrowthLauncher
from outrider.draft_worker.growth_thread import GrowthThread
from outrider.draft_worker.step_plan import StepPlanner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_runner import StepRunner
from outrider.worker import model_info

# Of a step, by the clock and by the thread's processor time.
_PARTS: dict[str, tuple[type, str]] = {
    "apply": (GrowthThread, "_apply_some"),
    "begin": (TreeGrowth, "begin"),
    "plan": (StepPlanner, "plan"),
    "stage": (StepRunner, "stage_growth"),
    "launch": (StepRunner, "launch"),
    "hand out": (GrowthThread, "_hand_out"),
    "meanwhile": (GrowthThread, "_apply_meanwhile"),
    "commit": (TreeGrowth, "commit"),
    "finish": (TreeGrowth, "finish"),
    "collect": (GrowthLauncher, "_ranked"),
    "add": (TreeGrowth, "_add"),
}

_UNLEARNING = 1e9
# Of a session that grows in wide steps until something is committed.
_LIVE_NODES = 512


class Probe:
    """Times the parts of steps while it is on."""

    def __init__(self) -> None:
        self._on = False
        self._wall: dict[str, int] = defaultdict(int)
        self._cpu: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._ends: list[tuple[int, int]] = []
        # Commits, by the steps under way when each was applied.
        self._met = [0, 0, 0]
        self._began_ns = self._finished_ns = 0

    def install(self) -> None:
        """Times every part from now on."""
        for name, (kind, method) in _PARTS.items():
            setattr(kind, method, self._timed(name, getattr(kind, method)))

    def begin(self) -> None:
        """A measurement begins."""
        for counts in (self._wall, self._cpu, self._calls):
            counts.clear()
        self._ends, self._met = [], [0, 0, 0]
        self._began_ns, self._on = time.perf_counter_ns(), True

    def end(self) -> dict[str, Any]:
        """It is over: microseconds of each part a step, and when steps ended."""
        self._on = False
        steps = max(self._calls["finish"], 1)
        return {
            "steps": self._calls["finish"],
            "seconds": (time.perf_counter_ns() - self._began_ns) * 1e-9,
            "wall": {name: total * 1e-3 / steps for name, total in self._wall.items()},
            "cpu": {name: total * 1e-3 / steps for name, total in self._cpu.items()},
            "calls": {name: count / steps for name, count in self._calls.items()},
            "ends": self._ends,
            "met": self._met,
        }

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            if not self._on:
                return function(*args, **named)
            if name == "hand out":
                # What the message will say of steps so far, and when the step that it is of had ended.
                self._ends.append((args[0].load().steps, self._finished_ns))
            if name == "commit":
                self._met[args[0].num_begun] += 1
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            result = function(*args, **named)
            now = time.perf_counter_ns()
            self._wall[name] += now - wall
            self._cpu[name] += time.thread_time_ns() - cpu
            self._calls[name] += 1
            if name == "finish":
                self._finished_ns = now
            return result

        return timed


@contextmanager
def _model(options: dict[str, Any]) -> Iterator[BenchModel]:
    if options["device"] == "cuda":
        with shape_model(options["shape"], torch.device("cuda"), widened=True) as model:
            yield model
    else:
        with idle_checkpoint(options["max_model_len"]) as folder:
            yield folder_model(folder)


def _growth(runner: ModelRunner, config: GrowthConfig, most_begun: int) -> TreeGrowth:
    # Estimates stay those of the prior, so that trees are as wide in the one measurement as in the other.
    growth = TreeGrowth(runner, replace(config, prior_strength=_UNLEARNING))
    growth.most_begun = most_begun
    if runner.device.type == "cpu":
        growth._launcher.overlaps = True
    return growth


def _runner(options: dict[str, Any], config: DraftWorkerConfig, model: BenchModel) -> ModelRunner:
    runner = ModelRunner(config.engine(), decoder=True, source=model.source)
    assert runner.steps is not None
    if config.device == "cpu":
        launch = timed_launch(options["device_ms"], options["launch_ms"])
        StepRunner.launch = lambda _, staged: launch(staged)  # pyright: ignore[reportAttributeAccessIssue] - stands in
    return runner


def _config(options: dict[str, Any], model: BenchModel) -> DraftWorkerConfig:
    sessions, tokens = max(options["sessions"]), options["max_model_len"]
    return DraftWorkerConfig(
        model_path=model.folder,
        device=options["device"],
        max_num_seqs=sessions,
        max_model_len=tokens,
        max_live_nodes=_LIVE_NODES,
        max_step_nodes=64,
        min_path_value=0.003,
        num_slots=sessions * (tokens + _LIVE_NODES),
    )


def bare_step(
    runner: ModelRunner, config: GrowthConfig, point: Point, *, steps: int, most_begun: int
) -> tuple[float, float]:
    """Mean time from step to step in a growth thread without a server, milliseconds, and the rows of a step."""
    config = replace(
        config, max_step_nodes=point.width, max_session_nodes=point.width, min_path_value=0.0, min_acceptance=0.0
    )
    growth = _growth(runner, config, most_begun)
    thread, owner = started(growth, point, 0.0)
    owner.open()
    owner.run(200)
    owner.run(steps)
    times, rows, _ = zip(*owner.noted[:steps], strict=True)
    stop(growth, thread, owner)
    return float(np.mean(np.diff(times))) * 1e-6, float(np.mean(rows))


def main() -> None:
    """Measures bare steps, then serves."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        settle = stack.enter_context(cores_awake(options["keep_cores_awake"]))
        model = stack.enter_context(_model(options))
        config = _config(options, model)
        runner = _runner(options, config, model)
        grown = config.growth(max_model_len=runner.info.max_model_len)
        growth = _growth(runner, grown, options["steps_begun"])
        growth.warm_up()
        # Not before, for it compiles on all cores; bare steps have the cores of those that serve.
        settle()
        growth_parts._model = lambda _: (growth, model_info(runner.info))
        bare = {}
        for sessions, width in zip(options["sessions"], options["bare_rows"], strict=True):
            point = Point(sessions=sessions, width=width, live_nodes=config.max_live_nodes)
            bare[sessions] = bare_step(
                runner, grown, point, steps=options["bare_steps"], most_begun=options["steps_begun"]
            )
        probe = Probe()
        probe.install()

        def ready(address: str) -> None:
            _say({"address": address, "bare": bare, "vocab_size": runner.vocab_size})
            threading.Thread(target=_obey, args=(probe,), daemon=True).start()

        uvloop.run(server.serve(config, ready=ready))


def _obey(probe: Probe) -> None:
    for line in sys.stdin:
        if line.strip() == "begin":
            probe.begin()
        else:
            _say(probe.end())
    os._exit(0)


def _say(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
