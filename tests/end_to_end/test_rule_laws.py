"""Under rules with coins the output is a sample of the target's law: exact enumeration against chi-square.

Everything is the product's own but the models, which are tables: growth, mirrors, selection, verification. Drafts are
wrong on purpose, lag behind commits, change in mid-request, and results get lost.
"""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.draft_worker.session_growth import sessions_of

from outrider.coordinator import tree_choice
from outrider.coordinator.candidates import Candidates, candidates
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.commits import Answered, commit
from outrider.coordinator.forest import Forest
from outrider.coordinator.group import Group
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.mirror import graft
from outrider.coordinator.rounds import Step
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import (
    GenerationRequest,
    Growth,
    GrowthBatch,
    SessionVerdict,
    TreeSubmission,
    VerifyResult,
)
from outrider.coordinator.sessions.session import Session
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.verdicts import Verdicts
from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution
from outrider.draft_worker.drafters.model.choices import Children, HostChoices
from outrider.draft_worker.drafters.model.config import GrowthConfig
from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.engine.batch import ForwardBatch
from outrider.engine.kv_slots import SlotTable
from outrider.kernels.pool.pack import Packed
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import OpenRequest, TreeRequest
from outrider.target_worker.verifier import Verifier
from outrider.v1 import registry_pb2

VOCABULARY, LENGTH, BATCH = 3, 3, 250
PROMPT: tuple[int, ...] = (1, 2)


def table_of(seed: int, sharpness: float) -> torch.Tensor:
    """Logits by position and token."""
    chance = np.random.default_rng(seed)
    return torch.from_numpy(sharpness * chance.normal(size=(16, VOCABULARY, VOCABULARY))).float()


class TableDraft:
    """A draft model whose logits are a table."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self.table = table_of(seed, sharpness)

    def logits(self, packed: Packed, table: torch.Tensor, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        return self.table[packed.positions[rows].long(), packed.tokens[rows].long()]


class TableRunner:
    """A target whose logits are a table."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self.table = table_of(seed, sharpness)
        self.slots = SlotTable(num_slots=BATCH * 40, max_rows=BATCH, max_row_len=40)
        self.vocab_size = VOCABULARY
        self.info = SimpleNamespace(max_model_len=16, vocab_size=VOCABULARY)
        self.config = SimpleNamespace(max_tree_nodes=16, device="cpu", enable_prefix_caching=False, model_path="")
        self.steps = None
        self.ranks = SimpleNamespace(guard=contextlib.nullcontext)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        rows = torch.as_tensor(batch.logit_rows)
        return self.table[torch.as_tensor(batch.positions)[rows].long(), torch.as_tensor(batch.token_ids)[rows].long()]


TARGET = TableRunner(1, 0.6)


def law_of(spec: SamplingSpec) -> dict[tuple[int, ...], float]:
    law = {}
    for output in itertools.product(range(VOCABULARY), repeat=LENGTH):
        tokens, probability = [*PROMPT], 1.0
        for token in output:
            logits = TARGET.table[len(tokens) - 1, tokens[-1]].double().clone()
            for seen in set(tokens[len(PROMPT) :]):
                logits[seen] -= spec.presence_penalty
            probability *= float((logits / spec.temperature).softmax(-1)[token])
            tokens.append(token)
        law[output] = probability
    assert sum(law.values()) == pytest.approx(1.0)
    return law


class Bench:
    """A target, two drafts that do not agree, and the coordinator's parts between them, step by step."""

    def __init__(self, spec: SamplingSpec, *, seed: int) -> None:
        self.spec = spec
        self.chance = random.Random(seed)
        self.verifier = Verifier(TARGET, max_step_tokens=4096)  # pyright: ignore[reportArgumentType]
        config = GrowthConfig(
            branching=2, max_step_nodes=BATCH, max_model_len=16, max_step_tokens=4096, rejection_top_k=2
        )
        self.drafts = {
            f"draft-{number}": Drafters(
                ModelDrafter(
                    TableDraft(7 + number, 0.9), config, max_sessions=BATCH, num_slots=BATCH * 40, vocab_size=VOCABULARY
                ),
                None,
            )
            for number in range(2)
        }
        limits = registry_pb2.WorkerLimits(max_sessions=BATCH, max_tree_nodes=16, max_step_tokens=2 * BATCH)
        self.lane = TargetLane("target", self, limits)  # pyright: ignore[reportArgumentType]
        # A staircase: a step pays by the hundred rows, so that what one session sends hangs on all the others.
        self.lane.cost.predict_many_ns = lambda rows: 1e6 * (6 + -(-rows // 100))  # pyright: ignore[reportAttributeAccessIssue]
        self.sessions: dict[int, Session] = {}
        self.forest = Forest()
        self.untold: list[tuple[Session, int, list[int]]] = []
        self.accepted = 0

    def sample(self, count: int) -> Counter[tuple[int, ...]]:
        """So many outputs."""
        outputs: Counter[tuple[int, ...]] = Counter()
        for _ in range(0, count, BATCH):
            outputs.update(tuple(session.token_ids[len(PROMPT) :]) for session in self._run_batch())
        return outputs

    def _run_batch(self) -> list[Session]:
        self.untold.clear()
        sessions = [self._start(number) for number in range(BATCH)]
        self.sessions = {session.session_id: session for session in sessions}
        while running := [session for session in sessions if session.result is None]:
            for session in running:
                if self.chance.random() < 0.1:
                    self._move(session)
            for _ in range(1 + self.chance.randrange(3)):
                self._grow()
            self._tell_drafts()
            for _ in range(self.chance.randrange(2)):
                self._grow()
            self._verify(running)
        for session in sessions:
            self.verifier.close((0, session.session_id), session.epoch)
            for worker_id, epoch in session.draft_epochs.items():
                self.drafts[worker_id].close((0, session.session_id), epoch)
        return sessions

    def _start(self, number: int) -> Session:
        spec = replace(self.spec, seed=self.chance.getrandbits(64))
        request = GenerationRequest(request_id=str(number), prompt_token_ids=PROMPT, sampling=spec, max_depth=4)
        generation = Generation(request, max_buffered_events=100, release=lambda generation: None)
        session = Session(number, generation, 0, TextStream(None), self.forest)
        self._move(session)
        return session

    def _move(self, session: Session) -> None:
        """Another draft takes over, or the first one begins."""
        for worker_id, epoch in session.draft_epochs.items():
            self.drafts[worker_id].close((0, session.session_id), epoch)
            session.mirror.forget_worker(worker_id)
        session.draft_epochs.clear()
        worker_id = self.chance.choice(list(self.drafts))
        opening = session.opening(max_live_nodes=12)
        session.draft_epochs[worker_id] = opening.epoch
        start = SessionStart(
            key=(0, session.session_id),
            owner=worker_id,
            epoch=opening.epoch,
            prompt=opening.prompt,
            output=opening.output,
            sampling=opening.sampling,
            limits=GrowthLimits(max_live_nodes=12, max_depth=opening.max_depth),
        )
        self.drafts[worker_id].open(start)

    def _grow(self) -> None:
        for worker_id, draft in self.drafts.items():
            for made in (own for step in draft.advance() for own in sessions_of(step)):
                fields = {name: getattr(made, name) for name in Growth.__dataclass_fields__ if hasattr(made, name)}
                session = self.sessions[made.session_id]
                # What grew before the session moved is dropped, as by a link.
                if session.draft_epochs.get(worker_id) == made.epoch:
                    graft(worker_id, GrowthBatch.of([Growth(**fields)]), [session.mirror])

    def _tell_drafts(self) -> None:
        for session, position, token_ids in self.untold:
            for worker_id, epoch in session.draft_epochs.items():
                if session.result is None:
                    # A draft opened meanwhile has them already.
                    self.drafts[worker_id].commit((0, session.session_id), epoch, position, token_ids)
        self.untold.clear()

    def _verify(self, running: Sequence[Session]) -> None:
        flight = self.lane.submit(running, self.lane.trees.choose(self.lane.group(running)), waited_ns=0)
        self.lane.flights.clear()
        result: Any = flight.result
        step = Step(flight, result, 0)
        for place, (session, verdict) in enumerate(zip(running, result.verdicts, strict=True)):
            if self.chance.random() < 0.1:
                # The result is lost with its target; the session goes on at another one.
                session.flight, session.target_id = None, None
                continue
            position = len(session.token_ids)
            self.accepted += len(verdict.accepted_nodes)
            commit(step, Answered(np.array([place]), [session], Verdicts.of([verdict])))
            session.deliver()
            self.untold.append((session, position, session.token_ids[position:]))

    def submit(self, trees: Sequence[TreeSubmission], *, openings: Sequence[Any] = ()) -> VerifyResult:
        """The target's end of the lane."""
        for opening in openings:
            fields = {name: getattr(opening, name) for name in ("epoch", "prompt", "output", "sampling")}
            self.verifier.open(OpenRequest(key=(0, opening.session_id), **fields))
        step = self.verifier.step(
            [
                TreeRequest(
                    key=(0, tree.session_id),
                    epoch=tree.epoch,
                    length=tree.length,
                    tokens=tree.tokens,
                    parents=tree.parents,
                    distributions=tree.distributions,
                )
                for tree in trees
            ]
        )
        verdicts = []
        for tree, found in zip(trees, step.results, strict=True):
            assert found.fault is None, found.fault
            assert found.token_ids
            verdicts.append(
                SessionVerdict(
                    session_id=tree.session_id,
                    epoch=tree.epoch,
                    accepted_nodes=found.accepted_nodes,
                    token_ids=found.token_ids,
                )
            )
        return VerifyResult(step=0, verdicts=verdicts, step_ns=1, forward_ns=1, step_tokens=1)


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test over all outputs; those expected fewer than five times are one cell."""
    total = sum(counts.values())
    expected = np.array([probability * total for probability in law.values()])
    seen = np.array([counts[output] for output in law])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def sampled(rule: VerificationRule, *, count: int, presence_penalty: float = 0.0) -> tuple[float, int]:
    """The p-value of so many outputs under a rule, and how many drafted tokens were accepted."""
    spec = SamplingSpec(temperature=0.9, presence_penalty=presence_penalty, max_new_tokens=LENGTH, verification=rule)
    bench = Bench(spec, seed=11)
    return p_value(bench.sample(count), law_of(spec)), bench.accepted


@pytest.mark.parametrize("rule", [VerificationRule.REJECTION, VerificationRule.TARGET_ONLY])
def test_output_follows_the_targets_law(rule: VerificationRule):
    value, accepted = sampled(rule, count=1500, presence_penalty=0.4)
    assert value > 1e-3
    assert accepted > 500


def own_q(token: int, q: DraftDistribution | None) -> float:
    assert q is not None
    return float(q.weights[q.token_ids == token][0] / WEIGHT_SUM)


def test_a_selection_that_looks_at_the_draws_q_is_found_out(monkeypatch: pytest.MonkeyPatch):
    def biased(group: Group, max_tree_nodes: int) -> Candidates:
        most, deepest = group.reaches(max_tree_nodes)
        likely = [
            len(
                list(
                    itertools.takewhile(
                        lambda node: own_q(*node) > 0.5, zip(chain.tokens, chain.distributions, strict=True)
                    )
                )
            )
            for chain in group.mirrors
            if isinstance(chain, ChainMirror)
        ]
        return candidates(group.mirrors, most=list(map(min, most.tolist(), likely)), deepest=deepest.tolist())

    monkeypatch.setattr(tree_choice, "group_candidates", biased)
    assert sampled(VerificationRule.REJECTION, count=2000)[0] < 1e-6


def test_an_estimate_that_tells_of_the_draw_is_found_out(monkeypatch: pytest.MonkeyPatch):
    honest = HostChoices.choose

    def biased(self: HostChoices, *arguments: Any) -> Children:
        children = honest(self, *arguments)
        for line, (tokens, q) in enumerate(zip(children.tokens, children.distributions, strict=True)):
            children.acceptances[line, 0] = 0.9 if own_q(tokens[0], q) > 0.5 else 0.1
        return children

    monkeypatch.setattr(HostChoices, "choose", biased)
    assert sampled(VerificationRule.REJECTION, count=2000)[0] < 1e-4
