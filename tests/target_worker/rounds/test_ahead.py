"""Rounds that are launched ahead of the reports that are read: same tokens, and nothing is left behind."""

import random

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.ahead import AheadProgram
from tests.target_worker.rounds.driving import PROMPT, Driver, make_runner, no_tree, oracle_tree, random_tree, rounds_of
from tests.target_worker.rounds.random_sessions import live, random_cases

from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.growth import Growth


class AheadDriver(Driver):
    """A driver whose device goes on between two turns."""

    def __init__(self, checkpoint, *, seed: int = 0, chunk: int = 5, **overrides) -> None:
        runner = make_runner(checkpoint, **overrides)
        loop, self.program = rounds_of(runner, kind=AheadProgram, chunk=chunk, **overrides)
        self.program.chance = random.Random(seed)
        super().__init__(loop, seed=seed)

    def turn(self):
        self.program.go_on()
        return super().turn()


@pytest.mark.parametrize("caching", [True, False])
def test_random_sessions_with_rounds_under_way(caching, checkpoint, reference_model):
    rng = random.Random(29)
    sizes = {"num_slots": 190, "max_step_rows": 24, "max_session_rows": 8, "capacity": 32}
    driver = AheadDriver(checkpoint, seed=5, chunk=9, enable_prefix_caching=caching, **sizes)
    live(driver, random_cases(reference_model, rng), rng, makers=[random_tree, oracle_tree, no_tree])
    assert driver.program.most_queued == 2


@pytest.mark.parametrize("seed", range(4))
def test_chunks_that_come_late_are_computed_once(seed, checkpoint, reference_model):
    spec = SamplingSpec(max_new_tokens=6)
    prompt = [number % 61 for number in range(40)]
    plain = plain_decode(reference_model, prompt, spec).tokens
    driver, chance = AheadDriver(checkpoint, seed=seed, chunk=4), random.Random(seed)
    driver.open(2, SamplingSpec(max_new_tokens=60), [], no_tree)
    for _ in range(6):
        driver.turn()
    decoded = driver.open(1, spec, plain, no_tree, prompt=prompt)
    count = 4200
    for _ in range(3):
        for _ in range(chance.randint(1, 5)):
            driver.turn()
        # More records than the ring takes at once: growth from long ago, which the pool drops.
        ids = list(range(10**6, 10**6 + count))
        driver.loop.grow(Growth.of_session((7, 2), 1, 0, 1, ids, [999_999] * count, [1] * count, [0.5] * count))
    driver.run()
    assert decoded.tokens == plain


def test_weights_are_reloaded_with_rounds_under_way(checkpoint, reference_model):
    driver = AheadDriver(checkpoint, seed=3)
    spec = SamplingSpec(max_new_tokens=60)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    first = driver.open(1, spec, plain, oracle_tree)
    while driver.program.most_queued < 2 or not driver.loop.is_busy:
        driver.turn()
    driver.loop.reload(checkpoint)
    assert (driver.loop.session_count, driver.loop.kv.slots.used) == (0, 0)
    again = driver.open(2, spec, plain, oracle_tree)
    driver.run()
    assert again.tokens == plain
    assert first.tokens == plain[: len(first.tokens)]
