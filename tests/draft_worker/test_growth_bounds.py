"""What ends branches: credit, depth, stops, lengths, filters, estimates; and configurations that cannot work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.session import GrowthLimits
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]
KEY = (7, 1)


@pytest.mark.parametrize("credit", [1, 3, 10, 33])
def test_live_nodes_stay_within_the_credit_and_go_on_after_a_commit(
    tools: Any, make_growth: Make, make_start: Make, credit: int
):
    growth, _ = make_growth()
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=credit, max_depth=50)))
    live: set[int] = set()
    for _ in range(12):
        for record in tools.growths_of(tools.finish(growth)):
            live |= set(record.node_ids)
            assert len(live) <= credit
        session = tools.open_session(growth)
        assert len(live) == session.tree.size
        assert session.tree.size > credit - 4
        growth.commit(KEY, 1, session.length, [next(iter(session.tree.root.children))])
        live = {node.node_id for node in session.tree.nodes()}


def test_depth_is_bounded_below_the_current_root(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=1000, max_depth=2)))
    tools.finish(growth)
    session = tools.open_session(growth)
    assert max(node.depth for node in session.tree.nodes()) == 2
    assert session.tree.size == 20
    growth.commit(KEY, 1, 3, [next(iter(session.tree.root.children))])
    tools.finish(growth)
    assert max(node.depth for node in session.tree.nodes()) == 2
    assert session.tree.size == 20


def test_stop_tokens_and_the_length_limit_end_branches(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    stops = tuple(range(0, 24, 2))
    # A stop token within the prompt stops nothing.
    growth.open(make_start(prompt=[5, 2], sampling=SamplingSpec(max_new_tokens=3, stop_token_ids=stops)))
    tools.finish(growth)
    session = tools.open_session(growth)
    nodes = list(session.tree.nodes())
    assert any(node.token in stops for node in nodes)
    for node in nodes:
        # Indices 2, 3 and 4 exist; nothing follows the last of them, nor a stop token.
        assert (node.child_tokens is not None) == (node.token not in stops and node.position < 4)
    growth.commit(KEY, 1, 2, [4])
    assert tools.finish(growth) == []


def test_growth_ends_at_the_models_length(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth(max_model_len=6)
    growth.open(make_start(prompt=[1, 2, 3]))
    tools.finish(growth)
    session = tools.open_session(growth)
    assert max(node.position for node in session.tree.nodes()) == 5
    growth.commit(KEY, 1, 3, [1, 2, 3, 4, 5])
    assert tools.finish(growth) == []


def test_stop_tokens_are_banned_before_the_minimum(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    stops = tuple(range(12))
    spec = SamplingSpec(max_new_tokens=20, stop_token_ids=stops, min_new_tokens=2)
    growth.open(make_start(prompt=[5, 2], output=[13], sampling=spec))
    tools.finish(growth)
    nodes = list(tools.open_session(growth).tree.nodes())
    assert all(node.token not in stops for node in nodes if node.position < 4)
    assert any(node.token in stops for node in nodes if node.position >= 4)


def test_allowed_tokens_leave_fewer_children(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    growth.open(make_start(sampling=SamplingSpec(max_new_tokens=20, allowed_token_ids=(4, 9), temperature=1.0)))
    tools.finish(growth)
    session = tools.open_session(growth)
    assert {node.token for node in session.tree.nodes()} == {4, 9}
    assert session.tree.root.child_buckets is not None
    assert len(session.tree.root.child_buckets) == 2
    growth.commit(KEY, 1, 3, [4])
    tools.finish(growth)


def test_penalties_count_the_nodes_own_path_and_bias_is_added(
    tools: Any, make_growth: Make, make_start: Make, logits_after: Make
):
    penalties: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.9}
    spec = SamplingSpec(max_new_tokens=60, logit_bias={3: 1.5, 8: -2.0}, **penalties)
    growth, _ = make_growth()
    growth.open(make_start(1, sampling=spec, prompt=[3, 1, 4, 1, 5], output=[9, 2, 9]))
    growth.open(make_start(2, prompt=[3, 1, 4]))
    tools.finish(growth)
    growth.commit(KEY, 1, 8, [next(iter(tools.open_session(growth).tree.root.children)), 9])
    tools.finish(growth)
    tools.check_children(tools.open_session(growth, (7, 2)), logits_after)
    session, checked = tools.open_session(growth), 0
    for node in session.tree.nodes():
        if node.child_tokens is None:
            continue
        context = session.tokens + tools.path_tokens(node)
        logits, output = logits_after(context).copy(), context[5:]
        for token in set(context):
            logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
            logits[token] -= 0.9 * output.count(token) + 0.4 * (token in output)
        logits[3] += 1.5
        logits[8] -= 2
        assert node.child_tokens == np.argsort(-logits, kind="stable")[:4].tolist()
        checked += 1
    assert checked > 5


def test_unlikely_nodes_are_neither_made_nor_expanded(tools: Any, make_growth: Make, make_start: Make):
    growth, _ = make_growth(min_path_value=0.2, min_acceptance=0.1)
    growth.open(make_start(limits=GrowthLimits(max_live_nodes=500, max_depth=50)))
    tools.finish(growth)
    for node in tools.open_session(growth).tree.nodes():
        assert node.acceptance >= 0.1
        assert (node.child_tokens is not None) == (node.path_value >= 0.2)


def test_a_config_under_which_no_chain_would_grow_is_refused():
    with pytest.raises(ValueError, match="at least min_acceptance"):
        GrowthConfig(rejection_acceptance=0.1, min_acceptance=0.2)


@pytest.mark.parametrize(
    "field", ["branching", "max_step_nodes", "max_session_nodes", "max_step_tokens", "min_path_value"]
)
def test_config_out_of_range_is_refused(field: str):
    given: dict[str, Any] = {field: -1}
    with pytest.raises(ValueError, match=field):
        GrowthConfig(**given)
