"""Whatever a step asks for, its kernels were compiled at the warm-up: launches of a GPU's steps, by what they compile.

Nothing is launched. Every launch is noted with what Triton would compile a kernel for: its constants, and which of its
arguments are 1, multiples of 16, or aligned. So this runs without a GPU, as if on an H200.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import decoder_loading
from outrider.engine.buckets import Bucket
from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StepLayout
from outrider.engine.weight_source import FunctionSource
from outrider.kernels import skinny_linear, skinny_linear_launch, tree_attention_launch
from outrider.kernels.tree_attention import tree_attention

triton = pytest.importorskip("triton")

Kernels = set[tuple[str, str, str]]
_HEADS, _KV_HEADS, _HEAD_DIM, _MULTIPROCESSORS = 4, 1, 64, 132
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


class Enough(Exception):
    """The layers that differ have run."""


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, binders, found = make_backend(GPUTarget("cuda", 90, 32)), {}, set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self not in binders:
            binders[self] = create_function_from_signature(self.signature, self.params, backend)
        _, compiled_for, chosen = binders[self](*arguments, debug=False, instrumentation_mode="", **options)
        found.add((self.__name__, str(compiled_for), str(sorted(chosen.items()))))

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype)

    monkeypatch.setattr(JITFunction, "run", run)
    as_on_hopper = {
        "uses_triton": lambda _tensor: True,
        "launches_early": lambda _device: True,
        "early_options": lambda _device: {"EARLY": True, "launch_pdl": True},
    }
    for name, module in list(sys.modules.items()):
        for attribute in as_on_hopper if name.startswith("outrider.kernels.") else ():
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, as_on_hopper[attribute])
    for module, attribute, value in (
        (skinny_linear_launch, "_has_stream", True),
        (skinny_linear_launch, "_multiprocessors", _MULTIPROCESSORS),
        (tree_attention_launch, "runs_specialised", True),
        (tree_attention_launch, "multiprocessors", _MULTIPROCESSORS),
    ):
        monkeypatch.setattr(module, attribute, lambda _device, value=value: value)
    monkeypatch.setattr(skinny_linear, "_is_ours", lambda call: call.rows.shape[0] <= skinny_linear.MOST_ROWS)
    monkeypatch.setattr(skinny_linear, "_of_many", product)
    monkeypatch.setattr(decoder_loading, "attention_operator", lambda _name, _head_dim: tree_attention)
    return found


def make_runner(folder: Path, *, nodes: int) -> ModelRunner:
    """The decoder over empty weights."""
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    (folder / "model.safetensors").touch()
    hidden, inner, wide = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _HEADS * _HEAD_DIM
    sizes = {
        "embed_tokens": (512, hidden), "lm_head": (512, hidden), "q_proj": (wide, hidden), "o_proj": (hidden, wide),
        "k_proj": (_HEAD_DIM, hidden), "v_proj": (_HEAD_DIM, hidden), "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    source = FunctionSource(
        lambda name: torch.ones(sizes.get(name.split(".")[-2], (hidden,)), dtype=torch.bfloat16), "no weights"
    )
    config = EngineConfig(
        model_path=folder, dtype="bfloat16", num_slots=4096, max_num_seqs=64, max_tree_nodes=nodes, torch_threads=1
    )
    return ModelRunner(config, decoder=True, source=source)


def run(runner: ModelRunner, buckets: Iterable[Bucket], *, layers: int | None = None) -> None:
    """Whole steps, or the first layers of them."""

    def after_layer(count: int) -> None:
        if count == layers:
            raise Enough

    assert runner.steps is not None
    for bucket in buckets:
        data = torch.from_numpy(StepLayout.of(bucket).template.copy())
        try:
            runner.steps.program.run(bucket, data, after_layer)
        except Enough:
            assert layers is not None


def any_need(chance: random.Random, *, most_tokens: int) -> Bucket:
    tokens = min(chance.choice([chance.randint(1, 100), chance.randint(1, 512), most_tokens]), most_tokens)
    sessions = min(chance.choice([1, chance.randint(1, 20), 64]), tokens)
    query_len = chance.randint(-(-tokens // sessions), tokens - sessions + 1)
    logit_rows = chance.randint(0, min(tokens, 512))
    nodes = 0 if not logit_rows else chance.randint(1, min(query_len, logit_rows, 65))
    return Bucket(
        tokens=tokens, sessions=sessions, keys=chance.randint(query_len, 2048), query_len=query_len,
        logit_rows=logit_rows, nodes=nodes, words=(nodes + 63) // 64 or 1,
    )  # fmt: skip


def test_verification_and_prefill_of_any_sessions_find_theirs(noted: Kernels, tmp_path: Path) -> None:
    runner = make_runner(tmp_path, nodes=64)
    assert runner.steps is not None
    ladder = runner.steps.ladder
    run(runner, ladder.first_set())
    kernels = len(noted)
    run(runner, ladder.rehearsal(), layers=2)
    known = set(noted)
    assert len(known) > kernels > 20
    chance = random.Random(0)
    run(runner, {ladder.bucket(any_need(chance, most_tokens=1500)) for _ in range(400)})
    assert noted - known == set()
