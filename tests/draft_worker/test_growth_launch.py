"""Children ranked with the step and children chosen from logits make the same trees, in float32."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_launch import GrowthLauncher
from outrider.draft_worker.growth_step import GrowthConfig, SessionGrowth
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.engine.buckets import Bucket
from outrider.engine.draft_buckets import growth_buckets, words_per_mask
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec, VerificationRule

Make = Callable[..., Any]

SPECS = (
    SamplingSpec(max_new_tokens=150),
    SamplingSpec(temperature=0.9, seed=2**63 + 5, max_new_tokens=150),
    SamplingSpec(temperature=1.0, seed=7, choice_index=2, top_p=0.9, top_k=40, min_p=0.01, max_new_tokens=150),
    SamplingSpec(temperature=0.7, seed=8, repetition_penalty=1.3, max_new_tokens=150),
    SamplingSpec(temperature=1.0, seed=9, verification=VerificationRule.TARGET_ONLY, max_new_tokens=150),
)


def run_side_by_side(
    runners: tuple[ModelRunner, ModelRunner],
    make_start: Make,
    specs: tuple[SamplingSpec, ...],
    *,
    sync: bool = False,
    rounds: int = 10,
) -> int:
    """Grows and commits the same with both; how many nodes were made."""
    config = GrowthConfig(max_step_nodes=24, max_step_tokens=40, max_model_len=250, min_path_value=0.001)
    growths = [TreeGrowth(runner, config) for runner in runners]
    rng = np.random.default_rng(len(specs))
    vocab_size, nodes = runners[0].vocab_size, 0
    for number, spec in enumerate(specs):
        prompt = rng.integers(0, vocab_size, 30 + 7 * number).tolist()
        mode = GrowthMode.SYNC if sync and number % 2 else GrowthMode.ASYNC
        # Few enough nodes for a round to be whole before its commit.
        limits = GrowthLimits(
            max_live_nodes=80, mode=mode, sync_nodes=6, max_depth=4 if mode is GrowthMode.SYNC else 16
        )
        for growth in growths:
            growth.open(make_start(number, prompt=prompt, sampling=spec, limits=limits))
    for _ in range(rounds):
        for _ in range(4):
            made = [growth.step() for growth in growths]
            ours, theirs = ([] if step is None else step.growths for step in made)
            assert_same(ours, theirs)
            nodes += sum(len(growth.node_ids) for growth in ours)
        for number in range(len(specs)):
            session = growths[0].session((7, number))
            assert session is not None
            tokens, node = [], session.tree.root
            while node.children and rng.random() < 0.7:
                node = list(node.children.values())[min(int(rng.exponential(0.7)), len(node.children) - 1)]
                tokens.append(node.token)
            tokens += [int(rng.integers(vocab_size))] if not tokens or rng.random() < 0.3 else []
            length = session.length
            for growth in growths:
                growth.commit((7, number), 1, length, tokens)
    for growth in growths:
        growth.close_owned("owner")
        assert growth.slots.used == 0
    return nodes


def assert_same(ours: list[SessionGrowth], theirs: list[SessionGrowth]) -> None:
    for name in ("session_id", "as_of", "node_ids", "parents", "tokens", "complete"):
        assert [getattr(growth, name) for growth in ours] == [getattr(growth, name) for growth in theirs]
    for growth, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(growth.acceptance, other.acceptance, rtol=1e-4)


@pytest.mark.parametrize("sync", [False, True])
def test_ranked_with_the_step_or_chosen_from_logits(checkpoint: Path, make_start: Make, sync: bool):
    config = EngineConfig(model_path=checkpoint, num_slots=900, max_num_seqs=4, max_model_len=250, torch_threads=1)
    runners = ModelRunner(config, decoder=True), ModelRunner(config)
    calls: list[Any] = []
    forward = runners[0].forward
    runners[0].forward = lambda batch: calls.append(batch) or forward(batch)
    assert run_side_by_side(runners, make_start, SPECS[:3], sync=sync) > 150
    assert not calls
    # Rules and processors that need the logits go on without a graph, and leave the others what they were.
    assert run_side_by_side(runners, make_start, SPECS[1:]) > 150
    assert calls


@pytest.mark.gpu
def test_graphs_give_the_tree_of_the_eager_model(make_start: Make):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options: dict[str, Any] = {
        "model_path": embedded_draft_path(), "device": "cuda", "dtype": "float32", "num_slots": 4000, "max_num_seqs": 5,
        "max_model_len": 250,
    }  # fmt: skip
    runners = ModelRunner(EngineConfig(**options)), ModelRunner(EngineConfig(**options, enforce_eager=True))
    steps = runners[0].steps
    assert steps is not None
    assert runners[1].steps is None
    # One that holds whatever comes with children ranked, and one where logits are looked at.
    mixture = Bucket(
        tokens=72, sessions=5, keys=1, query_len=72, logit_rows=72, nodes=0, words=words_per_mask(64), children=4
    )
    steps.warm_up([steps.ladder.bucket(dataclasses.replace(mixture, children=count)) for count in (4, 0)])
    assert steps.graphs == 2
    for specs in (SPECS[:3], SPECS):
        assert run_side_by_side(runners, make_start, specs, rounds=6) > 100


def test_growth_begins_with_a_bucket_for_every_width(checkpoint: Path):
    config = EngineConfig(model_path=checkpoint, num_slots=900, max_num_seqs=16, max_model_len=250, torch_threads=1)
    steps = ModelRunner(config, decoder=True).steps
    assert steps is not None
    words = words_per_mask(200)
    found = growth_buckets(
        steps.ladder, step_nodes=64, step_tokens=256, level_nodes=8, sessions=16, children=4, words=words
    )
    assert words == 4
    assert len(found) == len(set(found)) < 70
    for sessions in (1, 3, 16):
        for rows in range(sessions, 81):
            for query_len in {rows - sessions + 1, -(-rows // sessions)}:
                need = steps.ladder.bucket(
                    Bucket(
                        tokens=rows, sessions=sessions, keys=99, query_len=query_len, logit_rows=rows, nodes=0,
                        words=words, children=4,
                    )
                )  # fmt: skip
                assert need in found, (sessions, rows, query_len)
    # A level of every sync session, by itself and beside a chunk of a prompt.
    for rows, query_len in ((16 * 8, 8), (256 + 16 * 8, 256), (250 + 10 * 8, 100)):
        need = Bucket(
            tokens=rows, sessions=16, keys=99, query_len=query_len, logit_rows=rows, nodes=0, words=words, children=4
        )
        assert any(bucket.holds(need) and bucket.children == 4 for bucket in found), (rows, query_len)


class TimedSteps:
    """Staged steps without a model, which take as long as they are told."""

    takes_trees, due, is_done = True, None, True

    def __init__(self) -> None:
        self.taken_ns = 0
        self.bucket = SimpleNamespace(tokens=4)

    def stage_growth(self, rows: Any, **options: Any) -> "TimedSteps":
        return self

    def launch(self, staged: Any) -> "TimedSteps":
        return self

    def device_ns(self) -> int:
        return self.taken_ns

    def children(self) -> SimpleNamespace:
        return SimpleNamespace(tokens=None, log_q=None, scores=None)


def test_a_first_step_that_compiled_is_soon_forgotten():
    steps, chooser = TimedSteps(), SimpleNamespace(scored=4, ranked=lambda *found: ([], [], []))
    launcher = GrowthLauncher(SimpleNamespace(steps=steps), chooser, max_nodes=64)  # type: ignore[arg-type]
    plan = SimpleNamespace(is_ranked=True, nodes=[1], rows=SimpleNamespace(records=[]), spans=[])

    def expected_ns(taken_ns: int) -> float:
        steps.taken_ns = taken_ns
        flight = launcher.launch(plan)  # type: ignore[arg-type]
        flight.collect()
        return flight.expected_end_ns - flight.begun_ns

    expected_ns(30_000_000_000)
    expected_ns(1_000_000)
    assert expected_ns(1_000_000) < 1_000_000_000
