"""Estimates learn from commits, whichever way children were chosen."""

import numpy as np
import pytest
from tests.draft_worker.table_model import VOCAB, Bench, Mirror

from outrider.sampling import SamplingSpec, VerificationRule

# Of these the host chooses the children.
PENALTY = SamplingSpec(max_new_tokens=190, presence_penalty=1e-6)


def children_of_root(mirror: Mirror) -> list[tuple[int, float]]:
    """Tokens and estimates, best first."""
    nodes = mirror.expanded[tuple(mirror.tokens)]
    return [(node.context[-1], node.acceptance) for node in nodes]


@pytest.mark.parametrize("spec", [SamplingSpec(max_new_tokens=190), PENALTY])
def test_estimates_follow_the_commits(spec: SamplingSpec):
    bench = Bench()
    mirror = bench.open(sampling=spec)
    bench.finish()
    before = [estimate for _, estimate in children_of_root(mirror)]
    assert before[0] > before[3]
    # The target always takes the fourth.
    for _ in range(60):
        bench.commit(1, [children_of_root(mirror)[3][0]])
        bench.finish()
    # Of a node that was made before the last commits the estimate is an old one.
    bench.commit(1, [next(t for t in range(VOCAB) if t not in {token for token, _ in children_of_root(mirror)})])
    bench.finish()
    after = [estimate for _, estimate in children_of_root(mirror)]
    assert after[3] > after[0]


@pytest.mark.parametrize("spec", [SamplingSpec(max_new_tokens=190), PENALTY])
@pytest.mark.parametrize("at_once", [True, False])
def test_every_parent_on_a_committed_path_is_a_trial(spec: SamplingSpec, *, at_once: bool):
    bench = Bench()
    mirror = bench.open(sampling=spec)
    bench.finish()
    path: list[int] = []
    for _ in range(2):
        path.append(mirror.expanded[*mirror.tokens, *path][0].context[-1])
    known = {node.context[-1] for node in mirror.expanded[*mirror.tokens, *path]}
    path += [next(token for token in range(VOCAB) if token not in known), 7]
    for tokens in [path] if at_once else [[token] for token in path]:
        bench.commit(1, tokens)
    bench.finish()
    (found,) = bench.drafter.calibration.reliability()
    # The root and two nodes below it had four children each; what came behind the miss is nobody's child.
    assert (found.rule, sum(found.children), sum(found.hits)) == ("greedy", 12, 2)


def test_children_that_there_are_not_are_no_trials():
    bench = Bench()
    mirror = bench.open(sampling=SamplingSpec(max_new_tokens=50, allowed_token_ids=(4, 9), temperature=1.0))
    bench.finish()
    assert len(children_of_root(mirror)) == 2
    bench.commit(1, [4])
    bench.finish()
    (found,) = bench.drafter.calibration.reliability()
    assert (found.rule, sum(found.children), sum(found.hits)) == ("coupled", 2, 1)


def test_target_only_learns_in_buckets_of_its_own():
    bench = Bench()
    spec = SamplingSpec(temperature=0.8, verification=VerificationRule.TARGET_ONLY, max_new_tokens=50)
    mirror = bench.open(sampling=spec)
    bench.finish()
    before = bench.drafter.calibration.learned.copy()
    bench.commit(1, [children_of_root(mirror)[0][0]])
    bench.finish()
    changed = np.nonzero(bench.drafter.calibration.learned != before)[0]
    assert len(changed) == 4
    assert changed.min() >= 2 * len(before) // 3


def test_a_session_that_was_opened_anew_learns_nothing_of_the_row_it_takes():
    bench = Bench(max_sessions=1)
    mirror = bench.open(epoch=1)
    bench.finish()
    token = children_of_root(mirror)[0][0]
    bench.open(epoch=2, prompt=[9, 9, 9])
    bench.commit(1, [token])
    bench.finish()
    assert bench.drafter.calibration.reliability() == []
