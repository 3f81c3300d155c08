"""Whatever comes in whatever order: tokens are those of plain decoding, and nothing is left behind."""

import os
import random
from dataclasses import dataclass, replace

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import Driver, adversarial_tree, make_loop, no_tree, oracle_tree, random_tree

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import WITHOUT_LIMIT

pytestmark = pytest.mark.usefixtures("device")
# The whole test takes ten thousand of them.
ROUNDS = int(os.environ.get("OUTRIDER_RANDOM_ROUNDS", "400"))
SPECS = [
    SamplingSpec(max_new_tokens=30),
    SamplingSpec(temperature=1.0, seed=5, max_new_tokens=30),
    SamplingSpec(temperature=0.9, seed=6, top_k=12, repetition_penalty=1.2, logprobs=2, max_new_tokens=18),
    SamplingSpec(temperature=1.0, seed=7, stop_token_ids=(3, 9, 27, 41), min_new_tokens=4, max_new_tokens=40),
    SamplingSpec(temperature=0.8, seed=8, logit_bias={4: 1.5, 11: -3.0}, frequency_penalty=0.4, max_new_tokens=24),
]


@dataclass
class Case:
    """A request and what plain decoding gives it."""

    prompt: list[int]
    spec: SamplingSpec
    plain: list[int]


def test_random_opens_closes_holds_and_growth_leave_nothing_behind(checkpoint, reference_model):
    rng = random.Random(17)
    shared = [rng.randrange(61) for _ in range(24)]
    cases = []
    for number in range(20):
        prompt = [*shared[: rng.choice([0, 10, 24])], *(rng.randrange(61) for _ in range(rng.randint(1, 12)))]
        spec = replace(rng.choice(SPECS), seed=number)
        cases.append(Case(prompt, spec, plain_decode(reference_model, prompt, spec).tokens))
    loop = make_loop(checkpoint, num_slots=190, chunk=9, max_step_rows=24, max_session_rows=8, capacity=32)
    driver = Driver(loop, seed=3)
    running: dict[int, Case] = {}
    compared = opened = 0
    while loop.rounds_read < ROUNDS:
        if len(running) < 8 and rng.random() < 0.5:
            number, case = opened, rng.choice(cases)
            maker = rng.choice([random_tree, oracle_tree, adversarial_tree, no_tree])
            done = rng.choice([0, 0, rng.randrange(len(case.plain))])
            driver.open(number, case.spec, case.plain[done:], maker, prompt=case.prompt, output=case.plain[:done])
            running[number] = replace(case, plain=case.plain[done:])
            opened += 1
        if running and rng.random() < 0.2:
            number = rng.choice(list(running))
            done, start = len(driver.decoded[number].tokens), len(running[number].prompt)
            action = rng.randrange(4)
            if action == 0:
                loop.close((7, number), 1)
            elif action == 1:
                loop.limit((7, number), 1, rng.choice([0, start + done, start + done + 3, WITHOUT_LIMIT]))
            else:
                late = random_tree(rng, running[number].plain[max(done - 2, 0) :])
                driver.grow(number, late, as_of=start + max(done - 2, 0), place=rng.randrange(4))
        elif rng.random() < 0.1:
            for number in running:
                loop.limit((7, number), 1, WITHOUT_LIMIT)
        driver.turn()
        for number in [number for number in running if (7, number) not in loop.keys]:
            case, decoded = running.pop(number), driver.decoded.pop(number)
            assert decoded.tokens == case.plain[: len(decoded.tokens)]
            if decoded.is_over:
                assert decoded.tokens == case.plain
                compared += 1
    for number in running:
        loop.close((7, number), 1)
    driver.run()
    assert compared > ROUNDS / 40
    assert loop.preemptions > 0
    assert (loop.session_count, loop.kv.slots.used, loop.has_work) == (0, 0, False)
