"""The rules on made-up logits: what they accept, mixed in one step, and that their numbers are keyed as promised."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.draft_distribution import WEIGHT_SUM, DraftDistribution
from outrider.kernels.filtered_probs import filtered_probs
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker import rules
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.rules import verify
from outrider.target_worker.sessions import Session
from outrider.target_worker.walk import Walk

V = 6
TARGET_ONLY = SamplingSpec(temperature=1.0, verification=VerificationRule.TARGET_ONLY, max_new_tokens=50)
REJECTION = replace(TARGET_ONLY, verification=VerificationRule.REJECTION)
SYNTHETIC = replace(TARGET_ONLY, verification=VerificationRule.SYNTHETIC, synthetic_rates=(0.6,))
Tree = tuple[Sequence[int], Sequence[int]]


def q_of(mass: Sequence[float]) -> DraftDistribution:
    return DraftDistribution.quantised(range(len(mass)), mass)


def rows_of(spec: SamplingSpec, tree: Tree = ((), ()), q: Sequence[DraftDistribution] = (), root: int = 4) -> NodeRows:
    tokens = [1] * (root + 1)
    session = Session(key=(0, 0), epoch=1, order=0, row=0, tokens=tokens, prompt_len=2, sampling=spec, limit=100)
    return NodeRows.of(session, *tree, q)


def random_rows(chance: random.Random, spec: SamplingSpec) -> NodeRows:
    """A tree that the session's rule takes."""
    count = chance.randrange(7)
    if spec.rule is VerificationRule.REJECTION:
        q = [q_of([chance.random() + 0.01 for _ in range(V)]) for _ in range(count)]
        chain = [one.draw(chance.getrandbits(32)) for one in q]
        return rows_of(spec, (chain, range(count)), q, root=chance.randrange(2, 9))
    children: list[tuple[int, int]] = []
    for _ in range(count):
        child = chance.randrange(V), chance.randrange(len(children) + 1)
        children += [child] * (child not in children)
    tokens, parents = zip(*children, strict=True) if children else ((), ())
    return rows_of(spec, (tokens, parents), root=chance.randrange(2, 9))


def logits_of(trees: Sequence[NodeRows], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, (sum(t.count for t in trees), V))).float()


def plain_walk(choices: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Walk:
    path, node = [], 0
    while True:
        children = [number for number, parent in enumerate(parents, start=1) if parent == node]
        matching = [number for number in children if tokens[number - 1] == choices[node]]
        if not matching:
            return Walk(nodes=path, tokens=[choices[number] for number in (0, *path)])
        node = matching[0]
        path.append(node)


def test_under_the_default_rule_every_tree_of_a_batch_is_walked_as_if_alone():
    rng, longest = random.Random(0), 0
    for _ in range(60):
        trees, choices = [], []
        for _ in range(rng.randint(1, 6)):
            parents = [rng.randint(0, number) for number in range(rng.randint(0, 12))]
            trees.append(rows_of(SamplingSpec(), ([rng.randrange(3) for _ in parents], parents)))
            choices.append([rng.randrange(3) for _ in range(trees[-1].count)])
        flat = torch.tensor([choice for row in choices for choice in row])
        walks = verify(torch.nn.functional.one_hot(flat, V).float(), trees)
        wanted = [plain_walk(row, tree.tokens, tree.parents) for row, tree in zip(choices, trees, strict=True)]
        assert walks == wanted
        longest = max(longest, *(len(walk.nodes) for walk in walks))
    assert longest >= 4


def test_of_equal_siblings_the_first_is_taken():
    logits = torch.nn.functional.one_hot(torch.tensor([4, 0, 1, 1]), V).float()
    assert verify(logits, [rows_of(SamplingSpec(), ([4, 4, 4], [0, 0, 0]))])[0].nodes == [1]


@pytest.mark.parametrize("room", [None, 1])
def test_a_step_of_all_rules_gives_each_session_what_it_gets_alone(monkeypatch, room):
    if room is not None:
        # As if probabilities of one tree alone had room.
        monkeypatch.setattr(rules, "_MOST_PROBABILITIES", room)
    chance = random.Random(3)
    specs = [SamplingSpec(), SamplingSpec(temperature=0.8), TARGET_ONLY, REJECTION]
    specs += [replace(TARGET_ONLY, threshold_single=0.3), replace(TARGET_ONLY, threshold_acc=0.5, top_k=3), SYNTHETIC]
    trees = [
        random_rows(chance, replace(chance.choice(specs), seed=number, choice_index=number % 3)) for number in range(60)
    ]
    logits = logits_of(trees)
    together = verify(logits.clone(), trees)
    first = 0
    for tree, walk in zip(trees, together, strict=True):
        assert verify(logits[first : first + tree.count].clone(), [tree]) == [walk]
        assert len(walk.tokens) == len(walk.nodes) + 1
        assert [tree.tokens[node - 1] for node in walk.nodes] == list(walk.tokens[:-1])
        first += tree.count
    for rule in VerificationRule:
        accepted = [
            walk.nodes for tree, walk in zip(trees, together, strict=True) if tree.session.sampling.verification is rule
        ]
        assert any(accepted), f"nothing was ever accepted under {rule}"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_session_whose_logits_are_broken_harms_no_other(broken):
    chance = random.Random(7)
    specs = [SamplingSpec(temperature=0.8), TARGET_ONLY, REJECTION]
    specs += [replace(spec, **filters) for spec in specs for filters in ({"top_k": 3}, {"top_p": 0.5, "min_p": 0.1})]
    trees = [random_rows(chance, replace(spec, seed=seed)) for seed, spec in enumerate(specs * 4)]
    logits = logits_of(trees)
    alone = verify(logits.clone(), trees)
    first_rows = np.cumsum([0, *(tree.count for tree in trees)])
    for place in range(0, len(trees), 2):
        logits[first_rows[place] : first_rows[place + 1]] = broken
    walks = verify(logits, trees)
    assert walks[1::2] == alone[1::2]
    assert all(0 <= token < V for walk in walks for token in walk.tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_session_gets_what_it_gets_on_a_cpu():
    chance = random.Random(5)
    specs = [SamplingSpec(temperature=0.8), TARGET_ONLY, REJECTION, replace(REJECTION, top_k=4, temperature=1.4)]
    trees = [
        random_rows(chance, replace(specs[number % 4], seed=number, choice_index=number % 3)) for number in range(80)
    ]
    logits = logits_of(trees)
    pairs = zip(verify(logits.cuda(), trees), verify(logits.clone(), trees), strict=True)
    # A coin may fall between two roundings of a sum.
    assert sum(on_gpu != on_cpu for on_gpu, on_cpu in pairs) <= 1


@pytest.mark.parametrize("spec", [TARGET_ONLY, REJECTION])
def test_at_temperature_0_trees_are_walked_greedily(spec):
    greedy = replace(spec, temperature=0.0)
    tree: Tree = ([3, 2, 5], [0, 0, 2])
    logits = torch.nn.functional.one_hot(torch.tensor([2, 0, 5, 1]), V).float()
    assert verify(logits, [rows_of(greedy, tree)]) == [Walk(nodes=[2, 3], tokens=[2, 5, 1])]


@pytest.mark.parametrize("spec", [TARGET_ONLY, REJECTION])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6, "temperature": 1.3}, {"min_p": 0.2}])
def test_a_plain_step_is_a_sample_of_the_filtered_distribution(spec, filters):
    spec, count = replace(spec, **filters), 4000
    logits = logits_of([rows_of(spec)])
    trees = [rows_of(replace(spec, seed=seed)) for seed in range(count)]
    tokens = Counter(walk.tokens[0] for walk in verify(logits.expand(count, -1).clone(), trees))
    columns = [torch.tensor([value]) for value in (spec.temperature, spec.top_k, spec.top_p, spec.min_p)]
    law = filtered_probs(logits, *columns)[0].double().numpy()
    law /= law.sum()
    seen = np.array([tokens[token] for token in range(V)])
    assert (law == 0).any() == bool(filters)
    assert not seen[law == 0].any()
    assert stats.chisquare(seen[law > 0], law[law > 0] * count).pvalue > 1e-3


@pytest.mark.parametrize("spec", [TARGET_ONLY, REJECTION])
def test_numbers_depend_on_seed_choice_and_position_and_on_nothing_else(spec):
    """Flat logits make a plain step's token a function of its number."""
    flat = torch.zeros(1, V)

    def tokens(**changes) -> list[int]:
        root = changes.pop("root", 4)
        found = []
        for seed in range(40):
            trees = [
                rows_of(
                    replace(spec, seed=seed + changes.get("seed", 0), choice_index=changes.get("choice", 0)), root=root
                )
            ]
            found.append(verify(flat.clone(), trees)[0].tokens[0])
        return found

    assert tokens() == tokens()
    variants = [tokens(), tokens(seed=2**33), tokens(choice=1), tokens(choice=2), tokens(root=5)]
    for place, one in enumerate(variants):
        for other in variants[place + 1 :]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 20


def test_coins_of_neighbouring_positions_are_independent():
    """Two nodes in a row with the same chance: how the first test ends says nothing of the second."""
    count = 4000
    q = q_of([0.5, 0.5])
    for rule in (TARGET_ONLY, REJECTION):
        logits = torch.tensor([[0.0, 0.0, -20, -20, -20, -20]]).repeat(3 * count, 1)
        logits[:, 1] += 0.8
        given = [q, q] if rule is REJECTION else ()
        trees = [rows_of(replace(rule, seed=seed), ([0, 0], [0, 1]), given) for seed in range(count)]
        ends = Counter(len(walk.nodes) for walk in verify(logits, trees))
        p = 1 / (1 + np.exp(0.8))
        passes = min(1.0, p / 0.5) if rule is REJECTION else p
        law = np.array([1 - passes, passes * (1 - passes), passes**2])
        assert stats.chisquare([ends[accepted] for accepted in range(3)], law * count).pvalue > 1e-3


def test_thresholds_let_more_through():
    logits = torch.zeros(2, V)
    tree: Tree = ([3], [0])

    def accepted(**thresholds: float) -> int:
        trees = [rows_of(replace(TARGET_ONLY, seed=seed, **thresholds), tree) for seed in range(600)]
        return sum(len(walk.nodes) for walk in verify(logits.repeat(600, 1), trees))

    assert accepted() == pytest.approx(100, abs=35)
    assert accepted(threshold_acc=0.5) == pytest.approx(200, abs=40)
    assert accepted(threshold_single=0.16) == 600


def test_q_is_divided_by_as_it_was_drawn_from():
    q = DraftDistribution(np.array([4, 1], dtype=np.uint32), np.array([WEIGHT_SUM - 3, 3], dtype=np.uint32))
    dense = rules._draft_probs(
        [rows_of(REJECTION), rows_of(REJECTION, ([4, 1], [0, 1]), [q, q])], (2, 2, V), torch.device("cpu")
    )
    assert dense[0].count_nonzero() == 0
    assert (dense[1].double() * WEIGHT_SUM).tolist() == [[0, 3, 0, 0, WEIGHT_SUM - 3, 0]] * 2
