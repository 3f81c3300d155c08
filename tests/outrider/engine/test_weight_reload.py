"""Other weights in the place of those that run: afterwards it is the other model; what does not fit is told."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.outrider.engine.families import SIZES, WINDOWED, save_large
from tests.outrider.engine.step_rows import StepRows, Steps
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig

from outrider.engine import weight_version
from outrider.engine.decoder_weights import load_decoder_weights
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.weight_reload import RunningModel, check_weights
from outrider.engine.weight_source import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from outrider.engine.weight_version import weights_version
from outrider.errors import CheckpointError
from outrider.kernels.linear.scaled_weight import ScaledWeight
from outrider.models import embedded_target_path

LLAMA = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
TIED = LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
# Norms with an offset, of heads and of what is added; a scaled embedding.
GEMMA = Gemma3TextConfig(**{**SIZES, **WINDOWED, "tie_word_embeddings": True})
PROMPT = [5, 7, 90, 3, 41, 11, 2, 66, 8]


def save(config: PretrainedConfig, folder: Path, *, seed: int) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PretrainedConfig, int], Path]:
    kept: dict[tuple[int, int], Path] = {}

    def make(config: PretrainedConfig, seed: int) -> Path:
        key = id(config), seed
        if key not in kept:
            kept[key] = save(config, tmp_path_factory.mktemp("weights"), seed=seed)
        return kept[key]

    return make


@pytest.fixture
def copy(folders, tmp_path: Path) -> Path:
    """Return a copy of LLAMA's other weights, to be spoilt."""
    return Path(shutil.copytree(folders(LLAMA, 2), tmp_path / "copy"))


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    config = EngineConfig(model_path=folder, num_slots=64, max_num_seqs=2, torch_threads=1, **options)
    return ModelRunner(config)


def prompt_step(steps: Steps) -> StepRows:
    """The prompt in the first row, which is empty again."""
    slots, builder = steps.runner.slots, steps.builder()
    slots.extend(0, len(PROMPT))
    builder.add_chain(0, PROMPT, 0, True)
    step = builder.build()
    slots.truncate(0, 0)
    return step


def logits(runner: ModelRunner) -> torch.Tensor:
    steps = Steps(runner)
    return steps.logits(prompt_step(steps))


def pointers(runner: ModelRunner) -> list[int]:
    """Addresses of what a graph reads; a packed weight is none of it."""
    weights = runner.running().weights
    tensors = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [getattr(layer, field.name) for field in dataclasses.fields(layer)]
    held = [tensor.values if isinstance(tensor, ScaledWeight) else tensor for tensor in tensors]
    return [tensor.data_ptr() for tensor in held if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize(
    ("config", "options"),
    [(LLAMA, {}), (TIED, {}), (GEMMA, {}), (LLAMA, {"quantization": "fp8"}), (TIED, {"dtype": "bfloat16"})],
    ids=["llama", "tied", "gemma3", "fp8", "bfloat16"],
)
def test_what_runs_afterwards_is_the_other_model(folders, config, options):
    old, new = folders(config, 1), folders(config, 2)
    runner, fresh = runner_of(old, **options), runner_of(new, **options)
    before, there = logits(runner), pointers(runner)
    checked = check_weights(runner.running(), new)
    assert checked.version == weights_version(new) != weights_version(old)
    assert torch.equal(logits(runner), before)
    runner.refill(new)
    assert torch.equal(logits(runner), logits(fresh))
    # A graph that was captured reads where it has always read.
    assert pointers(runner) == there
    runner.refill(old)
    assert torch.equal(logits(runner), before)
    assert weights_version(old) == check_weights(runner.running(), old).version


def test_tokens_that_share_a_row_of_the_embedding(folders, tmp_path):
    """A checkpoint that stores their row once loads, and reloads, as what transformers computes with every row."""
    model: Any = AutoModelForCausalLM.from_pretrained(folders(TIED, 2))
    embedding = model.get_input_embeddings().weight
    row_of = torch.arange(len(embedding)).clamp(max=40)
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    packed = Path(shutil.copytree(folders(TIED, 2), tmp_path / "packed"))
    name = "model.embed_tokens.weight"
    stored = {name: embedding[:41].contiguous(), f"{name}_rows": row_of.int()}
    save_file(weights | stored, packed / SINGLE_FILE)
    with torch.inference_mode():
        embedding.copy_(embedding[row_of])
        expected = model(torch.tensor([PROMPT])).logits[0, -1:]
    runner = runner_of(folders(TIED, 1))
    check_weights(runner.running(), packed)
    runner.refill(packed)
    for each in (runner_of(packed), runner):
        torch.testing.assert_close(logits(each), expected, rtol=1e-4, atol=1e-4)
    version = weights_version(packed)
    save_file(weights | stored | {f"{name}_rows": row_of.flip(0).contiguous().int()}, packed / SINGLE_FILE)
    assert weights_version(packed) != version
    save_file(weights | stored | {f"{name}_rows": row_of.int() + 1}, packed / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=f"{name}_rows names row 41, and {name} has 41"):
        check_weights(runner.running(), packed)


def test_the_parts_of_several_ranks_are_refilled_each(folders):
    old, new = folders(LLAMA, 1), folders(LLAMA, 2)
    pair, fresh = runner_of(old, tensor_parallel_size=2), runner_of(new)
    try:
        before = logits(pair)
        check_weights(pair.running(), new)
        pair.refill(new)
        after = logits(pair)
    finally:
        pair.close()
    torch.testing.assert_close(after, logits(fresh), atol=1e-4, rtol=1e-4)
    assert not np.allclose(after.numpy(), before.numpy(), atol=0.1)


def test_a_version_is_of_the_numbers_alone(folders, tmp_path):
    whole = folders(LLAMA, 1)
    tensors = load_file(whole / SINGLE_FILE)
    sharded = tmp_path / "another-name"
    sharded.mkdir()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, sharded / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert weights_version(sharded) == weights_version(whole)
    tensors[names[3]].view(-1)[0] += 1
    save_file({name: tensors[name] for name in parts["b.safetensors"]}, sharded / "b.safetensors")
    assert weights_version(sharded) != weights_version(whole)


def test_a_file_that_is_shortened_while_it_is_read_ends_nothing_else(copy: Path, monkeypatch: pytest.MonkeyPatch):
    path, digest = copy / SINGLE_FILE, weight_version._digest

    def shorten(*part: Any) -> bytes:
        os.truncate(path, 4096)
        return digest(*part)

    monkeypatch.setattr(weight_version, "_digest", shorten)
    with pytest.raises(CheckpointError, match="become shorter while it was read"):
        weights_version(copy)


def spoil_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def spoil_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def halve(folder: Path) -> None:
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[: len(content) // 2])


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / SINGLE_FILE).unlink(), r"no \*\.safetensors|neither"),
    "truncated": (halve, "truncated or corrupt"),
    "fewer": (
        lambda folder: spoil_tensors(folder, lambda held: held.pop("model.norm.weight")),
        "1 weights are missing, model.norm.weight first",
    ),
    "shape": (
        lambda folder: spoil_tensors(folder, lambda held: held.update({"model.norm.weight": torch.ones(33)})),
        r"model.norm.weight has shape \[33\], \[32\] needed",
    ),
    "architecture": (
        lambda folder: spoil_config(folder, rms_norm_eps=1e-3),
        "config.json: norm_eps 0.001 given, 1e-06 needed",
    ),
    "generation": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [7]}'),
        r"eos_token_ids \(7,\) given, \(2,\) needed",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}'),
        "tokenizer_hash '[0-9a-f]+' given, '' needed",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_does_not_fit_is_told_and_changes_nothing(folders, copy: Path, name: str):
    runner = runner_of(folders(LLAMA, 1))
    before = logits(runner)
    spoil, message = SPOILT[name]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message):
        check_weights(runner.running(), copy)
    assert torch.equal(logits(runner), before)


def test_weights_of_another_kind_are_refused(folders, tmp_path):
    # As if they ran on a GPU, where nothing is packed; the first ones had come with 8 bits.
    rounded = unpacked(folders(LLAMA, 1), quantized=True)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has 16 or 32 bits a number, 8 needed"):
        check_weights(rounded, folders(LLAMA, 2))
    untied = Path(shutil.copytree(folders(TIED, 2), tmp_path / "untied"))
    spoil_tensors(untied, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] * 2}))
    with pytest.raises(CheckpointError, match="it has an output layer of its own"):
        check_weights(unpacked(folders(TIED, 1)), untied)


def unpacked(folder: Path, *, quantized: bool = False) -> RunningModel:
    running = runner_of(folder).running()
    weights = load_decoder_weights(SafetensorsSource(folder), running.spec, "cpu", torch.float32, quantized=quantized)
    return dataclasses.replace(running, weights=weights)


def test_files_that_are_written_meanwhile_are_noticed(folders, copy: Path):
    checked = check_weights(runner_of(folders(LLAMA, 1)).running(), copy)
    checked.check_unchanged()
    spoil_tensors(copy, lambda held: held["model.norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match="its files have changed since they were checked"):
        checked.check_unchanged()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"tensor_parallel_size": 2}], ids=str)
def test_graphs_that_were_captured_run_the_other_weights(tmp_path: Path, options: dict[str, Any]):
    ranks = options.get("tensor_parallel_size", 1)
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs as many CUDA devices")
    # The embedded target has one key head, which two ranks cannot share.
    first = Path(embedded_target_path()) if ranks == 1 else save_large(tmp_path / "first")
    other = Path(shutil.copytree(first, tmp_path / "other"))
    for file in other.glob("*.safetensors"):
        save_file({name: tensor * 1.25 for name, tensor in load_file(file).items()}, file)
    # One after the other: a process is in one group of ranks at a time.
    with _captured(other, options) as fresh:
        wanted = fresh.logits()
    with _captured(first, options) as running:
        runner = running.runner
        before, there = running.logits(), pointers(runner)
        check_weights(runner.running(), other)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        runner.refill(other)
        # A layer at a time beside what is there, never a second model.
        weights = sum(file.stat().st_size for file in other.glob("*.safetensors"))
        assert torch.cuda.max_memory_allocated() - held < weights / 2
        assert pointers(runner) == there
        after = running.logits()
        torch.testing.assert_close(after, wanted, atol=0.05, rtol=0.01)
        assert (after - before).abs().max() > 0.5
        runner.refill(first)
        assert torch.equal(running.logits(), before)


class _Captured(NamedTuple):
    """A runner, and the graph that computes the prompt's logits."""

    runner: ModelRunner
    logits: Callable[[], torch.Tensor]


@contextmanager
def _captured(path: Path, options: dict[str, Any]) -> Iterator[_Captured]:
    config = EngineConfig(model_path=path, device="cuda", num_slots=4096, max_num_seqs=4, **options)
    with closing(ModelRunner(config)) as runner:
        steps = Steps(runner)
        yield _Captured(runner, steps.capture(prompt_step(steps)))
