"""Every rule in rounds gives the tokens that the plain rules give, tree by tree."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.target_worker.plain_decoding import processed
from tests.target_worker.rounds.driving import PROMPT, TARGET_ONLY, Driver, Tree, make_loop, no_tree
from tests.target_worker.rounds.rule_references import reference_path
from transformers import PreTrainedModel

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.rounds.loop import RoundLoop

REJECTION = replace(TARGET_ONLY, verification=VerificationRule.REJECTION)
SPECS = {
    "target-only": TARGET_ONLY,
    "target-only-filtered": replace(TARGET_ONLY, top_k=20, top_p=0.95, temperature=0.8, repetition_penalty=1.2),
    "target-only-lossy": replace(TARGET_ONLY, threshold_single=0.4, threshold_acc=0.7),
    "target-only-greedy": replace(TARGET_ONLY, temperature=0.0),
    "rejection": REJECTION,
    "rejection-filtered": replace(REJECTION, top_k=20, temperature=0.7, frequency_penalty=0.3),
    "synthetic": SamplingSpec(verification=VerificationRule.SYNTHETIC, synthetic_rates=(0.8, 0.6, 0.5)),
    "synthetic-sampled": SamplingSpec(
        temperature=1.0, verification=VerificationRule.SYNTHETIC, synthetic_rates=(0.9,), stop_token_ids=(3, 7, 22)
    ),
}
TOKENS, DEEPEST = 40, 6
# Of so few tokens random trees meet some that are accepted.
ALLOWED = (4, 8, 15, 16, 23, 42)


@pytest.fixture(scope="module")
def loop(checkpoint) -> RoundLoop:
    return make_loop(checkpoint)


@torch.inference_mode()
def node_logits(model: PreTrainedModel, spec: SamplingSpec, output: Sequence[int], tree: Tree) -> torch.Tensor:
    """Return the logits at the root and at each node [n + 1, V], processed by what the node's own path holds."""
    paths, rows = [list(output)], []
    for token, parent in zip(*tree, strict=True):
        paths.append([*paths[parent], token])
    for path in paths:
        raw = model(torch.tensor([[*PROMPT, *path]])).logits[0, -1]
        rows.append(processed(raw, PROMPT, path, spec))
    return torch.stack(rows)


def random_growth(chance: random.Random, spec: SamplingSpec):
    """A tree that the rule takes, without stop tokens and equal siblings, and the q of its nodes."""
    count = chance.randint(0, DEEPEST)
    if spec.rule is VerificationRule.REJECTION:
        q = [DraftDistribution.quantised(ALLOWED, [chance.random() + 0.01 for _ in ALLOWED]) for _ in range(count)]
        return ([each.draw(chance.getrandbits(32)) for each in q], list(range(count))), q
    nodes: list[tuple[int, int]] = []
    for _ in range(count):
        node = chance.randrange(len(nodes) + 1), chance.choice(ALLOWED)
        # A node that repeats its sibling is the same node.
        nodes += [node] * (node not in nodes)
    return ([token for _, token in nodes], [parent for parent, _ in nodes]), []


@pytest.mark.parametrize("name", SPECS)
def test_rounds_decide_as_the_plain_rules_do(name, loop, reference_model):
    chance, driver, accepted = random.Random(5), Driver(loop), 0
    for seed in range(3):
        spec = replace(SPECS[name], seed=seed, max_new_tokens=TOKENS, allowed_token_ids=ALLOWED)
        decoded = driver.open(1, spec, [], no_tree)
        # Rounds verify no node that could only be the last token.
        while not decoded.is_over and len(decoded.tokens) < TOKENS - DEEPEST:
            output = list(decoded.tokens)
            length = len(PROMPT) + len(output)
            tree, q = random_growth(chance, spec)
            driver.grow(1, tree, as_of=length, q=q)
            driver.turn()
            loop.forget((7, 1), 1, 0)
            if len(decoded.tokens) == len(output):
                # The prompt was computed, and the tree was verified with the round behind it.
                assert not output
                continue
            logits = node_logits(reference_model, spec, output, tree)
            nodes, tokens = reference_path(spec, length, *tree, q, logits)
            assert decoded.tokens[len(output) :] == tokens
            assert decoded.results[-1].accepted == len(nodes)
            accepted += len(nodes)
        loop.close((7, 1), 1)
    assert accepted > 10
    driver.run()
    assert loop.kv.slots.used == 0


def test_under_rejection_a_drafted_stop_token_is_verified_like_any_other(loop):
    """Verified rows must not depend on a token that was drawn: without stop tokens the output would be biased."""
    ends = 0
    for seed in range(30):
        spec = replace(
            REJECTION, seed=seed, max_new_tokens=TOKENS, allowed_token_ids=ALLOWED, stop_token_ids=(8, 23),
            min_new_tokens=2,
        )  # fmt: skip
        driver, q = Driver(loop), DraftDistribution.quantised(ALLOWED, [1.0] * len(ALLOWED))
        decoded = driver.open(1, spec, [], no_tree)
        while not decoded.is_over:
            driver.grow(1, ([8, 23, 4], [0, 1, 2]), as_of=len(PROMPT) + len(decoded.tokens), q=[q] * 3)
            driver.turn()
            loop.forget((7, 1), 1, 0)
        assert all(result.selected == 3 for result in decoded.results if result.finish is not Finish.LENGTH)
        stops = [place for place, token in enumerate(decoded.tokens) if token in {8, 23}]
        assert stops in ([], [len(decoded.tokens) - 1])
        assert not stops or stops[0] >= 2
        ends += decoded.finish is Finish.STOP
        driver.run()
    assert ends > 20
    assert loop.kv.slots.used == 0


@pytest.mark.parametrize("rule", [TARGET_ONLY, REJECTION])
def test_rounds_that_verify_nothing_may_need_the_host(rule, checkpoint):
    """Parts of a prompt alone are computed in the first rounds, and the last ones only close the session."""
    loop = make_loop(checkpoint, chunk=3)
    driver = Driver(loop)
    decoded = driver.open(1, replace(rule, max_new_tokens=4), [], no_tree)
    driver.run()
    assert (len(decoded.tokens), decoded.finish) == (4, Finish.LENGTH)
    assert loop.kv.slots.used == 0
