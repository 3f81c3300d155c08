"""Ranks on a CPU: real processes, gloo between them, a small model in float32."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.outrider.engine.families import save_large
from tests.outrider.engine.step_rows import StepRows, Steps
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider.engine import tensor_parallel_leader
from outrider.engine.config import DtypeName
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.tensor_parallel_leader import Leader
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError, WorkerUnavailable

_PROMPT = [17, 300, 5, 42, 911, 7, 8, 1020]
# Between a death and its being told, on a busy machine; else it is a few milliseconds.
_SOON_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(4)
    # An odd vocabulary: the last rank's part is filled up. Qwen 3: its config takes a rank less to import than Llama's.
    config = Qwen3Config(
        vocab_size=1021,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _config(checkpoint: Path, ranks: int) -> EngineConfig:
    return EngineConfig(
        model_path=checkpoint, num_slots=256, max_num_seqs=8, torch_threads=1, tensor_parallel_size=ranks
    )


@pytest.fixture(scope="module", autouse=True)
def other_leader(checkpoint: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads one follower, and says whether it has imported transformers, which no worker needs; started
    first, for it takes seconds.
    """
    script = (
        "import sys, time\n"
        "import outrider.target_worker.server\n"
        "from outrider.engine.config import EngineConfig\n"
        "from outrider.engine.tensor_parallel_leader import start_ranks\n"
        "ranks = start_ranks(EngineConfig(model_path=sys.argv[1], tensor_parallel_size=2))\n"
        "ranks.least(3)\n"
        "print('transformers' in sys.modules, flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", script, str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as leader:
        yield leader
        leader.kill()


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(_config(checkpoint, 2))
    yield runner
    runner.close()


def _leader(runner: ModelRunner) -> Leader:
    assert isinstance(runner.ranks, Leader)
    return runner.ranks


def _follower(leader_pid: int) -> int:
    """The process number of the one follower that a process leads."""
    (found,) = (
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if _parent(stat) == leader_pid and b"tensor_parallel_rank" in (stat.parent / "cmdline").read_bytes()
    )
    return found


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        # It has ended meanwhile.
        return 0


def _signal_follower(number: signal.Signals) -> int:
    follower = _follower(os.getpid())
    os.kill(follower, number)
    return follower


def _wait_for_end(pid: int) -> None:
    """Until the process is gone, or has ended and is not waited for yet."""
    deadline = time.monotonic() + _SOON_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def _greedy(steps: Steps, count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens after the prompt in an empty row, each from a step of its own, and their logits."""
    slots = steps.runner.slots
    slots.truncate(0, 0)
    tokens, logits = list(_PROMPT), []
    for first in [0, *range(len(_PROMPT), len(_PROMPT) + count - 1)]:
        slots.extend(0, len(tokens) - first)
        builder = steps.builder()
        builder.add_chain(0, tokens[first:], first, True)
        logits.append(steps.logits(builder.build())[0])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(_PROMPT) :], logits


def _forest(steps: Steps) -> StepRows:
    """Two sessions' prompts with trees behind them, in one step."""
    slots, builder = steps.runner.slots, steps.builder()
    for row in (1, 2):
        slots.truncate(row, 0)
        slots.extend(row, 7)
        builder.add_chain(row, _PROMPT[:4], 0, False)
        builder.add_tree(
            row,
            _PROMPT[4:7],
            tree_start=4,
            positions=[4, 5, 5],
            masks=np.array([[1], [3], [5]], dtype=np.int64),
            write_indices=range(4, 7),
        )
    return builder.build()


def test_two_ranks_choose_what_one_chooses_until_one_is_killed(pair: ModelRunner, checkpoint: Path) -> None:
    alone = ModelRunner(_config(checkpoint, 1))
    assert not isinstance(alone.ranks, Leader)
    one, both = Steps(alone), Steps(pair)
    tokens, logits = _greedy(one, 12)
    shared_tokens, shared_logits = _greedy(both, 12)
    assert shared_tokens == tokens
    torch.testing.assert_close(torch.stack(shared_logits), torch.stack(logits), rtol=1e-4, atol=1e-4)
    forest = _forest(both)
    torch.testing.assert_close(both.logits(forest), one.logits(_forest(one)), rtol=1e-4, atol=1e-4)
    # Each rank holds half of the heads.
    assert pair._caches.keys[0].shape[1] * 2 == alone._caches.keys[0].shape[1]

    # Stopped, it takes the command and never computes; then it is gone.
    _signal_follower(signal.SIGSTOP)
    timer = threading.Timer(0.5, _signal_follower, (signal.SIGKILL,))
    timer.start()
    for _ in range(2):
        with pytest.raises(WorkerUnavailable, match="rank 1 was killed by signal 9"):
            both.logits(forest)
    timer.join()


def test_what_goes_wrong_in_a_rank_is_told(pair: ModelRunner) -> None:
    Steps(pair)
    _leader(pair).lead("packed", "no shape")
    with pytest.raises(WorkerUnavailable, match="rank 1: AttributeError: 'str' object"):
        _leader(pair).failed.result(timeout=_SOON_S)


def test_a_rank_that_never_answers_is_given_up(pair: ModelRunner) -> None:
    follower = _signal_follower(signal.SIGSTOP)
    with pytest.raises(WorkerUnavailable, match="not answered in time"), _leader(pair).guard(0.3):
        _greedy(Steps(pair), 1)
    _wait_for_end(follower)


def test_a_rank_that_reads_no_commands_is_given_up(pair: ModelRunner) -> None:
    leader = _leader(pair)
    _signal_follower(signal.SIGSTOP)
    with pytest.raises(WorkerUnavailable, match="not answered in time"), leader.guard(0.5):
        # Far more than a socket holds.
        leader.lead("packed", bytes(8 << 20))


class _GoneForOthers(SafetensorsSource):
    """The weights here; in another process, a folder that is not there."""

    def __reduce__(self) -> tuple[object, ...]:
        return SafetensorsSource, (Path("/no/such/checkpoint"),)


def test_a_rank_that_cannot_load_says_why(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 1: /no/such/checkpoint: neither"):
        ModelRunner(_config(checkpoint, 2), source=_GoneForOthers(checkpoint))


def test_sizes_that_do_not_divide_are_refused_before_anything_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(tensor_parallel_leader, "_Process", started.append)
    with pytest.raises(CheckpointError, match=r"--tensor-parallel-size 7 given.*this model takes 1, 2, 4"):
        ModelRunner(_config(checkpoint, 7))
    assert not started


def test_followers_end_with_a_leader_that_is_killed(other_leader: "subprocess.Popen[bytes]") -> None:
    assert other_leader.stdout is not None
    assert other_leader.stdout.readline() == b"False\n"
    follower = _follower(other_leader.pid)
    other_leader.kill()
    _wait_for_end(follower)


def _gpu_config(folder: Path, ranks: int, dtype: DtypeName) -> EngineConfig:
    return EngineConfig(
        model_path=folder, device="cuda", dtype=dtype, num_slots=1024, max_num_seqs=8, tensor_parallel_size=ranks
    )


def _both_ways(steps: Steps, step: StepRows) -> list[Callable[[], torch.Tensor]]:
    """The step without a graph, then in one."""
    return [lambda: steps.logits(step), steps.capture(step)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_choose_what_one_chooses_until_one_is_lost(tmp_path: Path) -> None:
    save_large(tmp_path)
    found = []
    for ranks in (1, 2):
        runner = ModelRunner(_gpu_config(tmp_path, ranks, "float32"))
        steps = Steps(runner)
        tokens, logits = _greedy(steps, 40)
        step = _forest(steps)
        found += [(tokens, torch.stack(logits).cpu(), forest().cpu()) for forest in _both_ways(steps, step)]
        if ranks == 1:
            runner.close()
    for tokens, logits, forest in found[1:]:
        assert tokens == found[0][0]
        torch.testing.assert_close(logits, found[0][1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(forest, found[0][2], rtol=1e-4, atol=1e-4)

    # The GPU that is left waits in a kernel for numbers that never come.
    _signal_follower(signal.SIGSTOP)
    steps.logits(step)
    done = torch.cuda.Event()
    done.record()
    timer = threading.Timer(0.5, _signal_follower, (signal.SIGKILL,))
    timer.start()
    with pytest.raises(WorkerUnavailable, match="rank 1 was killed by signal 9"), runner.ranks.guard():
        done.synchronize()
    timer.join()
    torch.cuda.synchronize()
    runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_in_bfloat16_come_close_to_one(tmp_path: Path) -> None:
    save_large(tmp_path)
    found = []
    for ranks in (1, 2):
        runner = ModelRunner(_gpu_config(tmp_path, ranks, "bfloat16"))
        steps = Steps(runner)
        found += [forest().cpu() for forest in _both_ways(steps, _forest(steps)) for _ in range(2)]
        runner.close()
    for logits in found[1:]:
        assert (logits - found[0]).abs().max() < 0.08 * found[0].std()
    # The same bits in every run.
    assert all(torch.equal(logits, found[4]) for logits in found[5:])
