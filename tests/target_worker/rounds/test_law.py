"""The emitted tokens follow the target's own law: exact enumeration over a small vocabulary, chi-square."""

import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tests.target_worker.rounds.driving import Driver, Tree, loop_of, make_runner
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.sampling import SamplingSpec

VOCABULARY = 4
LENGTH = 3
BATCH = 64
SAMPLES = 50 * BATCH
PROMPT = (1, 3, 2)

Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Law]:
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
    folder = tmp_path_factory.mktemp("four-tokens")
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, exact_law(model)


@torch.inference_mode()
def exact_law(model: LlamaForCausalLM) -> Law:
    outputs = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    logits = model(torch.tensor([[*PROMPT, *output] for output in outputs])).logits.double().log_softmax(-1)
    places = range(LENGTH)
    law = {
        output: float(np.exp(sum(row[len(PROMPT) - 1 + place, output[place]].item() for place in places)))
        for output, row in zip(outputs, logits, strict=True)
    }
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def sample(folder: Path, *, seed: int) -> Counter[tuple[int, ...]]:
    """Outputs of many seeds, each round with random trees, so that every way through a tree is taken."""
    sizes = {"max_step_rows": BATCH * 12, "max_prefill_tokens": BATCH * 4}
    loop = loop_of(make_runner(folder, max_num_seqs=BATCH, num_slots=BATCH * 40), chunk=BATCH * 4, **sizes)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, SAMPLES, BATCH):
        driver = Driver(loop, seed=seed * 2**32 + first)
        for number in range(first, first + BATCH):
            spec = SamplingSpec(temperature=1.0, seed=seed * 2**32 + number, max_new_tokens=LENGTH)
            driver.open(number, spec, (), random_tree, prompt=PROMPT)
        driver.run()
        counts.update(tuple(decoded.tokens) for decoded in driver.decoded.values())
    assert loop.kv.slots.used == 0
    return counts


def random_tree(chance: random.Random, _expected: object) -> Tree:
    size = chance.randrange(9)
    return [chance.randrange(VOCABULARY) for _ in range(size)], [chance.randrange(place + 1) for place in range(size)]


def p_value(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """Of the chi-square test over all outputs; those expected fewer than five times are one cell."""
    expected = np.array([law[output] * SAMPLES for output in law])
    seen = np.array([counts[output] for output in law])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def test_emitted_tokens_follow_the_exact_law(small):
    folder, law = small
    assert p_value(sample(folder, seed=1), law) > 1e-3
