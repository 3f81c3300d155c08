"""The decoder's logits over chunks and trees against transformers' own, path by path; on one rank, on two, on CUDA."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.function_source import FunctionSource
from tests.outrider.engine.families import (
    FAMILIES,
    NODES,
    PROMPTS,
    SIZES,
    expected_logits,
    own_model,
    path_steps,
    save_random,
)
from tests.outrider.engine.step_rows import StepBuilder, StepRows
from transformers import (
    AutoConfig,
    LlamaConfig,
)

from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import load_decoder_weights, tensor_shapes
from outrider.engine.kv_slots import SlotTable
from outrider.engine.weight_source import SafetensorsSource
from outrider.errors import CheckpointError
from outrider.kernels.tree_attention import tree_attention
from outrider.models import embedded_target_path

SLOTS = 256


class Session:
    """One decoder of `rank` with its caches: several sessions' rows step by step."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world_size: int = 1,
        links: Mapping[str, Any] | None = None,
        split_keys: int | None = None,
    ) -> None:
        spec = DecoderSpec.of(AutoConfig.from_pretrained(folder).to_dict())
        weights = load_decoder_weights(SafetensorsSource(folder), spec, device, dtype, rank=rank, world_size=world_size)
        self.decoder = Decoder(spec, weights, attend=tree_attention, **(links or {}))
        self.slots = SlotTable(num_slots=SLOTS, max_rows=16, max_row_len=SLOTS)
        self.device, self.split_keys = device, split_keys
        shape = (SLOTS, spec.kv_heads // world_size, spec.head_dim)
        self.caches = [[torch.zeros(shape, dtype=dtype, device=device) for _ in spec.layers] for _ in range(2)]
        self.slot_positions = torch.zeros(SLOTS, dtype=torch.int32, device=device)

    def inputs(self, step: StepRows) -> DecoderInputs:
        """Return the decoder's inputs, with positions stored as the forward pass does."""
        packed = step.packed
        self.slot_positions[packed.slots.long()] = packed.positions
        return DecoderInputs(
            token_ids=packed.tokens,
            positions=packed.positions,
            write_slots=packed.slots,
            batch=step.attention(slot_positions=self.slot_positions, split_keys=self.split_keys),
            key_caches=self.caches[0],
            value_caches=self.caches[1],
        )

    def run(self, step: StepRows) -> torch.Tensor:
        hidden = self.decoder.forward(self.inputs(step))
        return self.decoder.logits(hidden, step.logit_rows)

    def steps(self, prompts: Sequence[list[int]] = PROMPTS) -> Iterator[StepRows]:
        return path_steps(self.slots, self.device, prompts)

    def all_logits(self, prompts: Sequence[list[int]] = PROMPTS) -> torch.Tensor:
        """[prompts (1 + nodes), V] of the last batch, after the ones before it."""
        return [self.run(step) for step in self.steps(prompts)][-1]


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_hidden_states_of_the_wanted_layers_stand_side_by_side(family: str, tmp_path: Path) -> None:
    folder = save_random(FAMILIES[family], tmp_path)
    session, model, prompt = Session(folder), own_model(folder), PROMPTS[0]
    session.slots.extend(0, len(prompt))
    builder = StepBuilder(session.slots)
    builder.add_chain(0, prompt, 0, True)
    layers, width = (0, 2, 3, -1), SIZES["hidden_size"]
    features = torch.zeros(len(prompt), len(layers) * width)
    session.decoder.forward(replace(session.inputs(builder.build()), feature_layers=layers, features=features))
    streams: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _module, inputs: streams.append(inputs[0][0]))
    with torch.inference_mode():
        normed = model.model(torch.tensor([prompt])).last_hidden_state[0]
    expected = torch.cat((streams[0], streams[2], streams[3], normed), dim=1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


class Ranks:
    """Two ranks as threads: what they add up and put side by side waits for both."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * 2

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part
        self._barrier.wait()
        both = list(self._parts)
        self._barrier.wait()
        return both

    def links(self, rank: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        return {
            "all_reduce": lambda addend: torch.cat(self.exchange(rank, addend)),
            "gather_logits": lambda logits: torch.cat(self.exchange(rank, logits), dim=1),
        }


@pytest.mark.parametrize("family", ["llama-bias-yarn", "qwen3", "gemma", "gemma2"])
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    folder = save_random(FAMILIES[family], tmp_path)
    expected = Session(folder).all_logits()
    ranks, answers = Ranks(), [torch.empty(0)] * 2

    def run(rank: int) -> None:
        session = Session(folder, rank=rank, world_size=2, links=ranks.links(rank))
        assert session.caches[0][0].shape[1] == 1
        answers[rank] = session.all_logits()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def test_gemmas_embedding_factor_is_rounded_to_the_model_s_dtype(tmp_path: Path) -> None:
    folder = save_random(FAMILIES["gemma"], tmp_path)
    session = Session(folder, dtype=torch.bfloat16)
    model = own_model(folder, torch.bfloat16)
    assert session.decoder._embedding_factor == model.model.embed_tokens.embed_scale.bfloat16().item() != 32**0.5


def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path) -> None:
    folder = save_random(FAMILIES["gemma3"], tmp_path)
    check_bfloat16(folder, "cpu", Session(folder, dtype=torch.bfloat16).all_logits())


def check_bfloat16(folder: Path, device: str, logits: torch.Tensor) -> None:
    """Holds bfloat16 logits against transformers' own in float32 and in bfloat16."""
    exact = expected_logits(own_model(folder).to(device))
    rounded = expected_logits(own_model(folder, torch.bfloat16).to(device)).float()
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).norm() < 1.25 * (rounded - exact).norm()
    # Where the choice differs, the two logits are closer than what rounding moves them.
    choice, moved = logits.argmax(-1, keepdim=True), (rounded - exact).abs().max()
    assert (exact.amax(-1, keepdim=True) - exact.gather(-1, choice) <= 2 * moved).all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["target", "llama", "gemma3"])
def test_bfloat16_on_cuda_directly_and_captured(model: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = embedded_target_path() if model == "target" else save_random(FAMILIES[model], tmp_path)
    logits = Session(folder, device="cuda", dtype=torch.bfloat16).all_logits()
    check_bfloat16(folder, "cuda", logits)
    session = Session(folder, device="cuda", dtype=torch.bfloat16)
    *first, last = session.steps()
    for step in first:
        session.run(step)
    inputs, rows = session.inputs(last), last.logit_rows
    session.decoder.logits(session.decoder.forward(inputs), rows)  # compiles
    for cache in (*session.caches[0], *session.caches[1]):
        cache[inputs.write_slots.long()] = float("nan")  # the replay has to write them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = session.decoder.logits(session.decoder.forward(inputs), rows)
    with torch.inference_mode():
        captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama-bias-yarn", "qwen3", "gemma2"])
def test_float32_on_cuda(family: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = save_random(FAMILIES[family], tmp_path)
    expected = expected_logits(own_model(folder))
    logits = Session(folder, device="cuda").all_logits()
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fixed_products_make_rows_independent_of_the_batch(family: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = save_random(FAMILIES[family], tmp_path)
    answers = []
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS * 5):
        session = Session(folder, device="cuda", dtype=torch.bfloat16, links={"fixed": True}, split_keys=64)
        answers.append(session.all_logits(prompts)[: 1 + len(NODES)])
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.gpu
def test_a_full_gpu_says_what_is_needed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = DecoderSpec.of(LlamaConfig(**{**SIZES, "vocab_size": 1 << 20}).to_dict())
    source = FunctionSource(lambda name: torch.zeros(tensor_shapes(spec)[name]))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((32 << 20) / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(CheckpointError, match=r"take 0\.13 GB in bfloat16, [\d.]+ GB were free\. Share them"):
            load_decoder_weights(source, spec, "cuda", torch.bfloat16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
