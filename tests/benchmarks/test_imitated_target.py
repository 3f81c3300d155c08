"""The imitated target: what its steps should take, and that they are held for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from benchmarks.end_bench.checkpoints import narrow_target
from benchmarks.end_bench.imitated_target import _AROUND_NS, DeviceClock, StretchedGraphs, rows_and_sessions
from benchmarks.end_bench.services import _imitating
from benchmarks.end_bench.step_times import StepTimes

from outrider.engine.buckets import Bucket
from outrider.engine.step_buffers import StepLayout
from outrider.engine.step_graphs import Program
from outrider.engine.step_program import StepOutput
from outrider.models import embedded_target_path

MS = 1_000_000
BUCKET = Bucket(tokens=8, sessions=4, keys=90, query_len=8, logit_rows=8, nodes=8, words=1)

# (rows, sessions, device ms) of docs/performance.md, "Two GPUs": means of rows, medians of times.
MEASURED = [
    (1, 1, 3.95), (14.6, 1, 4.27), (18, 1, 4.34), (4, 4, 4.17), (59, 4, 4.80), (42, 4, 4.74), (16, 16, 4.85),
    (66, 16, 5.60), (64, 64, 7.82), (64, 64, 7.26), (256, 64, 9.20), (192, 64, 8.56),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "sessions", "device_ms"), MEASURED)
def test_steps_take_what_was_measured_on_a_gpu_of_their_own(rows: float, sessions: int, device_ms: float) -> None:
    assert StepTimes().step_ns(round(rows), sessions) == pytest.approx(device_ms * MS, rel=0.055)


def test_between_points_there_are_lines_and_the_last_one_goes_on() -> None:
    times = StepTimes(rows_ms=((1, 1.0), (3, 2.0), (5, 4.0)), session_us=100)
    found = [times.step_ns(rows, sessions) / MS for rows, sessions in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 0), (7, 0))]
    assert found == [1.1, 1.6, 2.1, 3.2, 4.0, 6.0]
    assert StepTimes.parse(str(times)).step_ns(4, 2) == times.step_ns(4, 2)
    assert StepTimes.parse(str(StepTimes())).step_ns(600, 3) == StepTimes().step_ns(600, 3)
    for rows_ms in (((1, 1.0),), ((3, 1.0), (3, 2.0))):
        with pytest.raises(ValueError, match="two or more that rise"):
            StepTimes(rows_ms=rows_ms)


def a_step(*counts: int) -> torch.Tensor:
    """The bytes of a step of sessions of so many rows."""
    layout = StepLayout.of(BUCKET)
    data = layout.template.copy()
    arrays = layout.arrays(data)
    arrays["rows"][: len(counts)] = range(len(counts))
    arrays["query_start"][1 : 1 + len(counts)] = np.cumsum(counts)
    arrays["query_start"][1 + len(counts) :] = sum(counts)
    return torch.from_numpy(data)


@pytest.mark.parametrize("counts", [(1,), (3, 1), (2, 2, 2, 2)])
def test_rows_and_sessions_are_those_of_the_step_and_not_of_its_bucket(counts: tuple[int, ...]) -> None:
    assert rows_and_sessions(BUCKET, a_step(*counts)) == (sum(counts), len(counts))


class Noted:
    """A model and a clock that note when they are asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[Any] = []

    def run(self, bucket: Bucket, _data: torch.Tensor, _after_layer: Any = None) -> StepOutput:
        self.events.append(bucket)
        return cast(StepOutput, SimpleNamespace(answer="walks"))

    def begin(self) -> None:
        self.events.append("begin")

    def hold(self, duration_ns: int) -> None:
        self.events.append(duration_ns)


def test_a_step_is_held_after_its_model_and_gives_what_that_gave() -> None:
    noted, times = Noted(), StepTimes(rows_ms=((1, 1.0), (2, 2.0)), session_us=100)
    graphs = StretchedGraphs(cast(Program, noted), max_tokens=8, enabled=True, times=times, clock=noted)
    assert graphs.run(BUCKET, a_step(3, 1)).answer == "walks"
    assert noted.events == ["begin", BUCKET, round(4.2 * MS) - _AROUND_NS]


@pytest.mark.parametrize("more", [0, 3])
def test_the_target_has_the_drafts_vocabulary(tmp_path: Path, more: int) -> None:
    small = json.loads((embedded_target_path() / "config.json").read_text(encoding="utf-8"))
    vocab = {"vocab_size": small["vocab_size"] + more}
    (tmp_path / "config.json").write_text(json.dumps(vocab), encoding="utf-8")
    folder = narrow_target(tmp_path, tmp_path / "target")
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert found["vocab_size"] == vocab["vocab_size"]
    assert found["num_hidden_layers"] == small["num_hidden_layers"]
    assert (folder == embedded_target_path()) is not bool(more)


SHOWN = "from outrider.engine import step_runner as r; print(r.StepGraphs.__qualname__.partition('.')[0])"


def python_with(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SHOWN], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_process_with_its_environment_imitates_and_one_that_cannot_ends() -> None:
    environment = _imitating(StepTimes())
    assert python_with(environment).stdout == "imitate\n"
    assert python_with(environment | {"OUTRIDER_IMITATED_STEP_TIMES": ""}).stdout == "StepGraphs\n"
    failed = python_with(environment | {"OUTRIDER_IMITATED_STEP_TIMES": '{"rows_ms": []}'})
    assert failed.returncode and "cannot be imitated" in failed.stderr
    assert not failed.stdout


@pytest.mark.gpu
def test_the_device_holds_a_step_until_its_time_is_over() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    clock = DeviceClock(torch.device("cuda"))
    for duration_ns in (3 * MS, 5 * MS):
        clock.begin()
        clock.hold(duration_ns)
        begin, end = clock.times_ns.tolist()
        assert end - begin >= duration_ns
    # What took longer by itself is not held.
    clock.hold(MS)
    assert clock.times_ns.tolist()[0] == begin
