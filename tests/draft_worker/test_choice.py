"""What is grown where the target throws coins of its own: the most likely children, or one that is drawn."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.draft_distribution import WEIGHT_SUM
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.session import DraftSession, GrowthLimits, GrowthMode
from outrider.kernels.noise import STREAM_DRAFT, philox_uint32
from outrider.sampling import SamplingSpec, VerificationRule

Make = Callable[..., Any]
KEY = (7, 1)


def spec_of(rule: VerificationRule, **changes: Any) -> SamplingSpec:
    return SamplingSpec(**{"temperature": 0.8, "verification": rule, "max_new_tokens": 100} | changes)


def rejection(**changes: Any) -> SamplingSpec:
    return spec_of(VerificationRule.REJECTION, **changes)


def grown(growth: TreeGrowth, key: tuple[int, int] = KEY) -> DraftSession:
    while growth.step() is not None:
        pass
    session = growth.session(key)
    assert session is not None
    return session


def chain_of(session: DraftSession) -> list[DraftNode]:
    nodes = list(session.tree.nodes())
    for parent, node in zip([session.tree.root, *nodes], nodes, strict=False):
        assert node.parent == parent
    return nodes


def word_of(spec: SamplingSpec, position: int) -> int:
    seed = torch.from_numpy(np.array([spec.seed], dtype=np.uint64).view(np.int64))
    return int(philox_uint32(seed, torch.tensor([position]), torch.tensor([[0]]), STREAM_DRAFT, spec.choice_index))


def test_a_chain_is_drawn_from_the_very_weights_that_travel(make_growth: Make, make_start: Make, logits_after: Make):
    spec = rejection(seed=2**63 + 9, choice_index=3)
    growth, _ = make_growth(rejection_top_k=6)
    growth.open(make_start(sampling=spec, limits=GrowthLimits(max_depth=7)))
    session = grown(growth)
    nodes = chain_of(session)
    assert len(nodes) == 7
    tokens = list(session.tokens)
    for node in nodes:
        q = node.distribution
        assert q is not None
        logits = logits_after(tokens).astype(np.float64) / 0.8
        best = np.sort(np.argsort(-logits)[:6])
        mass = np.exp(logits[best] - logits[best].max())
        assert q.token_ids.tolist() == best.tolist()
        np.testing.assert_allclose(q.weights / WEIGHT_SUM, mass / mass.sum(), atol=1e-6)
        assert q.fault(node.token, 24) is None
        assert node.token == q.draw(word_of(spec, len(tokens)))
        tokens.append(node.token)


def test_estimates_of_a_chain_are_one_number_whatever_was_drawn(make_growth: Make, make_start: Make):
    growth, _ = make_growth(rejection_acceptance=0.6)
    growth.open(make_start(sampling=rejection()))
    steps = [step for step in iter(growth.step, None) if step.growths]
    assert {estimate for step in steps for estimate in step.growths[0].acceptance} == {0.6}
    assert all(q is not None for step in steps for q in step.growths[0].distributions)
    learned = growth.calibration.learned.copy()
    session = growth.session(KEY)
    assert session is not None
    growth.commit(KEY, 1, session.length, [node.token for node in chain_of(session)[:3]])
    assert (growth.calibration.learned == learned).all()


def test_stop_tokens_do_not_end_a_chain(make_growth: Make, make_start: Make):
    """Its length must not tell what was drawn."""
    for mode in GrowthMode:
        growth, _ = make_growth()
        stops = rejection(stop_token_ids=tuple(range(24)))
        growth.open(make_start(sampling=stops, limits=GrowthLimits(mode=mode, max_depth=5, sync_nodes=24)))
        assert len(chain_of(grown(growth))) == 5


@pytest.mark.parametrize("seed", range(4))
def test_after_any_commits_the_chain_is_that_of_the_committed_tokens(make_growth: Make, make_start: Make, seed: int):
    """What survives a commit is what would be drawn afresh: a position's number is used for that position alone."""
    rng = np.random.default_rng(seed)
    growth, _ = make_growth()
    growth.open(make_start(sampling=rejection(seed=seed), limits=GrowthLimits(max_depth=5)))
    kept = 0
    for epoch in range(2, 10):
        session = grown(growth)
        nodes = chain_of(session)
        accepted = [node.token for node in nodes[: rng.integers(0, 4)]]
        final = nodes[len(accepted)].token if rng.random() < 0.5 else int(rng.integers(0, 24))
        growth.commit(KEY, 1, session.length, [*accepted, final])
        kept += session.tree.size > 0
        survived = [(node.token, node.distribution) for node in chain_of(grown(growth))]
        growth.open(
            make_start(2, epoch=epoch, sampling=session.sampling, output=session.tokens[3:], limits=session.limits)
        )
        afresh = chain_of(grown(growth, (7, 2)))
        assert [token for token, _ in survived] == [node.token for node in afresh]
        for (_, one), node in zip(survived, afresh, strict=True):
            assert one is not None
            assert node.distribution is not None
            assert one.weights.tolist() == node.distribution.weights.tolist()
    assert kept > 1


def test_draws_over_seeds_follow_q(make_growth: Make, make_start: Make):
    growth, _ = make_growth(runner={"max_rows": 600, "num_slots": 6000}, rejection_top_k=5, max_step_tokens=6000)
    for seed in range(600):
        growth.open(make_start(seed, sampling=rejection(seed=seed), limits=GrowthLimits(max_depth=1)))
    step = growth.step()
    assert step is not None
    q = step.growths[0].distributions[0]
    assert q is not None
    counts = Counter(growth.tokens[0] for growth in step.growths)
    seen = [counts[token] for token in q.token_ids.tolist()]
    assert sum(seen) == 600
    assert stats.chisquare(seen, q.weights / WEIGHT_SUM * 600).pvalue > 1e-3


def test_under_target_only_children_are_the_most_likely(make_growth: Make, make_start: Make, logits_after: Make):
    spec = spec_of(VerificationRule.TARGET_ONLY, top_k=3, logit_bias={5: 4.0})
    growth, _ = make_growth()
    growth.open(make_start(sampling=spec, limits=GrowthLimits(max_depth=3)))
    session = grown(growth)
    logits = logits_after(session.tokens)
    logits[5] += 4.0
    assert session.tree.root.child_tokens == np.argsort(-logits)[:3].tolist()
    estimates = [child.acceptance for child in session.tree.root.children.values()]
    law = np.exp(np.sort(logits)[::-1][:3] / 0.8)
    # Before anything is learned an estimate is the draft's own probability, as exactly as its bin is narrow.
    np.testing.assert_allclose(estimates, law / law.sum(), atol=0.12)
    assert all(node.distribution is None for node in session.tree.nodes())


def test_target_only_learns_in_buckets_of_its_own(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(sampling=spec_of(VerificationRule.TARGET_ONLY)))
    best = next(iter(grown(growth).tree.root.children.values()))
    before = growth.calibration.learned.copy()
    growth.commit(KEY, 1, 3, [best.token])
    changed = np.nonzero(growth.calibration.learned != before)[0]
    assert len(changed) == 4
    assert changed.min() >= 2 * len(before) // 3


def test_sessions_of_all_rules_in_one_step_are_as_if_alone(make_growth: Make, make_start: Make):
    specs = [SamplingSpec(max_new_tokens=100), *(spec_of(rule, seed=5) for rule in VerificationRule)]
    together, _ = make_growth(max_step_nodes=64)
    limits = GrowthLimits(mode=GrowthMode.SYNC, max_depth=3, sync_nodes=12)
    for number, spec in enumerate(specs):
        together.open(make_start(number, sampling=spec, prompt=[number, 4], limits=limits))
    found = {growth.session_id: growth for step in iter(together.step, None) for growth in step.growths}
    for number, spec in enumerate(specs):
        alone, _ = make_growth()
        alone.open(make_start(number, sampling=spec, prompt=[number, 4], limits=limits))
        growth = next(growth for step in iter(alone.step, None) for growth in step.growths)
        assert (growth.tokens, growth.parents) == (found[number].tokens, found[number].parents)
        assert growth.acceptance == pytest.approx(found[number].acceptance)


@pytest.mark.parametrize("rule", VerificationRule)
def test_at_temperature_0_every_rule_grows_the_greedy_tree(make_growth: Make, make_start: Make, rule: VerificationRule):
    trees = []
    for verification in (VerificationRule.COUPLED, rule):
        growth, _ = make_growth()
        growth.open(make_start(sampling=spec_of(verification, temperature=0.0), limits=GrowthLimits(max_depth=3)))
        nodes = list(grown(growth).tree.nodes())
        assert all(node.distribution is None for node in nodes)
        trees.append([(node.depth, node.token, node.acceptance) for node in nodes])
    assert trees[0] == trees[1]
