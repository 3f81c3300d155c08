"""Ranks on a CPU: real processes, gloo between them, a small model in float32."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider.engine import step_runner, tensor_parallel_leader
from outrider.engine.batch import BatchBuilder
from outrider.engine.buckets import Bucket
from outrider.engine.config import DtypeName
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.step_runner import StepRunner
from outrider.engine.tensor_parallel import Alone, Leader
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError, WorkerUnavailable

_PROMPT = [17, 300, 5, 42, 911, 7, 8, 1020]
# Between a death and its being told, on a busy machine; else it is a few milliseconds.
_SOON_S = 30.0
BUCKET = Bucket(tokens=1, sessions=1, keys=1, query_len=1, logit_rows=1, nodes=1, words=1)


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
    """A process that leads one follower, says its number and whether it has imported transformers' models, as none
    needs whose forward is the decoder; started first, for it takes seconds.
    """
    script = (
        "import sys, time\n"
        "import outrider.target_worker.server\n"
        "from outrider.engine.config import EngineConfig\n"
        "from outrider.engine.tensor_parallel import start_ranks\n"
        "ranks = start_ranks(EngineConfig(model_path=sys.argv[1], tensor_parallel_size=2))\n"
        "ranks.least(3)\n"
        "print(*ranks.pids, 'transformers.modeling_utils' in sys.modules, flush=True)\n"
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


def _signal_follower(runner: ModelRunner, number: signal.Signals) -> None:
    (pid,) = _leader(runner).pids
    os.kill(pid, number)


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


def _greedy(runner: ModelRunner, row: int, count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens after the prompt, each from a step of its own, and their logits."""
    tokens, logits = list(_PROMPT), []
    for first in [0, *range(len(_PROMPT), len(_PROMPT) + count - 1)]:
        runner.slots.extend(row, len(tokens) - first)
        builder = BatchBuilder()
        builder.add_chain(row, tokens[first:], first, True)
        logits.append(runner.forward(builder.build())[0])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(_PROMPT) :], logits


def _forest(runner: ModelRunner) -> torch.Tensor:
    """Logits of two sessions' prompts with trees behind them, in one step."""
    builder = BatchBuilder()
    for _ in range(2):
        row = runner.slots.acquire_row()
        runner.slots.extend(row, 7)
        builder.add_chain(row, _PROMPT[:4], 0, False)
        builder.add_tree(
            row,
            tree_start=4,
            token_ids=_PROMPT[4:7],
            positions=[4, 5, 5],
            masks=np.array([[1], [3], [5]], dtype=np.int64),
            write_indices=range(4, 7),
        )
    return runner.forward(builder.build())


def test_two_ranks_choose_what_one_chooses_until_one_is_killed(pair: ModelRunner, checkpoint: Path) -> None:
    alone = ModelRunner(_config(checkpoint, 1))
    assert isinstance(alone.ranks, Alone)
    tokens, logits = _greedy(alone, alone.slots.acquire_row(), 12)
    shared_tokens, shared_logits = _greedy(pair, pair.slots.acquire_row(), 12)
    assert shared_tokens == tokens
    torch.testing.assert_close(torch.stack(shared_logits), torch.stack(logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(_forest(pair), _forest(alone), rtol=1e-4, atol=1e-4)
    # Each rank holds half of the heads.
    assert pair._caches.keys[0].shape[1] * 2 == alone._caches.keys[0].shape[1]

    # Stopped, it takes a step's bytes and never computes; then it is gone.
    _signal_follower(pair, signal.SIGSTOP)
    began = time.monotonic()
    threading.Timer(0.5, _signal_follower, (pair, signal.SIGKILL)).start()
    for _ in range(2):
        with pytest.raises(WorkerUnavailable, match="rank 1 was killed by signal 9"):
            _forest(pair)
    assert time.monotonic() - began >= 0.4


def test_what_goes_wrong_in_a_rank_is_told(pair: ModelRunner) -> None:
    _leader(pair).lead("capture", "no bucket")
    _leader(pair).lead("launch", "no step")
    with pytest.raises(WorkerUnavailable, match="rank 1: AttributeError: 'str' object"):
        _leader(pair).failed.result(timeout=_SOON_S)


def test_a_rank_that_never_answers_is_given_up(pair: ModelRunner) -> None:
    _signal_follower(pair, signal.SIGSTOP)
    with pytest.raises(WorkerUnavailable, match="not answered in time"), _leader(pair).guard(0.3):
        _greedy(pair, pair.slots.acquire_row(), 1)
    _wait_for_end(_leader(pair).pids[0])


def test_a_rank_that_reads_no_commands_is_given_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ModelRunner(_config(checkpoint, 1), decoder=True)
    assert alone.steps is not None
    leader = Leader(_config(checkpoint, 2), None)
    (pid,) = leader.pids
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(step_runner, "_CAPTURE_TIMEOUT_S", 0.5)
    steps = StepRunner(alone.steps.program, alone.steps.ladder, alone.slots, unrolled=False, graphs=False, ranks=leader)
    with contextlib.closing(leader), pytest.raises(WorkerUnavailable, match="not answered in time"):
        # Far more than a socket holds.
        steps.compile([replace(BUCKET, tokens=tokens) for tokens in range(20_000)])


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
    follower, has_models = other_leader.stdout.readline().split()
    assert has_models == b"False"
    other_leader.kill()
    _wait_for_end(int(follower))


def _save_model(folder: Path) -> None:
    torch.manual_seed(5)
    model = LlamaConfig(
        vocab_size=4099,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(model).save_pretrained(folder)


def _gpu_config(folder: Path, ranks: int, dtype: DtypeName) -> EngineConfig:
    return EngineConfig(
        model_path=folder, device="cuda", dtype=dtype, num_slots=1024, max_num_seqs=8, tensor_parallel_size=ranks
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_choose_what_one_chooses_until_one_is_lost(tmp_path: Path) -> None:
    _save_model(tmp_path)
    found = []
    for ranks in (1, 2):
        runner = ModelRunner(_gpu_config(tmp_path, ranks, "float32"))
        assert runner.steps is not None
        runner.steps.compile(runner.steps.ladder.first_set()[:2])
        # Without graphs, then with them.
        for _ in range(2):
            tokens, logits = _greedy(runner, runner.slots.acquire_row(), 40)
            found.append((tokens, torch.stack(logits).cpu(), _forest(runner).cpu()))
            while runner.steps.missing is not None:
                runner.steps.capture(runner.steps.missing)
        assert runner.steps.graphs > 0
        if ranks == 1:
            runner.close()
    for tokens, logits, forest in found[1:]:
        assert tokens == found[0][0]
        torch.testing.assert_close(logits, found[0][1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(forest, found[0][2], rtol=1e-4, atol=1e-4)

    # The GPU that is left waits in a kernel for numbers that never come.
    row = runner.slots.acquire_row()
    runner.slots.extend(row, 1)
    builder = BatchBuilder()
    builder.add_chain(row, [17], 0, True)
    batch = builder.build()
    _signal_follower(runner, signal.SIGSTOP)
    launched = runner.steps.launch(runner.steps.stage(batch))
    began = time.monotonic()
    threading.Timer(0.5, _signal_follower, (runner, signal.SIGKILL)).start()
    with pytest.raises(WorkerUnavailable, match="rank 1 was killed by signal 9"):
        launched.wait()
    assert time.monotonic() - began >= 0.4
    torch.cuda.synchronize()
    runner.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_in_bfloat16_come_close_to_one(tmp_path: Path) -> None:
    _save_model(tmp_path)
    found = []
    for ranks in (1, 2):
        runner = ModelRunner(_gpu_config(tmp_path, ranks, "bfloat16"))
        assert runner.steps is not None
        runner.steps.compile(runner.steps.ladder.first_set()[:2])
        # Without a graph, then in one.
        for _ in range(2):
            found += [_forest(runner).cpu() for _ in range(2)]
            while runner.steps.missing is not None:
                runner.steps.capture(runner.steps.missing)
        assert runner.steps.graphs > 0
        runner.close()
    for logits in found[1:]:
        assert (logits - found[0]).abs().max() < 0.08 * found[0].std()
    # The same bits in every run.
    assert all(torch.equal(logits, found[4]) for logits in found[5:])
