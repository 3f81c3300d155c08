"""Trees that a head has grown: estimates from the calibration, what commits teach it, and the nodes that are sent."""

import numpy as np
import pytest
import torch
from tests.target_worker.resident_support import tree_of

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_growth import DraftLimits, GrownTree
from outrider.target_worker.sessions import Session


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.TARGET_ONLY])
def test_estimates_are_those_of_the_calibration(temperature: float, rule: VerificationRule) -> None:
    """What the device looks up is what draft workers compute on the host."""
    calibration = AcceptanceCalibration(branching=4)
    generator = np.random.default_rng(1)
    for _ in range(200):
        calibration.observe(generator.integers(0, len(calibration.prior), 4), int(generator.integers(-1, 4)))
    ranker = CandidateRanker(calibration, top_k=4, vocab_size=40, device=torch.device("cpu"))
    spec = SamplingSpec(temperature=temperature, seed=9, verification=rule)
    sessions = [
        Session(key=(1, n), epoch=1, order=n, row=n, tokens=[1, 2, 3], prompt_len=3, sampling=spec, limit=9,
                draft=DraftLimits(is_fixed=n == 1))
        for n in (0, 1)
    ]  # fmt: skip
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * 3
    logits[0, 3:] = -torch.inf
    found = ranker.rank(RankedSessions.of(sessions, torch.device("cpu")), logits, depth=1)
    assert found.tokens[0].tolist()[3] == -1
    assert found.acceptance[0].tolist()[3] == 0
    if spec.rule is VerificationRule.TARGET_ONLY:
        return
    log_q = (logits / (temperature or 1)).log_softmax(-1).gather(1, found.tokens.clamp(min=0)).numpy()
    buckets = calibration.buckets(log_q, log_q, np.zeros(6, dtype=np.float32))
    if temperature == 0:
        assert found.buckets[1:].tolist() == buckets[1:].tolist()
    expected = calibration.estimate(found.buckets.numpy(), np.array([True] * 3 + [False] * 3))
    np.testing.assert_allclose(found.acceptance[1:], np.minimum(expected[1:], 0.9999), rtol=1e-5)


def test_commits_teach_the_calibration() -> None:
    calibration = AcceptanceCalibration(branching=2)
    # Below the root 5 and 6; below 6 (column 1) 7 and 8; below 5 (column 0) 9 and 1.
    tree = GrownTree(
        tokens=np.array([[5, 6], [7, 8], [9, 1]], dtype=np.int32),
        buckets=np.array([[0, 16], [1, 17], [2, 18]], dtype=np.int32),
        acceptance=np.full((3, 2), 0.5, dtype=np.float32),
        values=np.array([[0.5, 0.5], [0.25, 0.25], [0.25, 0.25]], dtype=np.float32),
        above=np.array([-1, 1, 0], dtype=np.int32),
    )
    before = calibration.learned.copy()
    tree.observe(calibration, [6, 8, 3])
    changed = np.flatnonzero(calibration.learned != before).tolist()
    assert changed == [0, 1, 16, 17]
    assert calibration.learned[[16, 17]].tolist() > before[[16, 17]].tolist()
    assert calibration.learned[[0, 1]].tolist() < before[[0, 1]].tolist()


def test_the_best_nodes_come_with_their_parents() -> None:
    tree = GrownTree(
        tokens=np.array([[5, 6], [7, 8], [9, -1]], dtype=np.int32),
        buckets=np.zeros((3, 2), dtype=np.int32),
        acceptance=np.array([[0.9, 0.1], [0.8, 0.1], [0.5, 0.5]], dtype=np.float32),
        values=np.array([[0.9, 0.1], [0.72, 0.09], [0.05, 0.05]], dtype=np.float32),
        above=np.array([-1, 0, 1], dtype=np.int32),
    )
    columns = tree.best(most=3, max_depth=2, min_value=0.0)
    assert columns == [0, 1, 2]
    assert tree.best(most=9, max_depth=1, min_value=0.0) == [0, 1]
    assert tree.best(most=9, max_depth=2, min_value=0.08) == [0, 1, 2, 3]
    assert 5 not in tree.best(most=9, max_depth=2, min_value=0.0), "a candidate without a token"
    grown = tree.nodes(columns, as_of=4, first_id=11)
    assert (grown.node_ids, grown.parents, grown.tokens) == ([11, 12, 13], [0, 0, 11], [5, 6, 7])
    assert tree_of(grown) == ([5, 6, 7], [0, 0, 1])
