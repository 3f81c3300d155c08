"""What a target's step costs on the host: `python benchmarks/step_host_time.py`, without a GPU.

Plan, stage, launch, and commit of steps whose device does nothing: it answers at once that every tree's first chain of
two nodes is accepted. On a GPU this time is hidden behind the step before, where another batch waits; where none does,
it stands beside the step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.batch import Int32Array
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StagedStep, StepLayout
from outrider.engine.step_staging import StepAnswer
from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import OpenRequest, TreeRequest
from outrider.target_worker.verifier import Verifier

_PROMPT, _STEPS, _ROUNDS = 1000, 30, 5
SIZES = ((1, 1), (1, 16), (1, 64), (8, 8), (32, 8), (64, 1))


class IdleDevice:
    """A launched step that is done already."""

    logits = None
    is_done = True

    def __init__(self, staged: StagedStep) -> None:
        self._staged = staged

    def wait(self) -> None:
        """Nothing to wait for."""

    def device_ns(self) -> int:
        """No time."""
        return 0

    def result(self) -> StepAnswer:
        """The root and, where there are so many, two nodes of every tree."""
        trees = self._staged.trees
        rows: Int32Array = _tree_rows(self._staged)[:trees, :3].copy()
        accepted = (rows[:, 1:] >= 0).sum(axis=1).astype(np.int32)
        return StepAnswer(tokens=np.full_like(rows, 5), rows=rows, accepted=accepted)


_views: dict[tuple[int, object], Int32Array] = {}


def _tree_rows(staged: StagedStep) -> Int32Array:
    """[S, N] in the step's bytes; made once a buffer, for it is no part of what is measured."""
    key = (staged.data.ctypes.data, staged.bucket)
    if key not in _views:
        _views[key] = StepLayout.of(staged.bucket).arrays(staged.data)["tree_rows"]
    return _views[key]


def make_verifier(folder: Path) -> Verifier:
    """A verifier over a model that is never run."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    runner = ModelRunner(EngineConfig(model_path=folder, num_slots=200_000), decoder=True)
    assert runner.steps is not None
    runner.steps.launch = IdleDevice  # pyright: ignore[reportAttributeAccessIssue] - a device that takes no time
    return Verifier(runner, max_step_tokens=4096)


def measure(verifier: Verifier, sessions: int, rows: int) -> tuple[float, float]:
    """Median microseconds of `begin` and `finish` for trees of `rows` rows, the root counted."""
    keys = [(1, number) for number in range(sessions)]
    for key in keys:
        spec = SamplingSpec(temperature=1.0, seed=key[1], max_new_tokens=3000)
        verifier.open(OpenRequest(key=key, epoch=1, prompt=[key[1] % 64] * _PROMPT, output=[], sampling=spec))
    while verifier.prefill():
        pass
    parents = [max(node - 2, 0) for node in range(rows - 1)]
    length, taken = _PROMPT, []
    for _ in range(_STEPS):
        trees = [
            TreeRequest(key=key, epoch=1, length=length, tokens=[5] * len(parents), parents=parents) for key in keys
        ]
        times = [time.perf_counter()]
        pending = verifier.begin(trees)
        times.append(time.perf_counter())
        step = verifier.finish(pending)
        times.append(time.perf_counter())
        length += len(step.results[0].token_ids)
        taken.append(np.diff(times) * 1e6)
    for key in keys:
        verifier.close(key, 1)
    begin, finish = (statistics.median(column) for column in zip(*taken[5:], strict=True))
    return begin, finish


def main() -> int:
    """Prints the table."""
    torch.set_num_threads(1)
    table = Table(
        "sessions", "rows each", "begin, us", "finish, us", title="host time of a step, best of several rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        verifier = make_verifier(Path(folder))
        for sessions, rows in SIZES:
            rounds = [measure(verifier, sessions, rows) for _ in range(_ROUNDS)]
            begin, finish = min(rounds, key=sum)
            table.add_row(str(sessions), str(rows), f"{begin:.0f}", f"{finish:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: transformers looks for a package kernels
    sys.exit(main())
