"""Operators of the configured attention backends, all of which give a model the same logits."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.outrider.engine.families import SIZES
from tests.outrider.engine.step_rows import Steps, ancestor_masks, node_depths
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.engine.attention import attention_of
from outrider.engine.config import AttentionBackend, EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.errors import CheckpointError


def test_flashinfer_names_the_head_sizes_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    config = EngineConfig(model_path="x", device="cuda", attention_backend="flashinfer")
    with pytest.raises(
        CheckpointError, match=r"x: attention_backend: flashinfer takes head sizes \(64, 128, 256\), not 96"
    ):
        attention_of(config, 96)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)  # FlashInfer compiles its kernels at their first use
def test_all_backends_give_the_same_logits_on_cuda(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = _save_llama(tmp_path, head_dim=64)
    options: dict[str, Any] = {"model_path": folder, "device": "cuda", "num_slots": 32}
    expected = _logits(ModelRunner(EngineConfig(**options, dtype="float32", attention_backend="reference")))
    logits = _logits(ModelRunner(EngineConfig(**options, dtype="float32", attention_backend="triton")))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    backends: list[AttentionBackend] = ["triton", "reference"]
    if importlib.util.find_spec("flashinfer") is not None:
        backends.append("flashinfer")
    for backend in backends:
        logits = _logits(ModelRunner(EngineConfig(**options, dtype="bfloat16", attention_backend=backend)))
        assert (logits - expected).norm() < 0.05 * expected.norm(), backend


@pytest.mark.gpu
def test_a_model_that_flashinfer_cannot_run_is_refused_at_start(tmp_path: Path) -> None:
    if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs a CUDA device and FlashInfer")
    folder = _save_llama(tmp_path, head_dim=16)
    with pytest.raises(CheckpointError, match="flashinfer takes head sizes"):
        ModelRunner(EngineConfig(model_path=folder, device="cuda", attention_backend="flashinfer", num_slots=8))


def _logits(runner: ModelRunner) -> torch.Tensor:
    """Return the logits of a prompt in two chunks and a tree of four nodes behind it, in one session."""
    steps, prompt, parents = Steps(runner), [3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 1]
    runner.slots.extend(0, len(prompt) + len(parents))
    for begin, end in ((0, 5), (5, 7)):
        builder = steps.builder()
        builder.add_chain(0, prompt[begin:end], begin, False)
        steps.logits(builder.build())
    builder = steps.builder()
    builder.add_tree(
        0,
        [6, 20, 30, 40],
        tree_start=7,
        positions=[7 + depth for depth in node_depths(parents)],
        masks=ancestor_masks(parents),
        write_indices=range(7, 11),
    )
    return steps.logits(builder.build()).float().cpu()


def _save_llama(folder: Path, *, head_dim: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "head_dim": head_dim})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
