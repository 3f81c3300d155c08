"""Every rule in rounds gives the tokens that it gives in the present verifier, tree by tree."""

import random
from dataclasses import replace

import pytest
from tests.target_worker.rounds.driving import Driver, make_loop
from tests.target_worker.verifying import PROMPT, TARGET_ONLY, make_verifier, no_tree, open_request

from outrider.draft_distribution import DraftDistribution
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.sessions import TreeRequest
from outrider.target_worker.verifier import Verifier

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


@pytest.fixture(scope="module")
def verifier(checkpoint) -> Verifier:
    return make_verifier(checkpoint)


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
def test_rounds_decide_as_the_present_verifier_does(name, loop, verifier):
    chance, driver, accepted = random.Random(5), Driver(loop), 0
    for seed in range(4):
        spec = replace(SPECS[name], seed=seed, max_new_tokens=TOKENS, allowed_token_ids=ALLOWED)
        decoded = driver.open(1, spec, [], no_tree)
        verifier.open(open_request(1, spec))
        before = 0
        # Rounds verify no node that could only be the last token.
        while not decoded.is_over and len(decoded.tokens) < TOKENS - DEEPEST:
            length = len(PROMPT) + len(decoded.tokens)
            (tokens, parents), q = random_growth(chance, spec)
            driver.grow(1, (tokens, parents), as_of=length, q=q)
            driver.turn()
            given = decoded.tokens[before:]
            before = len(decoded.tokens)
            loop.forget((7, 1), 1, 0)
            request = TreeRequest(key=(7, 1), epoch=1, length=length, tokens=tokens, parents=parents, distributions=q)
            result = verifier.step([request]).results[0]
            assert given == list(result.token_ids)
            accepted += len(result.accepted_nodes)
        verifier.close((7, 1), 1)
        loop.close((7, 1), 1)
    assert accepted > 10
    driver.run()
    assert loop.kv.used == 0


def test_under_rejection_a_drafted_stop_token_is_verified_like_any_other(loop):
    """What is verified must not depend on a token that was drawn: without stop tokens the output would be biased."""
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
    assert loop.kv.used == 0
