"""Opens, commits, closes and reopenings at random, between steps and while one or two run, in too few slots and rows.

Whatever happens, a node's children are those of exactly its own path, no slot is lost or somebody's twice, and what
leaves is what a coordinator can graft.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft_distribution import WEIGHT_SUM
from outrider.draft_worker import draft_forest
from outrider.draft_worker.draft_forest import DraftForest
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_step import GrowthStep
from outrider.draft_worker.session import DraftSession, GrowthLimits, GrowthMode
from outrider.draft_worker.session_checks import CommitMismatch
from outrider.draft_worker.tree_kernels import FREE_ROWS, POOL_FIELDS, PROMISED, ROOT, SERIAL, STATE, TAKEN
from outrider.errors import OutriderError
from outrider.kernels.noise import gumbel_noise
from outrider.sampling import SamplingSpec, VerificationRule

Make = Callable[..., Any]
VOCAB, LONGEST = 24, 64
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"allowed_token_ids": (1, 5, 9), "logit_bias": {5: 1.0}},
    {"stop_token_ids": (1, 2, 3), "min_new_tokens": 4},
    {"verification": VerificationRule.TARGET_ONLY, "temperature": 1.0},
    {"verification": VerificationRule.REJECTION, "temperature": 1.0},
)
MODES = (GrowthMode.ASYNC, GrowthMode.ASYNC, GrowthMode.SYNC)
# What lets a step be begun while another one runs.
QUEUED_CHANGES: tuple[dict[str, Any], ...] = ({}, {"stop_token_ids": (1, 2, 3)})


def context_of(session: DraftSession, node: DraftNode) -> list[int]:
    tokens: list[int] = []
    while node.parent is not None:
        tokens.insert(0, node.token)
        node = node.parent
    return session.tokens + tokens


def processed(logits: np.ndarray, context: list[int], prompt_len: int, spec: SamplingSpec) -> torch.Tensor:
    values, output = logits.astype(np.float64), context[prompt_len:]
    for token in set(context) if spec.has_penalties else ():
        values[token] *= spec.repetition_penalty ** (-1 if values[token] > 0 else 1)
        values[token] -= spec.frequency_penalty * output.count(token) + spec.presence_penalty * (token in output)
    for token, bias in spec.logit_bias.items():
        values[token] += bias
    if spec.allowed_token_ids:
        values[[token for token in range(VOCAB) if token not in spec.allowed_token_ids]] = -np.inf
    if len(output) < spec.min_new_tokens:
        values[list(spec.stop_token_ids)] = -np.inf
    return torch.from_numpy(values)


def check_children(session: DraftSession, node: DraftNode, logits_after: Make) -> None:
    context, spec = context_of(session, node), session.sampling
    assert node.position == len(context) - 1
    assert node.child_tokens is not None
    values = processed(logits_after(context), context, session.prompt_len, spec)
    law = torch.log_softmax(values / (spec.temperature or 1), dim=0)
    if spec.rule is VerificationRule.REJECTION:
        q = node.child_distribution
        assert q is not None
        np.testing.assert_allclose(q.weights / WEIGHT_SUM, law.exp().numpy()[q.token_ids], atol=1e-6)
        assert q.fault(node.child_tokens[0], VOCAB) is None
        return
    if spec.temperature > 0 and spec.rule is VerificationRule.COUPLED:
        seed = torch.from_numpy(np.array([spec.seed], dtype=np.uint64).view(np.int64))
        law = law + gumbel_noise(seed, torch.tensor([len(context)]), VOCAB, 0, spec.choice_index)[0]
    allowed = int(torch.isfinite(law).sum())
    assert node.child_tokens == law.topk(min(4, allowed)).indices.tolist()


class World:
    """Commands as coordinators send them, and what they know of the trees."""

    def __init__(
        self, seed: int, make_growth: Make, make_start: Make, logits_after: Make, *, queued: bool = False
    ) -> None:
        self.chance = random.Random(seed)
        pick = self.chance.choice
        self._changes, self._modes, self._credits = CHANGES, MODES, (3, 12, 64)
        if queued:
            self._credits = (3, 40, 64, 64)
            # Sometimes beside what has to wait for its results.
            mixed = seed % 4 == 0
            self._changes = (*QUEUED_CHANGES * 12, *(CHANGES if mixed else ()))
            self._modes = (*[GrowthMode.ASYNC] * 20, *(MODES if mixed else ()))
        self.growth: TreeGrowth
        self.growth, self.runner = make_growth(
            runner={"num_slots": pick([70, 150, 400]), "max_rows": pick([3, 5]), "max_row_len": pick([90, 300])},
            max_step_nodes=pick([1, 3, 8]), max_step_tokens=pick([3, 16]), max_model_len=LONGEST,
            max_live_nodes=64 if queued else pick([12, 64]), min_acceptance=pick([0.0, 0.05]),
        )  # fmt: skip
        self._make_start, self._logits_after = make_start, logits_after
        self._epochs: dict[int, int] = {}
        # By session and epoch: the whole path of every node that was told of, and the committed tokens.
        self.told: dict[tuple[int, int], dict[int, list[int]]] = {}
        self._committed: dict[tuple[int, int], list[int]] = {}
        self._checked: set[DraftNode] = set()

    @property
    def sessions(self) -> Iterable[DraftSession]:
        return list(self.growth._sessions.values())

    def command(self) -> None:
        what = self.chance.random()
        with suppress(OutriderError, CommitMismatch):
            if what < 0.15:
                self._open(self.chance.randrange(6))
            elif what < 0.18:
                self.growth.close((7, self.chance.randrange(6)), 1 << 30)
            elif what < 0.19:
                self.growth.close_owned("second")
            elif sessions := list(self.sessions):
                self._commit(self.chance.choice(sessions))

    def _open(self, number: int) -> None:
        pick, epoch = self.chance.choice, self._epochs.get(number, 0) + 1
        if self.growth.session((7, number)) is not None and self.chance.random() < 0.3:
            epoch -= 1
        self._epochs[number] = epoch
        changes = {"temperature": pick([0.0, 0.7, 1.0]), "seed": self.chance.getrandbits(64)} | pick(self._changes)
        start = self._make_start(
            number,
            epoch=epoch,
            owner=pick(["owner", "second"]),
            prompt=self.chance.choices(range(VOCAB), k=self.chance.randint(1, 20)),
            sampling=SamplingSpec(max_new_tokens=pick([5, 50, 50]), choice_index=pick([0, 2]), **changes),
            limits=GrowthLimits(
                mode=pick(self._modes),
                max_live_nodes=pick(self._credits), max_depth=pick([1, 3, 16]), sync_nodes=pick([1, 6, 24]),
            ),
        )  # fmt: skip
        self.growth.open(start)
        self.told[number, epoch], self._committed[number, epoch] = {}, list(start.prompt)

    def _commit(self, session: DraftSession) -> None:
        tokens, node = [], session.tree.root
        while node.children and self.chance.random() < 0.75:
            node = self.chance.choice(list(node.children.values())[:2])
            tokens.append(node.token)
        if not tokens or self.chance.random() < 0.3:
            tokens += self.chance.choices(range(VOCAB), k=self.chance.randint(1, 3))
        if session.length + len(tokens) > LONGEST or self.chance.random() < 0.02:
            tokens = [VOCAB]
        else:
            self._committed[session.key[1], session.epoch] += tokens
        # Sometimes with a token that is known already.
        begin = session.length - (self.chance.random() < 0.25)
        self.growth.commit(session.key, session.epoch, begin, [*session.tokens[begin:], *tokens])

    def receive(self, step: GrowthStep) -> None:
        for record in step.growths:
            told = self.told[record.session_id, record.epoch]
            root = self._committed[record.session_id, record.epoch][: record.as_of]
            for node_id, parent, token in zip(record.node_ids, record.parents, record.tokens, strict=True):
                assert node_id not in told
                told[node_id] = [*(told[parent] if parent else root), token]

    def check(self, *, in_flight: bool) -> None:
        slots, config = self.growth.slots, self.growth.config
        queued = self.growth._launcher.queues
        assert slots.used == sum(slots.length(session.row) for session in self.sessions)
        for session in self.sessions:
            below = list(session.tree.nodes())
            with_kv = [node for node in below if node.has_kv]
            assert session.tree.size == len(below)
            assert session.is_sync or len(below) <= session.limits.max_live_nodes
            kv_places = slots.length(session.row) - session.kv_len
            # Promises that are open, or were not kept, hold places of their own.
            held = [node.key_offset for node in session.tree.held]
            assert len(set(held)) == len(held) <= kv_places if queued else len(with_kv) == kv_places
            assert session.kv_len < session.length or max(held, default=-1) < min(kv_places, config.max_live_nodes)
            assert session.kv_len == session.length or not below
            assert in_flight or all(node.child_tokens is not None for node in with_kv)
            assert all(node.child_tokens is None or session.tree.may_expand(node) for node in below)
            for node in (session.tree.root, *below):
                if node.child_tokens is not None and node not in self._checked:
                    check_children(session, node, self._logits_after)
                    self._checked.add(node)

    def check_rest(self) -> None:
        """Nobody waits who could go on, and each side knows the same trees."""
        config, slots = self.growth.config, self.growth.slots
        for session in self.sessions:
            told, tree = self.told[session.key[1], session.epoch], session.tree
            assert not session.is_sync or session.level < 0
            if session.is_sync or not session.root_is_open:
                continue
            assert all(told[node.node_id] == context_of(session, node) for node in tree.nodes())
            if session.starved:
                assert slots.free < min(session.length + 64, slots.num_slots) or session.length > slots.num_slots
                continue
            assert tree.root.child_tokens is not None
            room = min(session.limits.max_live_nodes - tree.size, slots.free)
            places = slots.length(session.row) - session.length
            full = places in {config.max_live_nodes, slots.max_row_len - session.length}
            assert not tree.best_value or full or room < min(config.branching, session.limits.max_live_nodes)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_when(make_growth: Make, make_start: Make, logits_after: Make, seed: int):
    world = World(seed, make_growth, make_start, logits_after)
    growth, chance, overlapped = world.growth, world.chance, 0
    for _ in range(150):
        left_out = {chance.choice([session.key for session in world.sessions])} if growth.num_sessions else set()
        if growth.begin(left_out if chance.random() < 0.2 else ()):
            for _ in range(chance.choice([0, 0, 1, 3])):
                world.command()
                overlapped += 1
                world.check(in_flight=True)
            step = growth.finish()
            world.check(in_flight=False)
            if chance.random() < 0.3:
                world.command()
            world.receive(step)
        world.command()
        world.check(in_flight=False)
    for step in iter(growth.step, None):
        world.receive(step)
        world.check(in_flight=False)
    world.check_rest()
    assert overlapped > 20
    assert sum(map(len, world.told.values())) > 20
    check_all_given_back(growth)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_while_two_steps_are_under_way(
    make_queued_growth: Make, make_start: Make, logits_after: Make, monkeypatch: pytest.MonkeyPatch, seed: int
):
    outcomes = Counter[bool]()
    grow = DraftForest.grow

    def grow_and_count(forest: DraftForest, rows: Any, *found: Any, **named: Any) -> Any:
        promised = [forest.nodes[row, PROMISED] for row, serial in rows.tolist() if forest.nodes[row, SERIAL] == serial]
        taken = [(row, forest.nodes[row, SERIAL]) for row in promised if row >= 0 and forest.nodes[row, STATE] == TAKEN]
        grown = grow(forest, rows, *found, **named)
        outcomes.update(forest.nodes[row, SERIAL] == serial for row, serial in taken)
        return grown

    monkeypatch.setattr(DraftForest, "grow", grow_and_count)
    if seed % 2:
        # Room runs out in the middle of what is done.
        monkeypatch.setattr(draft_forest, "_FIRST_NODES", 4)
        monkeypatch.setattr(draft_forest, "_FIRST_HEAP", 2)
    world = World(seed, make_queued_growth, make_start, logits_after, queued=True)
    growth, chance, overlapped = world.growth, world.chance, 0
    for _ in range(500):
        what = chance.random()
        if what < 0.55:
            left_out = {chance.choice([session.key for session in world.sessions])} if growth.num_sessions else set()
            had = growth.num_begun
            begun = growth.begin(left_out if chance.random() < 0.1 else ())
            assert growth.num_begun == had + begun <= 2
            overlapped += growth.num_begun == 2
        elif what < 0.9 and growth.num_begun:
            step = growth.finish()
            world.check(in_flight=growth.num_begun > 0)
            if chance.random() < 0.3:
                world.command()
            world.receive(step)
        else:
            world.command()
        world.check(in_flight=growth.num_begun > 0)
    while growth.num_begun or growth.begin():
        world.receive(growth.finish())
        world.check(in_flight=growth.num_begun > 0)
    world.check_rest()
    assert overlapped >= 10
    assert world.runner.promised >= outcomes.total() > 3
    check_all_given_back(growth)


def check_all_given_back(growth: TreeGrowth) -> None:
    for key in list(growth._sessions):
        growth.close(key, 1 << 30)
    slots = growth.slots
    assert sorted(slots._free.tolist()) == list(range(slots.num_slots))
    assert (slots.used, slots.free_rows) == (0, len(slots.table))
    columns = growth._forest._arrays
    assert sorted(columns.pool[POOL_FIELDS:].tolist()) == list(range(columns.pool[FREE_ROWS])) != []
    assert len(columns.nodes) == columns.pool[FREE_ROWS]
    assert (columns.nodes[:, SERIAL] == -1).all()
    assert (columns.trees[:, ROOT] == -1).all()
    assert (columns.keyed == -1).all()
