"""Under rules with coins the output is a sample of the target's law: exact enumeration against chi-square.

Everything is the product's own but the models, which are tables: drafters, pools, selection, verification. Drafts are
wrong on purpose, lag behind commits, change in mid-request, and results get lost with their target.
"""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.draft_worker.session_growth import SessionGrowth, sessions_of
from tests.target_worker.rounds.driving import FixedTimes

from outrider.draft_worker.drafters.model.drafter import ModelDrafter
from outrider.draft_worker.rounds.drafters import Drafters
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.drafting.config import GrowthConfig
from outrider.drafting.draft_distribution import WEIGHT_SUM, DraftDistribution
from outrider.engine.kv_slots import SlotTable
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.rounds.buckets import round_buckets
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.sessions.requests import OpenRequest

VOCABULARY, LENGTH, BATCH = 3, 3, 250
PROMPT: tuple[int, ...] = (1, 2)
SLOTS, ROW_LEN, MODEL_LEN = BATCH * 40, 40, 16
# Of the nodes of all sessions those of the highest values find room: what one session verifies hangs on all the others.
ROWS = BATCH + BATCH // 2


class TableModel:
    """A model whose logits are a table, by position and token."""

    ranks = SimpleNamespace(guard=contextlib.nullcontext, world_size=1)

    dtype = torch.float32

    def __init__(self, seed: int, sharpness: float) -> None:
        chance = np.random.default_rng(seed)
        self.table = torch.from_numpy(sharpness * chance.normal(size=(MODEL_LEN, VOCABULARY, VOCABULARY))).float()

    def logits(self, packed: Packed, pool: Pool, rows: torch.Tensor, **_options: Any) -> torch.Tensor:
        """See `PackedForward.logits`."""
        del pool
        rows = rows.long()
        return self.table[packed.positions[rows].long(), packed.tokens[rows].long()]

    def lead(self, *_arguments: Any, **_options: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


TARGET = TableModel(1, 0.6)


def make_target() -> RoundLoop:
    runner: Any = SimpleNamespace(
        slots=SlotTable(num_slots=SLOTS, max_rows=BATCH, max_row_len=ROW_LEN),
        config=SimpleNamespace(enable_prefix_caching=False, model_path=""),
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
        info=SimpleNamespace(max_model_len=MODEL_LEN, vocab_size=VOCABULARY),
    )
    config = RoundConfig(max_sessions=BATCH, max_model_len=MODEL_LEN, max_step_rows=ROWS, capacity=32)
    program = RoundProgram(
        TARGET,  # pyright: ignore[reportArgumentType]
        config,
        num_slots=SLOTS,
        row_len=ROW_LEN,
        vocab_size=VOCABULARY,
        device=runner.device,
        captures=False,
    )
    # What is selected must not hang on how busy the machine is.
    times = FixedTimes(round_buckets(config, on_gpu=False), chunk=config.max_prefill_tokens)
    return RoundLoop(runner, config, program=program, times=times)


def make_draft(number: int) -> Drafters:
    config = GrowthConfig(
        branching=2, max_step_nodes=BATCH, max_model_len=MODEL_LEN, max_step_tokens=4096, rejection_top_k=2
    )
    model = TableModel(7 + number, 0.9)
    drafter = ModelDrafter(model, config, max_sessions=BATCH, num_slots=SLOTS, vocab_size=VOCABULARY)
    return Drafters(drafter, None)


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


@dataclass(kw_only=True)
class Session:
    """A request as its coordinator has it: under which epochs it is open, at which draft, and its output."""

    number: int
    spec: SamplingSpec
    draft: int = -1
    draft_epoch: int = 0
    target_epoch: int = 0
    output: tuple[int, ...] = ()
    # Committed tokens that its draft has been told.
    told: int = 0
    is_over: bool = False


def as_made(grown: SessionGrowth) -> SessionGrowth:
    return grown


class Bench:
    """A target, two drafts that do not agree, and a coordinator that relays between them.

    Args:
        spec: of all sessions, but for the seed.
        seed: of everything that is left to chance.
        relay: growth as the target gets it.
    """

    def __init__(
        self, spec: SamplingSpec, *, seed: int, relay: Callable[[SessionGrowth], SessionGrowth] = as_made
    ) -> None:
        self.spec, self.relay = spec, relay
        self.chance = random.Random(seed)
        self.target = make_target()
        self.drafts = [make_draft(number) for number in range(2)]
        self.sessions: dict[int, Session] = {}
        self.accepted = 0

    def sample(self, count: int) -> Counter[tuple[int, ...]]:
        """Return so many outputs."""
        outputs: Counter[tuple[int, ...]] = Counter()
        for _ in range(0, count, BATCH):
            outputs.update(session.output for session in self._run_batch())
        return outputs

    def _run_batch(self) -> list[Session]:
        sessions = [
            Session(number=number, spec=replace(self.spec, seed=self.chance.getrandbits(64))) for number in range(BATCH)
        ]
        self.sessions = {session.number: session for session in sessions}
        for session in sessions:
            self._open(session)
            self._move(session)
        while running := [session for session in sessions if not session.is_over]:
            for session in running:
                if self.chance.random() < 0.1:
                    self._move(session)
            for _ in range(1 + self.chance.randrange(3)):
                self._grow()
            self._tell_drafts(running)
            for _ in range(self.chance.randrange(2)):
                self._grow()
            self._verify()
        for session in sessions:
            self.drafts[session.draft].close((0, session.number), session.draft_epoch)
        while self.target.has_work:
            self.target.turn()
        return sessions

    def _open(self, session: Session) -> None:
        """Open a session at the target, or at another one that goes on where results have been delivered."""
        session.target_epoch += 1
        request = OpenRequest(
            key=(0, session.number), epoch=session.target_epoch, prompt=PROMPT, output=session.output,
            sampling=session.spec,
        )  # fmt: skip
        self.target.open(request)

    def _move(self, session: Session) -> None:
        """Have another draft take over, or the first one begin."""
        key = (0, session.number)
        if session.draft >= 0:
            self.drafts[session.draft].close(key, session.draft_epoch)
        session.draft, session.draft_epoch = self.chance.randrange(2), session.draft_epoch + 1
        session.told = len(session.output)
        start = SessionStart(
            key=key,
            owner=session.draft,
            epoch=session.draft_epoch,
            prompt=PROMPT,
            output=session.output,
            sampling=session.spec,
            limits=GrowthLimits(max_live_nodes=12, max_depth=4),
        )
        self.drafts[session.draft].open(start)
        self.target.forget(key, session.target_epoch, 0)

    def _grow(self) -> None:
        for number, draft in enumerate(self.drafts):
            for grown in (own for step in draft.advance() for own in sessions_of(step)):
                session = self.sessions.get(grown.session_id)
                # What grew before the session moved is dropped, as by a link.
                if session is None or (session.draft, session.draft_epoch) != (number, grown.epoch):
                    continue
                sent = self.relay(grown)
                self.target.grow(Growth.of_session(
                    (0, session.number), session.target_epoch, 0, sent.as_of, sent.node_ids, sent.parents, sent.tokens,
                    sent.acceptance, distributions=sent.distributions,
                ))  # fmt: skip

    def _tell_drafts(self, running: list[Session]) -> None:
        for session in running:
            if new := session.output[session.told :]:
                position = len(PROMPT) + session.told
                self.drafts[session.draft].commit((0, session.number), session.draft_epoch, position, new)
                session.told = len(session.output)

    def _verify(self) -> None:
        """Run a round; some of its results are lost with their target."""
        for result in self.target.turn():
            session = self.sessions[result.key[1]]
            assert result.fault is None, result.fault
            if result.epoch != session.target_epoch:
                continue
            if result.tokens and self.chance.random() < 0.1:
                self._open(session)
                continue
            session.output += tuple(result.tokens)
            session.is_over = result.has_ended
            self.accepted += result.accepted


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Return p of the chi-square test over all outputs; those expected fewer than five times are one cell."""
    total = sum(counts.values())
    expected = np.array([probability * total for probability in law.values()])
    seen = np.array([counts[output] for output in law])
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def sampled(rule: VerificationRule, *, count: int, presence_penalty: float = 0.0, **options: Any) -> tuple[float, int]:
    """The p-value of so many outputs under a rule, and how many drafted tokens were accepted."""
    spec = SamplingSpec(temperature=0.9, presence_penalty=presence_penalty, max_new_tokens=LENGTH, verification=rule)
    bench = Bench(spec, seed=11, **options)
    return p_value(bench.sample(count), law_of(spec)), bench.accepted


@pytest.mark.parametrize("rule", [VerificationRule.REJECTION, VerificationRule.TARGET_ONLY])
def test_output_follows_the_targets_law(rule: VerificationRule):
    value, accepted = sampled(rule, count=1000, presence_penalty=0.4)
    assert value > 1e-3
    assert accepted > 200


def own_q(token: int, q: DraftDistribution | None) -> float:
    assert q is not None
    return float(q.weights[q.token_ids == token][0] / WEIGHT_SUM)


def test_a_selection_that_looks_at_the_draws_q_is_found_out():
    def only_likely(grown: SessionGrowth) -> SessionGrowth:
        """The growth up to the first node that was not likely; what is below it has no parent then."""
        is_likely = [own_q(*node) > 0.5 for node in zip(grown.tokens, grown.distributions, strict=True)]
        kept = list(itertools.takewhile(lambda place: is_likely[place], range(len(is_likely))))
        columns = ("node_ids", "parents", "tokens", "acceptance", "distributions")
        return replace(grown, **{name: getattr(grown, name)[: len(kept)] for name in columns})

    assert sampled(VerificationRule.REJECTION, count=1000, relay=only_likely)[0] < 1e-6


def test_an_estimate_that_tells_of_the_draw_is_found_out():
    def telling(grown: SessionGrowth) -> SessionGrowth:
        drawn = zip(grown.tokens, grown.distributions, strict=True)
        return replace(grown, acceptance=[0.9 if own_q(*node) > 0.5 else 0.005 for node in drawn])

    assert sampled(VerificationRule.REJECTION, count=1000, relay=telling)[0] < 1e-4
