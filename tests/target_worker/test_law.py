"""The emitted tokens follow the target's own law: exact enumeration over a small vocabulary, chi-square."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.config import EngineConfig
from outrider.engine.model_runner import ModelRunner
from outrider.sampling import SamplingSpec
from outrider.target_worker import forward_step
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest
from outrider.target_worker.verifier import Verifier

VOCABULARY = 5
LENGTH = 3
BATCH = 64
SAMPLES = 100 * BATCH
PROMPT = (1, 3, 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("five-tokens")
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, exact_law(model)


@torch.inference_mode()
def exact_law(model: LlamaForCausalLM) -> dict[tuple[int, ...], float]:
    law = {}
    for output in itertools.product(range(VOCABULARY), repeat=LENGTH):
        logits = model(torch.tensor([[*PROMPT, *output]])).logits[0].double()
        logprobs = logits.log_softmax(-1)
        law[output] = float(
            np.exp(sum(logprobs[len(PROMPT) - 1 + place, token].item() for place, token in enumerate(output)))
        )
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def sample(folder, seed: int) -> dict[tuple[int, ...], int]:
    """Outputs of many seeds, each round with random trees, so that every way through a tree is taken."""
    config = EngineConfig(model_path=folder, max_num_seqs=BATCH, num_slots=BATCH * 40, max_tree_nodes=16)
    verifier = Verifier(ModelRunner(config), max_step_tokens=2048)
    chance = random.Random(seed)
    counts: dict[tuple[int, ...], int] = {}
    for first in range(0, SAMPLES, BATCH):
        outputs: dict[int, list[int]] = {number: [] for number in range(first, first + BATCH)}
        for number in outputs:
            spec = SamplingSpec(temperature=1.0, seed=seed * 2**32 + number, max_new_tokens=LENGTH)
            verifier.open(OpenRequest(key=(0, number), epoch=1, prompt=PROMPT, output=(), sampling=spec))
        while unfinished := [number for number, output in outputs.items() if len(output) < LENGTH]:
            step = verifier.step([random_tree(chance, number, outputs[number]) for number in unfinished])
            for number, result in zip(unfinished, step.results, strict=True):
                assert result.outcome is Outcome.ACCEPTED
                outputs[number].extend(result.token_ids)
        for number, output in outputs.items():
            counts[tuple(output)] = counts.get(tuple(output), 0) + 1
            verifier.close((0, number), 1)
    assert verifier.slots_used == 0
    return counts


def random_tree(chance: random.Random, number: int, output: list[int]) -> TreeRequest:
    size = chance.randrange(9)
    parents = [chance.randrange(place + 1) for place in range(size)]
    tokens = [chance.randrange(VOCABULARY) for _ in range(size)]
    return TreeRequest(key=(0, number), epoch=1, length=len(PROMPT) + len(output), tokens=tokens, parents=parents)


def p_value(counts: dict[tuple[int, ...], int], law: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test over all outputs; those expected fewer than five times are one cell."""
    expected = np.array([law[output] * SAMPLES for output in law])
    seen = np.array([counts.get(output, 0) for output in law])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def test_emitted_tokens_follow_the_exact_law(small):
    folder, law = small
    assert p_value(sample(folder, seed=1), law) > 1e-3


def test_a_warmer_choice_is_found_out(small, monkeypatch):
    folder, law = small
    honest = forward_step.verify
    monkeypatch.setattr(forward_step, "verify", lambda logits, trees: honest(logits * 0.8, trees))
    assert p_value(sample(folder, seed=2), law) < 1e-6


def test_a_walk_that_takes_any_child_is_found_out(small, monkeypatch):
    folder, law = small
    honest = forward_step.verify
    chance = random.Random(0)

    def careless(logits, trees):
        # Now and then the first node of a tree is let through although the target would choose otherwise.
        logits, root = logits.clone(), 0
        for tree in trees:
            if tree.tokens and chance.random() < 0.2:
                logits[root, tree.tokens[0]] += 1e6
            root += tree.count
        return honest(logits, trees)

    monkeypatch.setattr(forward_step, "verify", careless)
    assert p_value(sample(folder, seed=3), law) < 1e-6
