"""Rounds of a model that two processes share: gloo or NCCL between them, a small model in float32."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    Driver,
    FixedSteps,
    loop_of,
    make_runner,
    no_tree,
    open_request,
    random_tree,
    rounds_of,
)
from tests.target_worker.tiny_head import write_tiny_head
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider.sampling import SamplingSpec, SpeculationMode
from outrider.target_worker.drafters.loading import load_draft
from outrider.target_worker.rounds.loop import RoundLoop

# Requests whose texts a head is trained on.
KNOWN = ("greedy", "coupled")


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints") / "small"
    model.save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def _two_devices(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_two_ranks_give_the_tokens_of_one(folder: Path):
    specs = [
        SamplingSpec(max_new_tokens=20),
        SamplingSpec(temperature=1.0, seed=5, max_new_tokens=20),
        SamplingSpec(temperature=0.8, seed=2, repetition_penalty=1.3, logprobs=3, max_new_tokens=20),
    ]
    outputs = []
    for ranks in (1, 2):
        runner = make_runner(folder, tensor_parallel_size=ranks, num_slots=70)
        loop = loop_of(runner, chunk=5)
        driver = Driver(loop)
        expected = outputs[0] if outputs else [[]] * len(specs)
        for number, spec in enumerate(specs):
            driver.open(number, spec, expected[number], random_tree, prompt=[7, 11, 13 + number, 60, 5, 9, 2, 44])
        driver.run()
        outputs.append([driver.decoded[number].tokens for number in range(len(specs))])
        results = [result for decoded in driver.decoded.values() for result in decoded.results]
        assert ranks == 1 or sum(result.accepted for result in results) > 0
        runner.close()
    assert outputs[1] == outputs[0]
    assert all(len(tokens) == 20 for tokens in outputs[0])


@contextmanager
def drafted(folder: Path, draft_folder: Path) -> Iterator[RoundLoop]:
    """Rounds of two ranks with a drafter."""
    with closing(make_runner(folder, tensor_parallel_size=2)) as runner:
        loop, program = rounds_of(runner, draft=load_draft(runner, draft_folder))
        program.drafter.pace = FixedSteps(3)
        yield loop


def run(loop: RoundLoop, number: int, name: str, expected: list[int]) -> tuple[list[int], int]:
    """The tokens of a session without draft workers, and how many were accepted."""
    driver = Driver(loop)
    decoded = driver.open(number, SPECS[name], expected, no_tree)
    driver.run()
    return decoded.tokens, sum(result.accepted for result in decoded.results)


@pytest.fixture(scope="module", params=["model", "head"])
def draft_folder(
    request: pytest.FixtureRequest, model: Qwen3ForCausalLM, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A drafter that is often right: the target itself, or a head without an output layer that knows the texts."""
    if request.param == "model":
        return folder
    texts = [[*PROMPT, *plain_decode(model, PROMPT, SPECS[name]).tokens] for name in KNOWN]
    return write_tiny_head(tmp_path_factory.mktemp("head"), folder, model, texts)


def test_a_drafter_beside_two_ranks_gives_the_tokens_of_off(folder: Path, model: Qwen3ForCausalLM, draft_folder: Path):
    with drafted(folder, draft_folder) as loop:
        for number, name in enumerate(SPECS):
            off = list[int]()
            loop.open(replace(open_request(number, SPECS[name]), mode=SpeculationMode.OFF))
            while loop.has_work:
                off += [token for result in loop.turn() for token in result.tokens]
            assert off == plain_decode(model, PROMPT, SPECS[name]).tokens
            tokens, accepted = run(loop, number, name, off)
            assert tokens == off
            # With half of the output layer a head gets a third.
            assert accepted > 0.4 * len(tokens) or name not in KNOWN


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_head_beside_two_ranks_gets_the_output_layer_of_a_reload(
    folder: Path, model: Qwen3ForCausalLM, tmp_path: Path, block_size: int | None
):
    """Weights whose output layer has its rows in another order, and a drafter that knows the texts of that model."""
    other = Qwen3ForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.lm_head.weight.copy_(model.lm_head.weight[torch.randperm(61)])
    other.save_pretrained(tmp_path / "other")
    wanted = plain_decode(other, PROMPT, SPECS["greedy"]).tokens
    texts = [[*PROMPT, *wanted]]
    head = write_tiny_head(tmp_path / "head", tmp_path / "other", other, texts, block_size=block_size)
    with drafted(folder, head) as loop:
        loop.reload(tmp_path / "other")
        tokens, accepted = run(loop, 1, "greedy", wanted)
    assert tokens == wanted
    assert accepted > len(wanted) / 3
