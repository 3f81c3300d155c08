"""Measurements of the tensor-parallel benchmark; no GPU needed."""

import pickle
from pathlib import Path

import pytest
import torch
from benchmarks.parallel_bench.command import measure_rounds, run
from benchmarks.parallel_bench.models import BenchModel, RandomWeights
from benchmarks.rounds.loading import load_target

from outrider.models import embedded_draft_path
from outrider.target_worker.config import TargetWorkerConfig


def test_rounds_of_a_model_are_timed() -> None:
    target = load_target(TargetWorkerConfig(model_path=embedded_draft_path(), max_num_seqs=2, num_slots=1000))
    times = measure_rounds(target, 2, context=8, rounds=3)
    assert times.sessions == 2
    assert 0 < times.forward_ms < times.round_ms
    assert target.loop.session_count == 0


def test_ranks_read_their_part_of_the_weights(tmp_path: Path) -> None:
    model = BenchModel.of("70b", tmp_path)
    assert model.read_bytes(torch.bfloat16, 1) == pytest.approx(139.0e9, rel=0.01)
    assert model.read_bytes(torch.bfloat16, 2) == pytest.approx(69.5e9, rel=0.01)
    sent = pickle.loads(pickle.dumps(model.source()))
    assert isinstance(sent._make, RandomWeights)
    assert sent._make.shapes["model.layers.79.mlp.down_proj.weight"] == (8192, 28672)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_without_gpus_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["8b@2"]) == 2
    assert "2 CUDA devices are needed, torch finds 0" in capsys.readouterr().err
