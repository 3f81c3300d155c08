"""Whatever sessions keep of a step, a resident draft's kernels were compiled at its warm-up.

The technique is that of `tests.outrider.engine.test_warm_up_kernels`: launches are noted, none runs, no GPU is needed.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.outrider.engine import test_warm_up_kernels as steps

from outrider.engine.eagle_random import write_random_eagle
from outrider.engine.model_runner import ModelRunner
from outrider.engine.one_graph_buckets import RoundBucket, RoundLayout, RoundNeeds
from outrider.engine.one_graph_shape import RoundShape
from outrider.kernels import skinny_linear
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.one_graph_setup import make_rounds
from outrider.target_worker.planning import Work
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.resident_graphs import SizedGraphs
from outrider.target_worker.resident_growth import DraftLimits
from outrider.target_worker.sessions import Outcome, Session, TreeResult

Kernels = steps.Kernels
noted = steps.noted
_SPECS = (
    SamplingSpec(max_new_tokens=4000),
    SamplingSpec(temperature=1.0, seed=3, top_p=0.9, max_new_tokens=4000),
    SamplingSpec(temperature=1.0, verification=VerificationRule.TARGET_ONLY, max_new_tokens=4000),
    SamplingSpec(temperature=1.0, verification=VerificationRule.REJECTION, max_new_tokens=4000),
    SamplingSpec(temperature=1.0, repetition_penalty=1.2, max_new_tokens=4000),
    SamplingSpec(temperature=1.0, logit_bias={3: 1.0, 5: -2.0}, max_new_tokens=4000),
    SamplingSpec(temperature=1.0, allowed_token_ids=(1, 2, 9), max_new_tokens=4000),
    SamplingSpec(temperature=1.0, stop_token_ids=(1, 9), min_new_tokens=4000, max_new_tokens=4000),
)
# Compiled when sessions first ask for them, as the target's are.
_OF_PROCESSORS = {"_penalty_kernel", "_bias_kernel", "_allowed_kernel", "_banned_kernel"}


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up runs what it would compile and capture on a GPU."""

    def run_each(graphs: SizedGraphs, sizes: Sequence, program: Callable[..., object]) -> None:
        for size in sizes:
            program(size, torch.from_numpy(graphs._nothing(size)))  # pyright: ignore[reportPrivateUsage]

    def warm_up(graphs: SizedGraphs, sizes: Sequence) -> None:
        run_each(graphs, sizes, graphs._program)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(SizedGraphs, "rehearse", run_each)
    monkeypatch.setattr(SizedGraphs, "warm_up", warm_up)


def make_draft(folder: Path, **head: object) -> tuple[ModelRunner, ResidentDraft]:
    (folder / "target").mkdir()
    runner = steps.make_runner(folder / "target", nodes=64)
    write_random_eagle(folder / "head", folder / "target", **head)  # pyright: ignore[reportArgumentType]
    return runner, ResidentDraft.load(ResidentConfig(head=folder / "head"), runner)


class AnyStep:
    """What a step of random sessions leaves a draft.

    Args:
        runner: the target.
        chance: draws.
        specs: of its sessions.
    """

    def __init__(self, runner: ModelRunner, chance: random.Random, specs: Sequence[SamplingSpec]) -> None:
        self._runner, self._chance, self._specs = runner, chance, specs
        self.works: list[Work] = []
        self.results: list[TreeResult] = []
        self.first_rows: dict[int, int] = {}
        assert runner.steps is not None
        count = chance.choice([1, chance.randint(1, 20), chance.randint(1, 63)])
        # Those that verify come first, and then a prompt of any length.
        for _ in range(count):
            self._add_tree(1200 // count)
        if chance.random() < 0.6:
            self._add_prompt(chance.choice([chance.randint(1, 80), chance.randint(1, 600), 1500]))
        total = sum(work.rows for work in self.works)
        features = runner.steps.program.features
        runner.steps.features = (
            features[:total] if total <= len(features) else features.new_empty(total, features.shape[1])
        )

    def close(self) -> None:
        for work in self.works:
            self._runner.slots.release_row(work.session.row)

    def _add_tree(self, most_keys: int) -> None:
        chance = self._chance
        emitted = chance.choice([1, 1, chance.randint(1, 6), chance.randint(1, 15)])
        work = self._work(
            chance.choice(self._specs),
            context=chance.randint(1, most_keys),
            prefill=chance.choice([0, 0, chance.randint(1, 5)]),
            emitted=emitted,
        )
        work.verifies, work.nodes = True, emitted - 1 + chance.randint(0, 4)
        accepted = sorted(chance.sample(range(1, work.nodes + 1), emitted - 1))
        self.results.append(
            TreeResult(outcome=Outcome.ACCEPTED, accepted_nodes=accepted, token_ids=work.session.tokens[-emitted:])
        )
        self._place(work)

    def _add_prompt(self, length: int) -> None:
        self._place(self._work(self._specs[0], context=self._chance.randint(0, 9), prefill=length, emitted=0))

    def _work(self, spec: SamplingSpec, *, context: int, prefill: int, emitted: int) -> Work:
        """With the slots and tokens that the session has after the step's commit."""
        slots = self._runner.slots
        row, kept = slots.acquire_row(), context + prefill + emitted
        slots.extend(row, kept)
        session = Session(
            key=(1, row), epoch=1, order=row, row=row, tokens=[7] * (kept + 1), prompt_len=1, sampling=spec, limit=4000,
            draft=self._chance.choice([None, DraftLimits(), DraftLimits()]),
        )  # fmt: skip
        return Work(session=session, tree=None, context=context, prefill=prefill)

    def _place(self, work: Work) -> None:
        # A session whose step was given up is left alone.
        if self._chance.random() < 0.9:
            self.first_rows[id(work)] = sum(other.rows for other in self.works)
        self.works.append(work)


def follow_any(runner: ModelRunner, draft: ResidentDraft, specs: Sequence[SamplingSpec], *, steps: int) -> None:
    chance = random.Random(0)
    for _ in range(steps):
        step = AnyStep(runner, chance, specs)
        draft.follow(step.works, step.results, step.first_rows)
        step.close()


@pytest.mark.parametrize(
    "head", [{"layout": "eagle1"}, {}, {"draft_vocab_size": 200}], ids=["eagle1", "eagle3", "own output"]
)
@pytest.mark.parametrize("grows", [True, False], ids=["trees", "one-graph rounds"])
def test_what_any_step_leaves_finds_its_kernels(
    grows: bool, head: dict[str, object], noted: Kernels, rehearsed: None, tmp_path: Path
) -> None:
    runner, draft = make_draft(tmp_path, **head)
    assert runner.steps is not None
    draft.grows = grows
    # Of entries of the slot table that find no place in a round.
    runner.steps.rehearse([])
    draft.warm_up()
    known = set(noted)
    assert len(known) > 4
    follow_any(runner, draft, _SPECS, steps=150)
    assert (draft.trees > 50) == grows
    assert {kernel for kernel in noted - known if kernel[0] not in _OF_PROCESSORS} == set()


def test_a_deterministic_head_finds_them_for_any_rows(
    noted: Kernels, rehearsed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There products of many rows are ours, too, and of how many depends which kernel runs."""
    runner, draft = make_draft(tmp_path)
    draft.head._fixed = True  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(skinny_linear, "_is_ours", lambda _call: True)
    draft.grows = False
    draft.warm_up()
    known = set(noted)
    follow_any(runner, draft, _SPECS, steps=100)
    assert noted - known == set()


@pytest.mark.parametrize("shape", [RoundShape(steps=1, candidates=1), RoundShape(steps=2, candidates=3)], ids=str)
def test_one_graph_rounds_of_any_sessions_find_theirs(shape: RoundShape, noted: Kernels, tmp_path: Path) -> None:
    runner, draft = make_draft(tmp_path)
    rounds = make_rounds(runner, draft, shape, max_step_tokens=256).runner

    def run(bucket: RoundBucket) -> None:
        rounds.program.run(bucket, torch.from_numpy(RoundLayout.of_round(bucket).template.copy()))

    for bucket in rounds.ladder.first_set():
        run(bucket)
    plain = set(noted)
    for bucket in rounds.ladder.rehearsal():
        run(bucket)
    known = set(noted)
    # Those that change logits.
    assert known - plain
    chance = random.Random(0)
    for _ in range(60):
        entries = chance.choice([0, chance.randint(1, 9000), 70_000])
        needs = RoundNeeds(entries=entries, short_entries=chance.choice([0, 7]))
        run(rounds.ladder.bucket(chance.randint(1, rounds.ladder.max_sessions), needs))
    assert noted - known == set()
