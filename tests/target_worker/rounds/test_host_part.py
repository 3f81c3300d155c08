"""The host's part of a round, from grafted pools to the device's walk."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.target_worker.rounds.rule_references import reference_path

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.grammar.matcher import Masks, SessionGrammar
from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.graft import graft
from outrider.kernels.pool.pack import COMMITTED, Packed, pack
from outrider.kernels.pool.records import Records, Verdict
from outrider.kernels.pool.select import Selection, select
from outrider.kernels.sampling.rows import PARAMETERS, SampledRows, sample_rows
from outrider.kernels.verification.walk import Finish, WalkRules, Walks, walk
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.rounds.host_part import (
    DETACHED,
    HostRows,
    apply_masks,
    grammar_masks,
    host_rows,
    judge,
)

V = 6
MAX_LEN, MOST_NODES = 48, 15
COUPLED = SamplingSpec(temperature=0.8, max_new_tokens=50)
TARGET_ONLY = replace(COUPLED, temperature=1.0, verification=VerificationRule.TARGET_ONLY)
REJECTION = replace(TARGET_ONLY, verification=VerificationRule.REJECTION)
SPECS = [
    COUPLED,
    SamplingSpec(),
    TARGET_ONLY,
    replace(TARGET_ONLY, threshold_single=0.3),
    replace(TARGET_ONLY, threshold_acc=0.5, top_k=3),
    replace(TARGET_ONLY, temperature=0.0),
    REJECTION,
    replace(REJECTION, top_k=4, temperature=1.4),
    replace(REJECTION, top_p=0.7, min_p=0.05),
]
JUDGED = (VerificationRule.TARGET_ONLY, VerificationRule.REJECTION)


@dataclass(kw_only=True)
class FakeSession:
    """A session and the tree that was grown for it.

    Attributes:
        length: committed tokens.
        tokens, parents: [n] of its nodes, 0 the root.
        q: [n] of each node; ids are those of `node_id`.
        known: numbers of the nodes whose q has come.
    """

    sampling: SamplingSpec
    length: int = 5
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    q: Sequence[DraftDistribution] = ()
    known: set[int] | None = None
    grammar: SessionGrammar | None = None
    output: Sequence[int] = ()
    distributions: Mapping[int, DraftDistribution] = field(init=False)

    def __post_init__(self) -> None:
        self.distributions = {
            node_id(number): q for number, q in enumerate(self.q, start=1) if self.known is None or number in self.known
        }


def node_id(number: int) -> int:
    return 3 * number + 4 if number else 0


def q_of(mass: Sequence[float]) -> DraftDistribution:
    return DraftDistribution.quantised(range(len(mass)), mass)


def random_session(chance: random.Random, spec: SamplingSpec) -> FakeSession:
    """With a tree that the session's rule takes."""
    count, length = chance.randrange(7), chance.randrange(2, 9)
    if spec.rule is VerificationRule.REJECTION:
        q = [q_of([chance.random() + 0.01 for _ in range(V)]) for _ in range(count)]
        tokens = [one.draw(chance.getrandbits(32)) for one in q]
        return FakeSession(sampling=spec, length=length, tokens=tokens, parents=range(count), q=q)
    children: list[tuple[int, int]] = []
    for _ in range(count):
        child = chance.randrange(V), chance.randrange(len(children) + 1)
        children += [child] * (child not in children)
    tokens, parents = zip(*children, strict=True) if children else ((), ())
    return FakeSession(sampling=spec, length=length, tokens=tokens, parents=parents)


def random_sessions(seed: int, count: int, specs: Sequence[SamplingSpec] = SPECS) -> list[FakeSession]:
    chance = random.Random(seed)
    return [
        random_session(chance, replace(specs[number % len(specs)], seed=2**63 + number, choice_index=number % 3))
        for number in range(count)
    ]


class Round:
    """A round of sessions, grafted, selected and packed; every second row of the pool is empty.

    Attributes:
        sessions_by_row: [S].
        packed, sampled_rows: the step.
        first: row of the step of each session's root, in the order of the sessions.
    """

    def __init__(self, sessions: Sequence[FakeSession], *, device: str = "cpu", most_entries: int = 1 << 16) -> None:
        self.sessions = sessions
        rows = 2 * len(sessions)
        self.pool = Pool.allocate(
            sessions=rows, max_len=MAX_LEN, capacity=MOST_NODES + 1, places=2, trail=4, device=device
        )
        self.sessions_by_row: list[FakeSession | None] = [None] * rows
        records = Records()
        parameters = np.zeros((rows, PARAMETERS), np.int32)
        for number, session in enumerate(sessions):
            row = 2 * number + 1
            self.sessions_by_row[row] = session
            parameters[row] = np.frombuffer(session.sampling.record, np.int32)
            records.open(row, 1, length=session.length, cached=session.length - 1, end=MAX_LEN, allow=MAX_LEN)
            records.slots(row, 1, start=0, slots=[row * MAX_LEN + index for index in range(MAX_LEN)])
            for node, (token, parent) in enumerate(zip(session.tokens, session.parents, strict=True), start=1):
                self._grow(records, row, node, node_id(parent), token)
        self.parameters = torch.from_numpy(parameters).to(device)
        self.graft(records)
        bucket = (len(sessions) * (MOST_NODES + 1), len(sessions), MOST_NODES + 1, most_entries)
        self.selection = Selection.allocate(self.pool, [bucket])
        self.packed = Packed.allocate(self.pool, bucket, scrap_slot=rows * MAX_LEN)
        self.pack()

    def graft(self, records: Records) -> None:
        array = torch.from_numpy(records.array()).to(self.pool.device)
        verdicts = torch.zeros(len(records), dtype=torch.int32, device=array.device)
        commits = torch.zeros(self.pool.sessions, 1, dtype=torch.int32, device=array.device)
        count = torch.tensor([len(records)], dtype=torch.int32, device=array.device)
        graft(self.pool, array, count, verdicts, commits, commits[:, 0].clone())
        assert {*verdicts.tolist()} <= {Verdict.EDITED, Verdict.APPENDED, Verdict.MERGED}

    def grow(self, place: int, row: int, token: int, parent_id: int, its_id: int) -> None:
        """Add one node, or one more id of a node."""
        records = Records()
        self._grow(records, row, 0, parent_id, token, place=place, its_id=its_id)
        self.graft(records)

    def _grow(self, records: Records, row: int, node: int, parent_id: int, token: int, **given: Any) -> None:
        session = self.sessions_by_row[row]
        assert session is not None
        records.growth(
            row, 1, place=given.get("place", 0), node_id=given.get("its_id", node_id(node)), parent_id=parent_id,
            as_of=session.length, token=token, acceptance=0.5 + (node * 7 + row) % 8 / 16,
        )  # fmt: skip

    def pack(self) -> None:
        select(self.pool, self.selection, 0)
        pack(self.pool, self.selection, self.packed)
        self.lines = int(self.packed.query_start[-1])
        self.sampled_rows = SampledRows.allocate(self.lines, self.pool.device)
        sample_rows(self.pool, self.packed, self.parameters, self.sampled_rows)
        self.first = self.packed.query_start.tolist()

    def host_rows(self) -> list[HostRows]:
        return host_rows(self.packed, self.pool, self.sessions_by_row)

    def logits(self, seed: int = 0, vocab_size: int = V) -> torch.Tensor:
        made = np.random.default_rng(seed).normal(0, 1.5, (self.lines, vocab_size))
        return torch.from_numpy(made).float().to(self.pool.device)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """[L] the coupled choices, -1 where nothing can be chosen."""
        rows = self.sampled_rows
        choices = coupled_choice(
            logits, rows.seeds, rows.positions, rows.temperature, rows.top_k, rows.top_p, rows.min_p,
            choice_index=rows.choice_index,
        )  # fmt: skip
        return choices.masked_fill(~logits.amax(1).isfinite(), -1)

    def judge(self, rows: Sequence[HostRows], logits: torch.Tensor, **options: int) -> tuple[torch.Tensor, ...]:
        choices = self.choose(logits)
        # Walks end early where nothing is written.
        decided = torch.full((self.lines,), -1, dtype=torch.int32, device=logits.device)
        judge(rows, self.packed, self.sampled_rows, logits, choices, decided, **options)
        return choices, decided

    def walk(self, choices: torch.Tensor, decided: torch.Tensor) -> list[tuple[list[int], list[int], Finish]]:
        """Accepted nodes, emitted tokens and end of each session, as the device's walk finds them."""
        walks = Walks.allocate(self.pool, sessions=len(self.sessions), most=MOST_NODES + 1)
        rules = WalkRules.allocate(self.pool.sessions, self.pool.device)
        walk(self.pool, self.packed, choices, decided, rules, self.parameters, walks, level=0)
        accepted = (walks.accepted & 0xFFFF).tolist()
        counts = zip(walks.num_accepted.tolist(), walks.num_emitted.tolist(), walks.finish.tolist(), strict=True)
        return [
            (accepted[number][:nodes], walks.tokens[2 * number + 1, :emitted].tolist(), Finish(finish))
            for number, (nodes, emitted, finish) in enumerate(counts)
        ]

    def outcome(self, logits: torch.Tensor, **options: int) -> list[tuple[list[int], list[int], Finish]]:
        """Return the outcome of a whole round for each session."""
        rows = self.host_rows()
        masks = grammar_masks(rows)
        if masks is not None:
            apply_masks(masks, logits, self.packed)
        return self.walk(*self.judge(rows, logits, **options))


def expected(sessions: Sequence[FakeSession], logits: torch.Tensor) -> list[tuple[list[int], list[int], Finish]]:
    """The outcome of the same round by the plain rules, its rows those of one session after the other."""
    outcomes, first = [], 0
    for session in sessions:
        behind = first + len(session.tokens) + 1
        nodes, tokens = reference_path(
            session.sampling, session.length, session.tokens, session.parents, session.q, logits[first:behind]
        )
        outcomes.append((nodes, tokens, Finish.NONE))
        first = behind
    return outcomes


def test_rows_of_a_selection_are_numbered_within_it() -> None:
    sessions = random_sessions(2, 12, [TARGET_ONLY])
    step = Round(sessions, most_entries=17)
    # A node that another drafter has as well, and one that it alone has grown.
    step.grow(1, 1, sessions[0].tokens[0], 0, 77)
    step.grow(1, 1, (sessions[0].tokens[0] + 1) % V, 77, 78)
    step.pack()
    # Behind the verified rows come those of a prompt.
    step.packed.entries[step.lines : step.lines + 5] = COMMITTED
    step.packed.sessions[step.lines : step.lines + 5] = 3
    found = step.host_rows()
    assert sum(len(rows.tokens) - 1 for rows in found) == 17 < sum(len(session.tokens) for session in sessions)
    assert any(rows.node_ids[1:] != [node_id(number) for number in range(1, len(rows.tokens))] for rows in found)
    paths = {node_id(0): []}
    for rows, session in zip(found, sessions, strict=True):
        for number, (token, parent) in enumerate(zip(session.tokens, session.parents, strict=True), start=1):
            paths[node_id(number)] = [*paths[node_id(parent)], token]
        seen: list[list[int]] = [[]]
        for number in range(1, len(rows.tokens)):
            seen.append([*seen[rows.parents[number]], rows.tokens[number]])
            if rows.node_ids[number]:
                assert seen[-1] == paths[rows.node_ids[number]]
            else:
                assert session is sessions[0]


@pytest.mark.parametrize("most", [{}, {"most_probabilities": 1}, {"most_probabilities": 20 * V}])
def test_paths_are_those_of_the_plain_rules(most: dict[str, int]) -> None:
    accepted = dict.fromkeys(VerificationRule, 0)
    for seed in range(3):
        sessions = random_sessions(seed, 90)
        step = Round(sessions)
        logits = step.logits(seed)
        outcome = step.outcome(logits.clone(), **most)
        assert outcome == expected(sessions, logits)
        for session, (nodes, _, _) in zip(sessions, outcome, strict=True):
            accepted[session.sampling.rule] += len(nodes)
    assert all(accepted[rule] > 20 for rule in (VerificationRule.COUPLED, *JUDGED)), accepted


def test_a_chain_ends_before_a_node_whose_distribution_is_unknown() -> None:
    """As if the chain went up to there."""
    sessions = [session for session in random_sessions(5, 120, [REJECTION]) if len(session.tokens) > 2]
    # Nothing takes the place of such a node.
    twins = FakeSession(sampling=REJECTION, tokens=[0, 1], parents=[0, 0], q=[q_of([1] * V)] * 2, known={2})
    cut, sent = [replace(twins, tokens=[], parents=[], q=[])], [twins]
    for number, session in enumerate(sessions):
        kept = number % 3
        known = {*range(1, kept + 1), *range(kept + 2, len(session.tokens) + 1)}
        sent.append(replace(session, known=known))
        cut.append(replace(session, tokens=session.tokens[:kept], parents=range(kept), q=session.q[:kept]))
    step = Round(sent)
    logits = step.logits()
    lines = [step.first[number] + node for number, tree in enumerate(cut) for node in range(len(tree.tokens) + 1)]
    outcome = step.outcome(logits.clone())
    assert outcome == expected(cut, logits[lines])
    assert any(nodes == [1, 2] for nodes, _, _ in outcome)


def test_siblings_of_a_chain_are_left_out() -> None:
    """As if there were the chain alone."""
    chains = [session for session in random_sessions(6, 120, [REJECTION]) if len(session.tokens) > 2]
    grown = []
    for chain in chains:
        # Beside the second node another one, and one below that.
        tokens = [*chain.tokens[:2], (chain.tokens[1] + 1) % V, 0, *chain.tokens[2:]]
        parents = [0, 1, 1, 3, 2, *range(5, len(tokens))]
        q = [*chain.q[:2], *chain.q[:2], *chain.q[2:]]
        grown.append(replace(chain, tokens=tokens, parents=parents, q=q))
    step = Round(grown)
    logits = step.logits()
    numbers = [[0, 1, 2, *range(5, len(session.tokens) + 1)] for session in grown]
    lines = [step.first[place] + number for place, row in enumerate(numbers) for number in row]
    wanted = [
        ([numbers[place][node] for node in nodes], tokens, finish)
        for place, (nodes, tokens, finish) in enumerate(expected(chains, logits[lines]))
    ]
    assert step.outcome(logits.clone()) == wanted
    assert any(5 in nodes for nodes, _, _ in wanted)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_session_whose_logits_are_broken_harms_no_other(broken: float) -> None:
    specs = [replace(spec, **filters) for spec in (TARGET_ONLY, REJECTION) for filters in ({}, {"top_k": 3},
             {"top_p": 0.5, "min_p": 0.1})]  # fmt: skip
    sessions = random_sessions(7, 42, [*specs, COUPLED])
    step = Round(sessions)
    logits = step.logits()
    alone = step.outcome(logits.clone())
    for number in range(0, len(sessions), 2):
        logits[step.first[number] : step.first[number + 1], :: 1 if broken < 0 else 2] = broken
    outcome = step.outcome(logits)
    assert outcome[1::2] == alone[1::2]
    assert outcome[::2] == [([], [], Finish.FAULT)] * len(outcome[::2])


def test_a_path_ends_with_a_fault_at_a_node_whose_logits_are_broken() -> None:
    for spec in (TARGET_ONLY, REJECTION):
        sure = FakeSession(sampling=spec, tokens=[2, 3], parents=[0, 1], q=[q_of([1] * V)] * 2)
        step = Round([sure])
        logits = torch.full((3, V), -100.0)
        logits[0, 2] = 0.0
        logits[1] = math.nan
        assert step.outcome(logits) == [([1], [2], Finish.FAULT)]


class Partial(SessionGrammar):
    """A grammar that allows everything and does not follow some nodes of a tree."""

    def __init__(self, unfollowed: set[int]) -> None:
        self.fault = None
        self._given = unfollowed

    def follow(self, output: Sequence[int]) -> bool:
        return True

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> Masks:
        missed = set(self._given)
        for node, parent in enumerate(parents, start=1):
            if parent in missed:
                missed.add(node)
        self.unfollowed = frozenset(missed & {*range(1, len(tokens) + 1)})
        return np.full((len(tokens) + 1, 1), -1, dtype=np.int32)


class Faulty(SessionGrammar):
    """A grammar whose committed output cannot be followed, or not to the end of its root's mask."""

    def __init__(self, *, late: bool) -> None:
        self.fault = None if late else "output token 0 (3) does not match the grammar"
        self.unfollowed = frozenset()

    def follow(self, output: Sequence[int]) -> bool:
        return self.fault is None

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> Masks:
        self.fault = "the grammar has become too costly to follow: so many items"
        return np.full((len(tokens) + 1, 1), -1, dtype=np.int32)


def test_a_walk_emits_the_token_of_a_node_that_was_not_followed_and_ends_there() -> None:
    chance = random.Random(8)
    sessions = random_sessions(8, 500, [COUPLED, TARGET_ONLY, REJECTION])
    for session in sessions[: len(sessions) * 3 // 4]:
        session.grammar = Partial({chance.randrange(1, 7) for _ in range(2)})
    step = Round(sessions)
    logits = step.logits()
    outcome = step.outcome(logits.clone())
    cuts = dict.fromkeys(VerificationRule, 0)
    for session, was, (nodes, tokens, _) in zip(sessions, outcome, expected(sessions, logits), strict=True):
        missed = () if session.grammar is None else session.grammar.unfollowed
        followed = next((place for place, node in enumerate(nodes) if node in missed), len(nodes))
        assert was == (nodes[:followed], tokens[: followed + 1], Finish.NONE)
        cuts[session.sampling.rule] += followed < len(nodes)
    assert all(cuts[rule] > 2 for rule in (VerificationRule.COUPLED, *JUDGED)), cuts
    unfollowed = {
        step.first[number] + node
        for number, session in enumerate(sessions)
        if session.grammar is not None
        for node in session.grammar.unfollowed
    }
    assert {row for row, parent in enumerate(step.packed.parents.tolist()) if parent == DETACHED} == unfollowed


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_of_a_grammar_ends_its_session_alone(late: bool) -> None:
    sessions = random_sessions(9, 36, [COUPLED, TARGET_ONLY, REJECTION])
    logits = Round(sessions).logits()
    alone = expected(sessions, logits)
    for number in range(0, len(sessions), 2):
        sessions[number].grammar = Faulty(late=late)
    step = Round(sessions)
    masks = grammar_masks(step.host_rows())
    assert masks is not None
    assert masks.rows.tolist() == step.first[: len(sessions) : 2]
    assert not masks.masks.any()
    outcome = step.outcome(logits.clone())
    assert outcome[1::2] == alone[1::2]
    assert outcome[::2] == [([], [], Finish.FAULT)] * len(outcome[::2])
    assert all(session.grammar.fault is not None for session in sessions[::2] if session.grammar is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_the_same_comes_out_and_nothing_waits_for_it() -> None:
    chance = random.Random(8)
    outcomes = []
    for device in ("cpu", "cuda"):
        sessions = random_sessions(14, 90)
        for session in sessions[::4]:
            session.grammar = Partial({chance.randrange(1, 7)})
        for session in sessions[1::16]:
            session.grammar = Faulty(late=False)
        chance = random.Random(8)
        step = Round(sessions, device=device)
        logits = step.logits()
        rows = step.host_rows()
        masks = grammar_masks(rows)
        assert masks is not None
        # Compiles, which waits.
        step.judge(rows, logits.clone())
        choices = step.choose(logits)
        decided = torch.zeros(step.lines, dtype=torch.int32, device=device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            apply_masks(masks, logits, step.packed)
            judge(rows, step.packed, step.sampled_rows, logits, choices, decided)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        outcomes.append(step.walk(*step.judge(rows, logits)))
        assert torch.equal(decided, step.judge(rows, logits)[1])
    # A coin may fall between two roundings of a sum.
    assert sum(on_cpu != on_gpu for on_cpu, on_gpu in zip(*outcomes, strict=True)) <= 1
