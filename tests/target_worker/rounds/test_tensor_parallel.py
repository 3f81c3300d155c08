"""Rounds of a model that two processes share: gloo or NCCL between them, a small model in float32."""

import pytest
import torch
from tests.target_worker.rounds.driving import Driver, loop_of, make_runner, random_tree
from transformers import Qwen3Config, Qwen3ForCausalLM

from outrider.sampling import SamplingSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
    made = tmp_path_factory.mktemp("checkpoints") / "small"
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


def test_two_ranks_give_the_tokens_of_one(device, folder):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
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
