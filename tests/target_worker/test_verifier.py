"""The verifier against a plain loop over transformers' own forward with the same choice rule."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.plain_decoding import Plain, plain_decode
from tests.target_worker.verifying import (
    PROMPT,
    Decoded,
    adversarial_tree,
    decode,
    make_verifier,
    no_tree,
    open_request,
    oracle_tree,
    random_tree,
    tree_request,
)
from transformers import PreTrainedModel

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import Outcome
from outrider.target_worker.verifier import Verifier

SPECS = {
    "greedy": SamplingSpec(max_new_tokens=24),
    "coupled": SamplingSpec(temperature=1.0, seed=2**63 + 11, max_new_tokens=24),
    "coupled-filters": SamplingSpec(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5, choice_index=2, max_new_tokens=24
    ),
    "penalties": SamplingSpec(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7, max_new_tokens=24),
    "penalties-coupled": SamplingSpec(
        temperature=1.0, seed=3, repetition_penalty=0.8, frequency_penalty=-0.5, max_new_tokens=24
    ),
    "bias": SamplingSpec(logit_bias={3: 2.5, 40: -100.0, 11: 2.0}, temperature=0.7, seed=9, max_new_tokens=24),
    "allowed": SamplingSpec(allowed_token_ids=(4, 8, 15, 16, 23, 42), temperature=1.0, seed=1, max_new_tokens=24),
    "stop": SamplingSpec(temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 9)), max_new_tokens=40),
    "min-new": SamplingSpec(
        temperature=1.0, seed=4, stop_token_ids=tuple(range(0, 61, 3)), min_new_tokens=9, max_new_tokens=40
    ),
    "short": SamplingSpec(max_new_tokens=3),
    "logprobs": SamplingSpec(temperature=1.0, seed=8, logprobs=4, repetition_penalty=1.5, max_new_tokens=16),
}


TREES = [random_tree, oracle_tree, adversarial_tree, no_tree]


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return make_verifier(checkpoint)


@pytest.mark.parametrize("name", SPECS)
def test_any_tree_gives_plain_decoding(name: str, verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = SPECS[name]
    plain = plain_decode(reference_model, PROMPT, spec)
    steps = {}
    for make_tree in TREES:
        verifier.open(open_request(1, spec))
        decoded = decode(verifier, 1, spec, plain.tokens, make_tree)
        verifier.close((7, 1), 1)
        assert decoded.tokens == plain.tokens, make_tree.__name__
        steps[make_tree] = len(decoded.results)
        if spec.logprobs is not None:
            check_logprobs(decoded, plain, spec.logprobs)
    assert steps[no_tree] == len(plain.tokens)
    assert steps[oracle_tree] <= -(-len(plain.tokens) // 5), "the oracle's nodes were not accepted"
    assert verifier.session_count == 0


def check_logprobs(decoded: Decoded, plain: Plain, count: int) -> None:
    got = [result.logprobs for result in decoded.results]
    expected = torch.stack(plain.logprobs)
    best = expected.topk(count)
    for name, values in (
        ("token_logprobs", expected.gather(1, torch.tensor(plain.tokens)[:, None]).squeeze(1)),
        ("top_logprobs", best.values),
    ):
        actual = np.concatenate([getattr(part, name) for part in got])
        np.testing.assert_allclose(actual, values.numpy(), rtol=1e-4, atol=1e-4)
    assert np.concatenate([part.top_token_ids for part in got if part is not None]).tolist() == best.indices.tolist()


def test_specs_meet_what_they_are_for(reference_model: PreTrainedModel) -> None:
    """Stop tokens occur before the limit, min_new_tokens changes something, penalties too."""
    outputs = {name: plain_decode(reference_model, PROMPT, spec).tokens for name, spec in SPECS.items()}
    assert len(outputs["stop"]) < 40
    assert 9 < len(outputs["min-new"]) < 40 or outputs["min-new"][9] % 3 == 0
    assert outputs["penalties"] != outputs["greedy"]


def test_sessions_of_one_batch_are_independent(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=40)
    specs = list(SPECS.values())[:5]
    plain = [plain_decode(reference_model, PROMPT, spec).tokens for spec in specs]
    for number, spec in enumerate(specs):
        verifier.open(open_request(number, spec))
    rng, outputs = random.Random(0), [[] for _ in specs]
    while live := [number for number, spec in enumerate(specs) if len(outputs[number]) < spec.max_new_tokens]:
        batch = [n for n in live if rng.random() < 0.7]
        trees = [random_tree(rng, plain[n][len(outputs[n]) :]) for n in batch]
        requests = [tree_request(n, len(PROMPT) + len(outputs[n]), tree) for n, tree in zip(batch, trees, strict=True)]
        step = verifier.step(requests)
        assert step.tokens <= 40
        for number, result in zip(batch, step.results, strict=True):
            outputs[number] += result.token_ids
    assert outputs == plain
    for number in range(len(specs)):
        verifier.close((7, number), 1)
    assert verifier.slots_used == 0


def test_trees_are_cut_to_their_root_before_a_session_waits(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=14, max_tree_nodes=8, enable_prefix_caching=False)
    spec = SamplingSpec(max_new_tokens=8)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    first = verifier.step([tree_request(1, 7)])
    assert list(first.results[0].token_ids) == plain[:1]
    verifier.open(open_request(2, spec))
    # 7 rows of the new session and 1 root leave 6: a tree of 6 fits, one of 7 is cut, and both sessions emit.
    chain = [*plain[1:], 0]
    for count, emitted in ((7, 1), (6, 7)):
        tree = (chain[:count], list(range(count)))
        step = verifier.step([tree_request(1, 8, tree), tree_request(2, 7)])
        assert [len(result.token_ids) for result in step.results] == [emitted, 1]
        verifier.close((7, 2), 1)
        verifier.open(open_request(2, spec))
    oversized = (list(range(9)), [0] * 9)
    assert [len(r.token_ids) for r in verifier.step([tree_request(1, 8, oversized)]).results] == [1]


def test_out_of_slots_preempts_the_youngest_and_loses_nothing(
    checkpoint: Path, reference_model: PreTrainedModel
) -> None:
    verifier = make_verifier(checkpoint, num_slots=60)
    spec = SamplingSpec(temperature=1.0, seed=6, max_new_tokens=30)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    outputs: list[list[int]] = [[] for _ in range(4)]
    for number in range(4):
        verifier.open(open_request(number, spec))
    deferred = 0
    for _ in range(400):
        live = [number for number in range(4) if len(outputs[number]) < 30]
        if not live:
            break
        requests = [
            tree_request(n, 7 + len(outputs[n]), (plain[len(outputs[n]) :][:2], [0, 1]))
            if len(outputs[n]) < 28
            else tree_request(n, 7 + len(outputs[n]))
            for n in live
        ]
        for number, result in zip(live, verifier.step(requests).results, strict=True):
            deferred += result.outcome is Outcome.DEFERRED
            outputs[number] += result.token_ids
            if len(outputs[number]) >= 30:
                verifier.close((7, number), 1)
    assert outputs == [plain] * 4
    assert deferred > 0
    assert verifier.preemptions > 0
    assert verifier.slots_used == 0


def test_steps_of_different_sessions_overlap(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, num_slots=40)
    spec = SamplingSpec(max_new_tokens=12)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8]]
    plain = [plain_decode(reference_model, prompt, spec).tokens for prompt in prompts]
    outputs: list[list[int]] = [[], []]
    for number, prompt in enumerate(prompts):
        verifier.open(open_request(number, spec, prompt=prompt))

    def begin(number: int) -> Any:
        return verifier.begin([tree_request(number, len(prompts[number]) + len(outputs[number]))])

    first = verifier.step([tree_request(n, len(prompts[n])) for n in (0, 1)])
    outputs = [list(result.token_ids) for result in first.results]
    pending = begin(0)
    for turn in range(1, 22):
        number = turn % 2
        following = begin(number)
        assert verifier.is_in_flight((7, 0)) and verifier.is_in_flight((7, 1))
        # A tree for a session in flight is put off, and its end waits.
        late = verifier.finish(begin(1 - number)).results[0]
        assert late.outcome is Outcome.DEFERRED
        if turn == 21:
            verifier.close((7, 1 - number), 1)
            assert verifier.session_count == 2
        outputs[1 - number] += verifier.finish(pending).results[0].token_ids
        pending = following
    outputs[1] += verifier.finish(pending).results[0].token_ids
    assert verifier.session_count == 1
    verifier.close((7, 1), 1)
    assert verifier.slots_used == 0
    assert outputs == plain
