"""What the tensor-parallel benchmark measures; needs no GPU."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.parallel_bench.command import run
from benchmarks.parallel_bench.models import BenchModel, RandomWeights
from benchmarks.parallel_bench.steps import tree_step


def test_a_step_is_a_tree_whose_lists_and_masks_agree() -> None:
    batch, choices = tree_step(3, 100, context=1024, vocab_size=5000)
    assert (batch.num_rows, batch.key_len[0], batch.tree_mask.shape) == (100, 1124, (100, 2))
    bits = np.unpackbits(batch.tree_mask.view(np.uint8), axis=1, bitorder="little")[:, :100]
    reached, waiting = [0], [0]
    while waiting:
        parent = waiting.pop()
        child = choices.first_child[0, parent]
        while child >= 0:
            # A node sees what its parent sees, and itself; it stands one place further.
            assert (bits[child] == (bits[parent] | (np.arange(100) == child))).all()
            assert batch.positions[child] == batch.positions[parent] + 1
            reached.append(child)
            waiting.append(child)
            child = choices.next_sibling[0, child]
    assert sorted(reached) == list(range(100))
    assert choices.candidates[0, 0] == -1
    assert (choices.candidates[0, 1:] == batch.token_ids[1:]).all()


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
