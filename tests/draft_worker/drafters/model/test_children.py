"""Children of a node: by the session's rule, of exactly its own path, with the noise that the target shares."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.draft_worker.table_model import VOCAB, Bench, Mirror, table_logits

from outrider.drafting.draft_distribution import WEIGHT_SUM
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule

STOPS = (0, 2, 4, 6, 8, 10, 12)
TARGET_ONLY, REJECTION = VerificationRule.TARGET_ONLY, VerificationRule.REJECTION
SPECS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "seed": 2**63 + 5, "choice_index": 2},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.9},
    "bias": {"temperature": 0.7, "seed": 8, "logit_bias": {3: 1.5, 8: -2.0}, "repetition_penalty": 1.3},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (4, 9)},
    "ban": {"stop_token_ids": STOPS, "min_new_tokens": 5},
    "target_only": {"temperature": 0.8, "verification": TARGET_ONLY, "top_k": 3, "logit_bias": {5: 4.0}},
    "rejection": {"temperature": 0.8, "verification": REJECTION, "seed": 2**63 + 9, "presence_penalty": 0.4},
    "chain_ban": {
        "temperature": 0.8,
        "verification": REJECTION,
        "stop_token_ids": (*STOPS, VOCAB + 9),
        "min_new_tokens": 7,
    },
}


def spec_of(name: str, **changes: Any) -> SamplingSpec:
    fields: dict[str, Any] = {"max_new_tokens": 60}
    return SamplingSpec(**fields | SPECS[name] | changes)


def chain_of(mirror: Mirror) -> list[Any]:
    """The live nodes of a chain, from the root down."""
    nodes = sorted(mirror.live, key=lambda node: len(node.context))
    assert [len(node.context) for node in nodes] == [len(mirror.tokens) + 1 + depth for depth in range(len(nodes))]
    return nodes


@pytest.mark.parametrize("name", SPECS)
def test_children_are_those_of_the_rule_for_exactly_the_nodes_own_path(name: str):
    bench = Bench()
    mirror = bench.open(1, sampling=spec_of(name), prompt=[3, 1, 4, 1, 5], output=[9, 2, 9])
    plain = bench.open(2, prompt=[3, 1, 4])
    for committed in ((), (None, 9), (None, None)):
        # None: what the model expects.
        tokens: list[int] = []
        for token in committed:
            expected = mirror.expanded.get((*mirror.tokens, *tokens))
            tokens.append(expected[0].context[-1] if token is None and expected else token or 9)
        bench.commit(1, tokens)
        bench.finish()
        mirror.check_children(least=5)
        plain.check_children(least=10)
    bench.check_all_given_back()


@pytest.mark.parametrize("name", SPECS)
def test_the_host_has_a_part_under_rules_of_coins_alone(name: str):
    bench = Bench()
    bench.open(sampling=spec_of(name))
    assert bench.drafter.is_preparing == (spec_of(name).rule is not VerificationRule.COUPLED)


def test_a_session_that_begins_anew_has_all_its_tokens_counted():
    bench = Bench(max_model_len=400, num_slots=500)
    mirror = bench.open(sampling=spec_of("penalties", max_new_tokens=390), output=[9, 2, 9])
    bench.finish()
    for tokens in ([5, 7, 7] * 90, [7, 8]):
        bench.commit(1, tokens)
        bench.finish()
        mirror.check_children(least=5)


def test_under_target_only_estimates_are_the_drafts_own_probabilities():
    bench = Bench()
    mirror = bench.open(sampling=spec_of("target_only", top_k=0, logit_bias={}), max_depth=1)
    bench.finish()
    logits = np.sort(table_logits(mirror.tokens))[::-1] / 0.8
    law = np.exp(logits - logits.max())
    # Before anything is learned, as exactly as an estimate's bin is narrow.
    np.testing.assert_allclose([node.acceptance for node in mirror.live], (law / law.sum())[:4], atol=0.12)


def test_a_chain_is_cut_to_its_likeliest_tokens_and_its_estimates_tell_nothing_of_the_draw():
    bench = Bench(rejection_top_k=6, rejection_acceptance=0.6)
    mirror = bench.open(sampling=spec_of("rejection"), max_depth=7)
    bench.finish()
    nodes = chain_of(mirror)
    assert len(nodes) == 7
    mirror.check_children()
    assert {len(node.distribution.token_ids) for node in nodes} == {6}
    assert {round(node.acceptance, 6) for node in nodes} == {0.6}
    learned = bench.drafter.calibration.learned.copy()
    bench.commit(1, [node.context[-1] for node in nodes[:3]])
    bench.finish()
    assert (bench.drafter.calibration.learned == learned).all()


@pytest.mark.parametrize("mode", [SpeculationMode.ASYNC, SpeculationMode.SYNC])
def test_stop_tokens_do_not_end_a_chain(mode: SpeculationMode):
    """Its length must not tell what was drawn."""
    bench = Bench()
    mirror = bench.open(sampling=spec_of("rejection", stop_token_ids=tuple(range(VOCAB))), mode=mode, max_depth=5)
    bench.finish()
    assert len(chain_of(mirror)) == 5


def test_draws_over_seeds_follow_q():
    bench = Bench(num_slots=6000, max_sessions=600, rejection_top_k=5, max_step_tokens=6000)
    for seed in range(600):
        bench.open(seed, sampling=spec_of("rejection", seed=seed), max_depth=1)
    bench.finish()
    nodes = [chain_of(mirror)[0] for mirror in bench.mirrors.values()]
    counts, q = Counter(node.context[-1] for node in nodes), nodes[0].distribution
    seen = [counts[token] for token in q.token_ids.tolist()]
    assert sum(seen) == 600
    assert stats.chisquare(seen, q.weights / WEIGHT_SUM * 600).pvalue > 1e-3


def test_sessions_of_all_rules_in_one_step_are_as_if_alone():
    together = Bench(max_step_nodes=64, max_live_nodes=256, max_sessions=len(SPECS))
    fields = {"mode": SpeculationMode.SYNC, "max_depth": 3, "sync_nodes": 12}
    for number, name in enumerate(SPECS):
        together.open(number, sampling=spec_of(name), prompt=[number, 4], **fields)
    together.finish()
    for number, name in enumerate(SPECS):
        bench = Bench(max_live_nodes=256)
        alone = bench.open(number, sampling=spec_of(name), prompt=[number, 4], **fields)
        bench.finish()
        (found,), (expected,) = together.mirrors[number].growths, alone.growths
        assert found.complete
        assert (found.tokens, found.acceptance) == (expected.tokens, expected.acceptance)


@pytest.mark.parametrize("rule", VerificationRule)
def test_at_temperature_0_every_rule_grows_the_greedy_tree(rule: VerificationRule):
    trees = []
    for verification in (VerificationRule.COUPLED, rule):
        bench = Bench()
        mirror = bench.open(sampling=spec_of("greedy", verification=verification), max_depth=3)
        bench.finish()
        trees.append(mirror.nodes)
    assert trees[0] == trees[1]
