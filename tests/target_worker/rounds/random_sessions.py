"""Sessions that come, go, are held and grow at random, each held against plain decoding."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import Driver, TreeMaker, random_tree
from transformers import PreTrainedModel

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT

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


def random_cases(model: PreTrainedModel, rng: random.Random) -> list[Case]:
    """Requests of all kinds, many of which begin alike."""
    shared, cases = [rng.randrange(61) for _ in range(24)], []
    for number in range(20):
        prompt = [*shared[: rng.choice([0, 10, 24])], *(rng.randrange(61) for _ in range(rng.randint(1, 12)))]
        spec = replace(rng.choice(SPECS), seed=number)
        cases.append(Case(prompt, spec, plain_decode(model, prompt, spec).tokens))
    return cases


def live(
    driver: Driver,
    cases: Sequence[Case],
    rng: random.Random,
    *,
    makers: Sequence[TreeMaker],
    turned: Callable[[], None] = lambda: None,
) -> int:
    """Run rounds of random sessions, and check that all have the tokens of plain decoding and leave nothing behind.

    Args:
        driver: of the rounds.
        cases: the requests.
        rng: what is left to chance.
        makers: of the sessions' trees.
        turned: called after every turn.

    Returns:
        Accepted nodes.
    """
    loop, running = driver.loop, dict[int, Case]()
    compared = opened = accepted = 0
    while loop.rounds_read < ROUNDS:
        if len(running) < 8 and rng.random() < 0.5:
            case = rng.choice(cases)
            done = rng.choice([0, 0, rng.randrange(len(case.plain))])
            maker = rng.choice(makers)
            driver.open(opened, case.spec, case.plain[done:], maker, prompt=case.prompt, output=case.plain[:done])
            running[opened] = replace(case, plain=case.plain[done:])
            opened += 1
        if running and rng.random() < 0.2:
            number = rng.choice(list(running))
            done, start = len(driver.decoded[number].tokens), len(running[number].prompt)
            action = rng.randrange(5)
            if action == 0:
                loop.close((7, number), 1)
            elif action == 1:
                loop.limit((7, number), 1, rng.choice([0, start + done, start + done + 3, WITHOUT_LIMIT]))
            elif action == 2:
                loop.forget((7, number), 1, 0)
            else:
                late = random_tree(rng, running[number].plain[max(done - 2, 0) :])
                driver.grow(number, late, as_of=start + max(done - 2, 0), place=rng.randrange(4))
        elif rng.random() < 0.1:
            for number in running:
                loop.limit((7, number), 1, WITHOUT_LIMIT)
        driver.turn()
        turned()
        for number in [number for number in running if (7, number) not in loop.keys]:
            case, decoded = running.pop(number), driver.decoded.pop(number)
            assert decoded.tokens == case.plain[: len(decoded.tokens)]
            accepted += sum(result.accepted for result in decoded.results)
            if decoded.is_over:
                assert decoded.tokens == case.plain
                compared += 1
    for number in running:
        loop.close((7, number), 1)
    driver.run()
    assert compared > ROUNDS / 40
    assert loop.preemptions > 0
    assert (loop.session_count, loop.kv.slots.used, loop.has_work) == (0, 0, False)
    return accepted
