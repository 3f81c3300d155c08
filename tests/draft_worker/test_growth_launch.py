"""Children ranked with the step, or by one that overlaps another, make the trees that logits make, in float32."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.growth_launch import GrowthLauncher
from outrider.draft_worker.growth_step import SessionGrowth
from outrider.draft_worker.session import GrowthLimits, GrowthMode
from outrider.engine.batch import BatchBuilder
from outrider.engine.buckets import Bucket
from outrider.engine.draft_buckets import growth_buckets, words_per_mask
from outrider.engine.draft_staging import GrowthRows
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.engine.step_trees import RECORD
from outrider.kernels.coupled_sampling import coupled_topk_scored
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


def gpu_runners() -> tuple[ModelRunner, ModelRunner]:
    """With graphs, and run eagerly."""
    options: dict[str, Any] = {
        "model_path": embedded_draft_path(), "device": "cuda", "dtype": "float32", "num_slots": 4000, "max_num_seqs": 5,
        "max_model_len": 250,
    }  # fmt: skip
    return ModelRunner(EngineConfig(**options)), ModelRunner(EngineConfig(**options, enforce_eager=True))


@pytest.mark.gpu
def test_graphs_give_the_tree_of_the_eager_model(make_start: Make):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    runners = gpu_runners()
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


QUEUED_SPECS = (
    *SPECS[:3],
    SamplingSpec(temperature=1.0, seed=11, stop_token_ids=tuple(range(0, 96, 5)), max_new_tokens=60),
)


class QueuedGrowth:
    """Growth with up to two steps under way, whose children are held against fresh forwards of another runner."""

    def __init__(self, runner: ModelRunner, reference: ModelRunner, make_start: Make) -> None:
        config = GrowthConfig(
            max_step_nodes=24, max_step_tokens=40, max_model_len=250, min_path_value=0.001, prior_strength=1e9
        )
        self.growth = TreeGrowth(runner, config)
        self.growth._launcher.overlaps = True
        self._reference = reference
        self._chance = np.random.default_rng(3)
        self._checked: set[DraftNode] = set()
        self.deviations = self.most_begun = 0
        for number, spec in enumerate(QUEUED_SPECS):
            prompt = self._chance.integers(0, runner.vocab_size, 30 + 7 * number).tolist()
            self.growth.open(make_start(number, prompt=prompt, sampling=spec, limits=GrowthLimits(max_live_nodes=80)))

    @property
    def nodes(self) -> int:
        """That were checked."""
        return len(self._checked)

    def run(self, steps: int, begin: Callable[[TreeGrowth], bool]) -> None:
        """Begins, finishes and commits in any order."""
        finished = 0
        while finished < steps:
            begun = self.growth.takes_another and self._chance.random() < 0.8 and begin(self.growth)
            self.most_begun = max(self.most_begun, self.growth.num_begun)
            if not begun and self.growth.num_begun:
                self.growth.finish()
                finished += 1
                self._check()
            if self._chance.random() < 0.25 or not self.growth.num_begun:
                self._commit(int(self._chance.integers(len(QUEUED_SPECS))))

    def _commit(self, number: int) -> None:
        session, chance = self.growth.session((7, number)), self._chance
        assert session is not None
        tokens, node = [], session.tree.root
        while node.children and chance.random() < 0.7:
            node = list(node.children.values())[min(int(chance.exponential(0.7)), len(node.children) - 1)]
            tokens.append(node.token)
        tokens += [int(chance.integers(96))] if not tokens or chance.random() < 0.2 else []
        if session.length + len(tokens) < 200:
            self.growth.commit((7, number), 1, session.length, tokens)

    def _check(self) -> None:
        for number, spec in enumerate(QUEUED_SPECS):
            session = self.growth.session((7, number))
            assert session is not None
            for node in (session.tree.root, *session.tree.nodes()):
                if node.child_tokens is not None and node not in self._checked:
                    path, above = [], node
                    while above.parent is not None:
                        path.insert(0, above.token)
                        above = above.parent
                    self._check_node(node, [*session.tokens, *path], spec)
                    self._checked.add(node)

    def _check_node(self, node: DraftNode, context: list[int], spec: SamplingSpec) -> None:
        slots, builder = self._reference.slots, BatchBuilder()
        row = slots.acquire_row()
        slots.extend(row, len(context))
        builder.add_chain(row, context, 0, want_last_logits=True)
        logits = self._reference.forward(builder.build())
        slots.release_row(row)
        numbers = np.frombuffer(spec.record, dtype=RECORD)
        sampling = {name: torch.from_numpy(numbers[name].copy()).to(logits.device) for name in RECORD.names or ()}
        position = torch.tensor([len(context)], device=logits.device)
        found = coupled_topk_scored(
            logits, sampling["seeds"], position, sampling["temperature"], sampling["top_k"], sampling["top_p"],
            sampling["min_p"], choice_index=sampling["choice_index"], k=5,
        )  # fmt: skip
        tokens, log_q, scores = (column.cpu().numpy() for column in found)
        assert node.child_tokens is not None
        wanted = [token for token in tokens[0, :4].tolist() if token >= 0]
        if node.child_tokens != wanted:
            # Only where two of them are as good.
            gaps = -np.diff(scores[0])
            assert np.nanmin(gaps) < 1e-3, (node.child_tokens, wanted, gaps)
            self.deviations += 1
            return
        calibration = self.growth.calibration
        buckets = calibration.buckets(log_q[:, :4], scores[:, :4], numbers["temperature"])
        assert node.child_buckets is not None
        self.deviations += buckets[0, : len(wanted)].tolist() != node.child_buckets.tolist()


def test_steps_that_overlap_grow_what_the_model_says(checkpoint: Path, make_start: Make):
    config = EngineConfig(model_path=checkpoint, num_slots=900, max_num_seqs=5, max_model_len=250, torch_threads=1)
    queued = QueuedGrowth(ModelRunner(config, decoder=True), ModelRunner(config), make_start)
    queued.run(120, TreeGrowth.begin)
    assert queued.most_begun == 2
    assert queued.nodes > 400
    assert queued.deviations <= 0.02 * queued.nodes


@pytest.mark.gpu
# torch says once a process that this mode is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_graphs_that_overlap_grow_what_the_eager_model_says(make_start: Make):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    runners = gpu_runners()
    assert runners[0].steps is not None
    steps = runners[0].steps
    mixture = Bucket(
        tokens=72, sessions=5, keys=1, query_len=72, logit_rows=72, nodes=0, words=words_per_mask(64), children=4
    )
    steps.warm_up([steps.ladder.bucket(mixture)])
    queued = QueuedGrowth(*runners, make_start)
    # Every buffer of the ring once.
    queued.run(8, TreeGrowth.begin)

    def begin_without_waiting(growth: TreeGrowth) -> bool:
        torch.cuda.set_sync_debug_mode("error" if growth.num_begun else "default")
        try:
            return growth.begin()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    queued.run(60, begin_without_waiting)
    assert queued.most_begun == 2
    assert queued.nodes > 200
    assert queued.deviations <= 0.02 * queued.nodes


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
    plan = SimpleNamespace(is_ranked=True, nodes=[1], rows=GrowthRows(), spans=[])

    def expected_ns(taken_ns: int) -> float:
        steps.taken_ns = taken_ns
        flight = launcher.launch(plan)  # type: ignore[arg-type]
        flight.collect()
        return flight.expected_end_ns - flight.begun_ns

    expected_ns(30_000_000_000)
    expected_ns(1_000_000)
    assert expected_ns(1_000_000) < 1_000_000_000
