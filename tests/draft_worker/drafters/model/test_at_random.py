"""Opens, commits, closes, holds, reopenings and trees sent again, at random, between steps, in too few slots and rows.

Whatever happens, a node's children are those of exactly its own path, what leaves can be grafted, nobody waits who
could go on, and no slot is lost.
"""

import random
from contextlib import suppress
from typing import Any

import pytest
from tests.draft_worker.table_model import VOCAB, Bench, Mirror, session_start

from outrider.errors import OutriderError
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule

LONGEST = 64
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"allowed_token_ids": (1, 5, 9), "logit_bias": {5: 1.0}},
    {"stop_token_ids": (1, 2, 3), "min_new_tokens": 4},
    {"verification": VerificationRule.TARGET_ONLY, "temperature": 1.0},
    {"verification": VerificationRule.REJECTION, "temperature": 1.0},
)


class World:
    """Commands as coordinators send them, and what they know of the trees."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        pick = self.chance.choice
        # Half of the histories without anything that the host has a part in.
        self._changes = CHANGES if seed % 2 else ({}, {"stop_token_ids": (1, 2, 3)})
        self.bench = Bench(
            num_slots=pick([70, 150, 400]), max_sessions=pick([3, 5]), max_step_nodes=pick([1, 3, 8]),
            max_step_tokens=pick([3, 16]), max_model_len=LONGEST, max_live_nodes=pick([12, 64]),
        )  # fmt: skip
        self._epochs: dict[int, int] = {}
        self.held: set[int] = set()

    def command(self) -> None:
        what, mirrors = self.chance.random(), self.bench.mirrors
        if what < 0.2 or not mirrors:
            with suppress(OutriderError):
                self._open(self.chance.randrange(6))
        elif what < 0.25:
            self._forget(number := self.chance.choice(list(mirrors)))
            self.bench.drafters.close((7, number), 1 << 30)
        elif what < 0.35:
            self._hold(self.chance.choice(list(mirrors)))
        elif what < 0.45:
            self.bench.resend(self.chance.choice(list(mirrors)))
        else:
            self._commit(self.chance.choice(list(mirrors)))

    def _open(self, number: int) -> None:
        pick, epoch = self.chance.choice, self._epochs.get(number, 0) + 1
        if number in self.bench.mirrors and self.chance.random() < 0.3:
            epoch -= 1
        self._epochs[number] = epoch
        changes: dict[str, Any] = {"temperature": pick([0.0, 0.7, 1.0]), "seed": self.chance.getrandbits(64)}
        changes |= pick(self._changes)
        start = session_start(
            number,
            epoch=epoch,
            prompt=self.chance.choices(range(VOCAB), k=self.chance.randint(1, 20)),
            sampling=SamplingSpec(max_new_tokens=pick([5, 50, 50]), choice_index=pick([0, 2]), **changes),
            mode=pick([SpeculationMode.ASYNC, SpeculationMode.ASYNC, SpeculationMode.SYNC]),
            max_live_nodes=pick([4, 12, 64]), max_depth=pick([1, 3, 16]), sync_nodes=pick([1, 6, 24]),
        )  # fmt: skip
        if number in self.bench.mirrors and epoch > self.bench.mirrors[number].start.epoch:
            self._forget(number)
        self.bench.open_start(start)

    def _forget(self, number: int) -> None:
        del self.bench.mirrors[number]
        self.held.discard(number)

    def _hold(self, number: int) -> None:
        self.held ^= {number}
        self.bench.drafter.hold((7, number), "test", is_held=number in self.held)

    def _commit(self, number: int) -> None:
        mirror, chance = self.bench.mirrors[number], self.chance
        tokens: list[int] = []
        while (children := mirror.expanded.get((*mirror.tokens, *tokens))) and chance.random() < 0.75:
            tokens.append(chance.choice(children[:2]).context[-1])
        if not tokens or chance.random() < 0.3:
            tokens += chance.choices(range(VOCAB), k=chance.randint(1, 3))
        is_wrong = len(mirror.tokens) + len(tokens) > LONGEST or chance.random() < 0.02
        if is_wrong:
            tokens = [VOCAB]
        # Sometimes with a token that is known already.
        begin = len(mirror.tokens) - (chance.random() < 0.25)
        try:
            known = mirror.tokens[begin:]
            self.bench.drafters.commit((7, number), mirror.start.epoch, begin, [*known, *tokens])
        except OutriderError:
            assert is_wrong
            self._forget(number)
        else:
            mirror.commit(tokens)

    def check_rest(self) -> None:
        """Check that every session has what it can have."""
        for number, mirror in self.bench.mirrors.items():
            if number in self.held:
                continue
            if mirror.start.is_sync:
                assert mirror.growths[-1].complete
                assert mirror.growths[-1].as_of == len(mirror.tokens)
            elif len(mirror.tokens) < mirror.start.end(LONGEST):
                self._check_tree(mirror)
            else:
                assert not mirror.live

    def _check_tree(self, mirror: Mirror) -> None:
        start, length, drafter = mirror.start, len(mirror.tokens), self.bench.drafter
        free = drafter.num_slots - drafter.slots_used
        if not mirror.live:
            # It waits for slots, with a margin.
            assert free < min(length + 64, drafter.num_slots)
            return
        mirror.check_children()
        credit = min(start.limits.max_live_nodes, drafter.config.max_live_nodes)
        assert len(mirror.live) <= credit
        can_grow = [
            node
            for node in mirror.live
            if node.context not in mirror.expanded
            and not start.stop_ids & set(node.context[length:])
            and length < len(node.context) < min(start.end(LONGEST), length + start.limits.max_depth)
        ]
        assert not can_grow or len(mirror.live) > credit - 4 or free < min(length + 64, drafter.num_slots)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_when(seed: int):
    world, sent = World(seed), 0
    for _ in range(150):
        for _ in range(world.chance.choice([0, 0, 1, 1, 2, 4])):
            world.command()
        growth = world.bench.step()
        sent += len(growth.node_ids) if growth else 0
        assert world.bench.drafter.slots_used <= world.bench.drafter.num_slots
    world.bench.finish()
    world.check_rest()
    assert sent > 60
    world.bench.check_all_given_back()
