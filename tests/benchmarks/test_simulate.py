"""The simulator: its path model and trees, its options, and short runs whose outcome is known."""

import gc
import json
from collections import Counter

import pytest
from benchmarks.simulation.command import run
from benchmarks.simulation.growing_tree import GrowingTree
from benchmarks.simulation.path_model import PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.tree_grower import TreeGrower

from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import SpeculationMode

# Small and short, and ended by tokens: what is asked of it is no matter of speed.
QUICK = ("--target-step-ms", "4", "--draft-step-ms", "0.5", "--json")


def simulate(capsys, *options: str) -> list[dict]:
    assert run([*QUICK, *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sessions": 0}, "sessions: 0 given, 1 to 1000"),
        ({"sessions": 1001}, "1 to 1000"),
        ({"workers": 65}, "workers: 65 given, 1 to 64"),
        ({"target_step_ms": 0.0}, "target_step_ms: 0.0 given, more than 0"),
        ({"draft_rtt_ms": -1.0}, "draft_rtt_ms: -1.0 given, 0 or more"),
        ({"rank_rates": (0.9, 0.2)}, "sum of at most 1"),
        ({"rank_rates": (0.9,), "spread": 0.2}, "spread: 0.2 given"),
        ({"collector": "sometimes"}, "one of serving, on, frozen, off"),
        ({"draft_width": 0}, "draft_width: 0 given, at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        Settings(**settings)


def test_the_command_line_refuses_what_the_settings_refuse(capsys):
    assert run(["--sessions", "2000"]) == 1
    assert "sessions: 2000 given" in capsys.readouterr().err


def test_a_step_costs_by_rows_in_stairs_and_by_sessions():
    plain = Settings(target_step_ms=8.0, target_row_us=10.0, target_session_us=100.0)
    assert plain.target_step_ns(rows=33, sessions=2) == 8_530_000
    stairs = Settings(target_step_ms=8.0, target_row_us=10.0, target_stair_rows=16)
    assert stairs.target_step_ns(rows=33, sessions=2) == stairs.target_step_ns(rows=48, sessions=9) == 8_480_000


def test_ranks_come_at_their_rates_and_estimates_are_calibrated():
    model = PathModel(seed=3, rank_rates=(0.6, 0.2, 0.1), spread=0.3)
    ranks, trials, hits = Counter(), Counter(), Counter()
    for position in range(20_000):
        ranks[model.rank(7, position)] += 1
        right = model.token(7, position)
        guesses = model.guesses(7, position, None)
        assert len({guess.token for guess in guesses}) == 3
        for guess in guesses:
            trials[guess.acceptance] += 1
            hits[guess.acceptance] += guess.token == right
            assert (guess.path_hash is None) == (guess.token == right)
    assert [ranks[rank] / 20_000 for rank in (0, 1, 2, None)] == pytest.approx([0.6, 0.2, 0.1, 0.1], abs=0.02)
    assert len(trials) == 6
    for acceptance, count in trials.items():
        assert hits[acceptance] / count == pytest.approx(acceptance, abs=0.02)
    other = PathModel(seed=4, rank_rates=(0.6, 0.2, 0.1), spread=0.3)
    assert [other.token(7, at) for at in range(9)] != [model.token(7, at) for at in range(9)]


def grown_tree(model: PathModel, *, is_sync: bool, max_nodes: int) -> GrowingTree:
    tree = GrowingTree(model, key=5, epoch=1, length=2, is_sync=is_sync, max_nodes=max_nodes, max_depth=3)
    while tree.best_value:
        tree.expand()
        tree.end_step()
    return tree


def test_a_draft_grows_a_level_a_step_however_wide():
    model = PathModel(seed=1, rank_rates=(0.5, 0.5), spread=0.0)
    grower = TreeGrower(model, width=16)
    grower.open(1, key=5, epoch=1, length=2, is_sync=False, max_nodes=40, max_depth=9)
    assert [len(grower.step()[1].rows) for _ in range(4)] == [2, 4, 8, 16]


def test_a_tree_keeps_what_a_commit_leaves_and_forgets_the_rest():
    model = PathModel(seed=1, rank_rates=(0.9, 0.1), spread=0.0)
    tree = grown_tree(model, is_sync=False, max_nodes=40)
    # Every right token is one of the two children, so that the tree survives.
    tree.commit([model.token(5, 2)])
    assert tree.root.children
    assert 0 < tree.size < 40
    assert tree.root.value == 1.0
    assert {child.depth for child in tree.root.children} == {1}
    assert max(child.value for child in tree.root.children) == pytest.approx(0.9)
    tree.commit([(model.token(5, 3) + 77) % 32_000])
    assert (tree.size, tree.length, tree.root.children) == (0, 4, None)
    assert tree.best_value == 1.0


def test_a_sync_tree_ends_by_nodes_or_depth_and_begins_anew():
    model = PathModel(seed=1, rank_rates=(0.9,), spread=0.0)
    tree = grown_tree(model, is_sync=True, max_nodes=24)
    assert tree.size == 3
    assert tree.finish_if_whole()
    assert not tree.finish_if_whole()
    tree.commit([model.token(5, 2)])
    assert (tree.size, tree.best_value) == (0, 1.0)
    assert grown_tree(model, is_sync=True, max_nodes=2).size == 2


def test_chains_reach_the_length_that_their_rate_gives_and_off_one_token(capsys):
    chain = ("--rank-rates", "0.7", "--spread", "0", "--max-depth", "4", "--max-nodes", "4")
    off, sync = simulate(capsys, "--sessions", "4", "--tokens", "150", "--mode", "off", "sync", *chain)
    assert off["settings"]["mode"] == SpeculationMode.OFF
    assert (off["acceptance_length"], off["nodes_per_step"], off["draft_steps"]) == (1.0, 0.0, 0)
    # 1 + 0.7 + 0.7^2 + 0.7^3 + 0.7^4, of some 200 verifications and more.
    assert sync["acceptance_length"] == pytest.approx(2.77, abs=0.35)
    for result in (off, sync):
        assert result["wrong_tokens"] == 0
        assert result["rounds"] > 10
        assert 0 < result["target_busy"] <= 1
        assert result["target_step_ms"]["p50"] >= 4.0
        rounds_in_tokens = result["rounds"] * result["sessions_per_step"] * result["acceptance_length"]
        assert result["tokens_per_s"] * result["seconds"] == pytest.approx(rounds_in_tokens, rel=0.2)
        assert result["own_scheduling_ms"]["p50"] <= result["scheduling_ms"]["p99"]
        assert 0 < result["scheduling_cpu_ms"]["p50"] <= result["scheduling_ms"]["p99"]


def test_async_speculates_over_several_workers_and_a_distant_target_is_exposed(capsys):
    options = ("--sessions", "4", "--workers", "2", "--targets", "2", "--mode", "async", "--tokens", "240")
    (near,) = simulate(capsys, *options)
    # What goes ahead hides the way.
    (far,) = simulate(capsys, *options, "--target-rtt-ms", "10", "--draft-rtt-ms", "2", "--no-ahead")
    for result in (near, far):
        assert result["wrong_tokens"] == 0
        # On a busy machine trees may not pay; test_simulation_policies.py says in virtual time what they are worth.
        assert result["acceptance_length"] >= 1
        assert 1 <= result["sessions_per_step"] <= 4
        assert result["draft_steps"] > 0
    # How near the near one is depends on the machine.
    assert far["exposed_ms"]["p50"] >= 10.0


def test_a_run_by_tokens_ends_with_them(capsys):
    (result,) = simulate(capsys, "--sessions", "3", "--tokens", "20", "--mode", "async", "--collector", "off")
    assert gc.isenabled()
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(60)
    assert result["wrong_tokens"] == 0


def test_growth_behind_batches_that_were_sent_ahead_changes_no_token(capsys, monkeypatch):
    """Over streams, to workers that find the trees for themselves."""
    sent, extend = [], TargetLink.extend
    monkeypatch.setattr(TargetLink, "extend", lambda link, more: sent.append(more) or extend(link, more))
    options = ("--sessions", "3", "--tokens", "60", "--mode", "async", "--rounds", "ahead", "--workers", "2")
    # A machine may be so busy that none comes in time.
    for _ in range(5):
        (result,) = simulate(capsys, *options)
        assert result["tokens_per_s"] * result["seconds"] == pytest.approx(180)
        assert result["wrong_tokens"] == 0
        if sent:
            break
    assert sent
