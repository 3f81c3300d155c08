"""Every family's forward over chunks and trees against transformers' own, path by path."""

from pathlib import Path

import pytest
import torch
from tests.outrider.engine.families import FAMILIES, expected_logits, own_model, path_steps, save_random
from tests.outrider.engine.step_rows import Steps

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.errors import CheckpointError


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_tree_equal_every_path_alone(family: str, tmp_path: Path) -> None:
    folder = save_random(FAMILIES[family], tmp_path)
    runner = ModelRunner(EngineConfig(model_path=folder, num_slots=64, max_num_seqs=3, torch_threads=1))
    steps = Steps(runner)
    logits = [steps.logits(step) for step in path_steps(runner.slots)][-1]
    torch.testing.assert_close(logits, expected_logits(own_model(folder)), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory")])
def test_kv_that_does_not_fit_says_how_much_and_what_to_change(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(FAMILIES["llama"], tmp_path)

    def zeros(*_shape: object, **_options: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(
        CheckpointError, match=r"1000000 slots take \d+\.\d\d GB\. Lower kv_cache_memory_fraction, kv_b"
    ):
        ModelRunner(EngineConfig(model_path=folder, num_slots=1_000_000, max_num_seqs=1))
