"""What a target's step costs on the host: `python benchmarks/step_host_time.py`, without a GPU.

Plan, stage, launch, and commit of steps whose device does nothing: it answers at once that every tree's first chain of
two nodes is accepted. On a GPU this time is hidden behind the step before, where another batch waits; where none does,
it stands beside the step. Of a batch that was sent ahead, only unpacking is hidden: between two steps lie `finish`, the
choice of what survives of the batch, and `begin`. The *turn* is all that the step thread does from the end of a step on
the device to the launch of the one that was sent ahead, its own bookkeeping included; *after*, what it does from there
until the step is answered and it waits again.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.batch import Int32Array
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StagedStep, StepLayout
from outrider.engine.step_program import answer_len
from outrider.engine.step_staging import StepAnswer
from outrider.engine.step_trees import read_answer
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import OpenRequest, SessionKey, TreeRequest
from outrider.target_worker.step_jobs import Batch
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.succession import StreamSteps
from outrider.target_worker.unpacking import unpack
from outrider.target_worker.verifier import Verifier
from outrider.v1 import target_pb2
from outrider.wire import floats_to_bytes

_PROMPT, _STEPS, _ROUNDS = 1000, 30, 9
# The token that the device chooses everywhere.
_CHOSEN = 6
SIZES = ((1, 1), (1, 16), (1, 64), (8, 8), (16, 1), (16, 4), (32, 8), (64, 1), (64, 4))


class IdleDevice:
    """A launched step that is done already.

    Attributes:
        launched_s: when the last one of all was launched, by `time.perf_counter`.
        asked_s: when its answer was asked for.
    """

    logits = None
    is_done = True
    launched_s = asked_s = 0.0

    def __init__(self, staged: StagedStep) -> None:
        IdleDevice.launched_s = time.perf_counter()
        self._staged = staged

    def wait(self) -> None:
        """Nothing to wait for."""

    def device_ns(self) -> int:
        """No time."""
        return 0

    def result(self) -> StepAnswer:
        """The root and, where there are so many, two nodes of every tree."""
        staged, bucket = self._staged, self._staged.bucket
        words = np.full(answer_len(bucket), _CHOSEN, dtype=np.int32)
        rows: Int32Array = _tree_rows(staged)[: staged.trees, :3]
        paths = words[bucket.logit_rows :][: bucket.sessions * bucket.nodes].reshape(bucket.sessions, bucket.nodes)
        paths[: staged.trees, : rows.shape[1]] = rows
        words[bucket.logit_rows + bucket.sessions * bucket.nodes :][: staged.trees] = (rows[:, 1:] >= 0).sum(axis=1)
        IdleDevice.asked_s = time.perf_counter()
        return read_answer(words, staged)


_views: dict[tuple[int, object], Int32Array] = {}


def _tree_rows(staged: StagedStep) -> Int32Array:
    """[S, N] in the step's bytes; made once a buffer, for it is no part of what is measured."""
    key = (staged.data.ctypes.data, staged.bucket)
    if key not in _views:
        _views[key] = StepLayout.of(staged.bucket).arrays(staged.data)["tree_rows"]
    return _views[key]


class _LaunchingVerifier(Verifier):
    """One whose step thread begins the next step before it answers the one that has ended, as on a GPU."""

    @property
    def goes_on_alone(self) -> bool:
        """As on a GPU."""
        return True

    @property
    def may_compile(self) -> bool:
        """As on a GPU."""
        return True


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
    return _LaunchingVerifier(runner, max_step_tokens=4096)


def measure(verifier: Verifier, sessions: int, rows: int) -> tuple[float, ...]:
    """Median microseconds of `begin` and `finish` for trees of `rows` rows, the root counted."""
    keys = _opened(verifier, sessions)
    parents = _parents(rows)
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
        verifier.learn()
        length += len(step.results[0].token_ids)
        taken.append(np.diff(times) * 1e6)
    _close(verifier, keys)
    return _medians(taken)


def measure_ahead(verifier: Verifier, sessions: int, rows: int) -> tuple[float, ...]:
    """Median microseconds of `unpack`, `finish`, the choice of what survives, and `begin`, for batches sent ahead.

    Each has twice the nodes that are verified of it: below the path that is accepted, and below a sibling of its.
    """
    keys = _opened(verifier, sessions)
    parents = _parents(rows)
    trees: Sequence[TreeRequest] = [
        TreeRequest(key=key, epoch=1, length=_PROMPT, tokens=[5] * len(parents), parents=parents) for key in keys
    ]
    pending, taken, length, stream = verifier.begin(trees), [], _PROMPT, StreamSteps()
    for step_number in range(1, _STEPS + 1):
        message = _successor(keys, step_number, length, parents).SerializeToString()
        times = [time.perf_counter()]
        batch, _ = unpack(target_pb2.VerifyRequest.FromString(message), last_step=step_number, stream=stream)
        assert batch.successor is not None
        stream.prepare(batch.successor, step_number, trees)
        times.append(time.perf_counter())
        step = verifier.finish(pending)
        times.append(time.perf_counter())
        stream.ends(step_number, trees, step.results)
        trees = stream.trees_of(batch.successor)
        times.append(time.perf_counter())
        pending = verifier.begin(trees)
        times.append(time.perf_counter())
        verifier.learn()
        assert len(trees[0].tokens) == len(parents), "the successor lacks what it was to verify"
        length += len(step.results[0].token_ids)
        taken.append(np.diff(times) * 1e6)
    verifier.finish(pending)
    _close(verifier, keys)
    return _medians(taken)


def measure_turn(verifier: Verifier, sessions: int, rows: int, **sampling: Any) -> tuple[float, ...]:
    """Median microseconds of a step thread's turn and of what it does after it, for batches as `measure_ahead`'s.

    The thread's own loop is gone through here, step by step: which thread that is makes no difference to it.
    """
    keys = _opened(verifier, sessions, **sampling)
    parents = _parents(rows)
    trees = [TreeRequest(key=key, epoch=1, length=_PROMPT, tokens=[5] * len(parents), parents=parents) for key in keys]
    thread, stream = StepThread(lambda: verifier), StreamSteps()
    done = thread.submit(Batch(trees=trees, step=1, stream=stream))
    thread.turn(verifier)
    taken, length = [], _PROMPT
    for step_number in range(1, _STEPS + 1):
        message = _successor(keys, step_number, length, parents)
        batch, _ = unpack(message, last_step=step_number, stream=stream)
        following = thread.submit(batch)
        thread.turn(verifier)
        ended_s = time.perf_counter()
        count = len(done.result().results[0].token_ids)
        assert count == min(rows, 3), "the successor lacks what it was to verify"
        length += count
        done = following
        taken.append(np.diff([IdleDevice.asked_s, IdleDevice.launched_s, ended_s]) * 1e6)
    thread.turn(verifier)
    assert done.done(), "a step was begun more or less than was asked for"
    _close(verifier, keys)
    return _medians(taken)


def measure_coins(verifier: Verifier, sessions: int, rows: int) -> tuple[float, ...]:
    """The same where coins decide that the first chain is accepted: benchmarks of the service run so."""
    rates = (1.0, 1.0, 0.0)
    return measure_turn(verifier, sessions, rows, verification=VerificationRule.SYNTHETIC, synthetic_rates=rates)


def _successor(
    keys: Sequence[SessionKey], follows: int, length: int, parents: Sequence[int]
) -> target_pb2.VerifyRequest:
    """The batch after a step of trees with these parents, of which the device accepts as many nodes as it can."""
    verified = len(parents)
    end, first = min(verified, 2), verified + 1
    growth, values = [end], [0.5]
    if verified:
        for root, value in ((first, 0.4), (1, 0.1)):
            own = len(growth) + verified
            growth += [root if parent == 0 else own + parent for parent in parents]
            values += [value] * verified
    else:
        growth, values = [], []
    request = target_pb2.VerifyRequest(incarnation=1, step=follows + 1)
    request.trees.session_ids.extend(key[1] for key in keys)
    request.trees.epochs.extend([1] * len(keys))
    request.trees.lengths.extend([length] * len(keys))
    request.trees.node_counts.extend([len(growth)] * len(keys))
    request.trees.tokens.extend([_CHOSEN, *[5] * (len(growth) - 1)][: len(growth)] * len(keys))
    request.trees.parents.extend(growth * len(keys))
    request.trees.values = floats_to_bytes(values * len(keys))
    request.trees.max_nodes.extend([max(verified, 1)] * len(keys))
    request.trees.max_depths.extend([64] * len(keys))
    request.trees.max_total_nodes = 4096
    request.trees.follows = follows
    return request


def _parents(rows: int) -> list[int]:
    """Of the nodes of a tree of so many rows: a chain of two, and others."""
    return [node if node < 2 else node - 2 for node in range(rows - 1)]


def _opened(verifier: Verifier, sessions: int, **sampling: Any) -> list[SessionKey]:
    """So many sessions whose prompts are computed."""
    keys = [(1, number) for number in range(sessions)]
    for key in keys:
        spec = SamplingSpec(temperature=1.0, seed=key[1], max_new_tokens=3000, **sampling)
        verifier.open(OpenRequest(key=key, epoch=1, prompt=[key[1] % 64] * _PROMPT, output=[], sampling=spec))
    while verifier.prefill():
        pass
    return keys


def _close(verifier: Verifier, keys: Sequence[SessionKey]) -> None:
    for key in keys:
        verifier.close(key, 1)


def _medians(taken: Sequence[np.ndarray]) -> tuple[float, ...]:
    """Of each column, without the first steps."""
    return tuple(statistics.median(column) for column in zip(*taken[5:], strict=True))


def main() -> int:
    """Prints the tables."""
    torch.set_num_threads(1)
    plain = Table("sessions", "rows each", "begin, us", "finish, us", title="a step, best of several rounds")
    ahead = Table(
        "sessions", "rows each", "unpack, us", "finish, us", "pick, us", "begin, us", title="a batch sent ahead"
    )
    coins = Table("sessions", "rows each", "turn, us", "after, us", title="the same where coins decide")
    turn = Table("sessions", "rows each", "turn, us", "after, us", title="the step thread, batches sent ahead")
    with tempfile.TemporaryDirectory() as folder:
        verifier = make_verifier(Path(folder))
        for sessions, rows in SIZES:
            for table, measured in (
                (plain, measure),
                (ahead, measure_ahead),
                (turn, measure_turn),
                (coins, measure_coins),
            ):
                # Each by itself: rounds differ in what disturbed them.
                rounds = [measured(verifier, sessions, rows) for _ in range(_ROUNDS)]
                best = [min(column) for column in zip(*rounds, strict=True)]
                table.add_row(str(sessions), str(rows), *(f"{time_us:.0f}" for time_us in best))
    for table in (plain, ahead, turn, coins):
        Console().print(table)
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: transformers looks for a package kernels
    sys.exit(main())
