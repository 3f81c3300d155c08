"""Growth steps in a world whose law is known: those that pay run, and next to none where none does."""

from dataclasses import dataclass

import pytest

from outrider.target_worker.rounds.draft_steps import MOST_STEPS, DraftSteps


@dataclass
class World:
    """Each step of a round goes one token deeper in every session, and is right with the same chance at every depth."""

    acceptance: float
    plain_ns: float
    step_ns: float
    # What verifying one node takes.
    node_ns: float = 0.0
    sessions: int = 1
    # What a round's first step takes beyond the others: a block drafter's pass.
    pass_ns: float = 0.0

    def tokens(self, steps: int) -> float:
        """Expected tokens of a round after so many steps."""
        return self.sessions * sum(self.acceptance**depth for depth in range(steps + 1))

    def pays(self) -> bool:
        """True if the target verifies nodes: one brings more than its time."""
        return self.acceptance / (self.node_ns or 1e-9) > 1 / self.plain_ns * self.sessions

    def rate(self, steps: int) -> float:
        verified = steps if self.pays() else 0
        round_ns = self.plain_ns + verified * self.sessions * self.node_ns + sum(self.times_ns(steps))
        return self.tokens(verified) / round_ns

    def times_ns(self, steps: int) -> list[int]:
        return [int(self.step_ns + (0 if number else self.pass_ns)) for number in range(steps)]

    def run(self, pace: DraftSteps, rounds: int) -> tuple[list[int], float]:
        """Let rounds pass; return the steps before each, and the part of the time that all steps took."""
        chosen, step_ns, total_ns = [], 0.0, 0.0
        for _ in range(rounds):
            steps = pace.choose(self.sessions)
            chosen.append(steps)
            expanded = [self.sessions * self.acceptance**number for number in range(steps)]
            ran = list(zip(expanded, self.times_ns(steps), strict=True))
            for number, (value, own_ns) in enumerate(ran):
                pace.note_step(number, expanded=value, sessions=self.sessions, step_ns=own_ns)
            verified = steps if self.pays() else 0
            round_ns = self.plain_ns + verified * self.sessions * self.node_ns
            pace.note_round(
                tokens=round(self.tokens(verified)),
                accepted=round(self.tokens(verified)) - self.sessions,
                round_ns=int(round_ns),
                plain_ns=int(self.plain_ns),
                steps=ran,
            )
            own_ns = sum(self.times_ns(steps))
            step_ns += own_ns
            total_ns += round_ns + own_ns
        return chosen, step_ns / total_ns


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("step_ns", [2e5, 1e6, 3e6])
def test_as_many_steps_as_pay(acceptance: float, step_ns: float):
    # Many sessions, so that whole tokens are near enough to expected ones.
    world = World(acceptance, plain_ns=1e7, step_ns=step_ns, sessions=32)
    pace = DraftSteps()
    world.run(pace, 400)
    chosen, _ = world.run(pace, 200)
    best = max(world.rate(steps) for steps in range(MOST_STEPS + 1))
    reached = sum(map(world.rate, chosen)) / len(chosen)
    assert reached > 0.97 * best


def test_a_pass_that_does_not_pay_alone_pays_with_the_steps_that_read_it():
    world = World(0.6, plain_ns=1e7, step_ns=1e5, sessions=32, pass_ns=7e6)
    assert world.rate(1) < world.rate(0) < world.rate(5)
    pace = DraftSteps()
    world.run(pace, 400)
    chosen, _ = world.run(pace, 200)
    assert sum(map(world.rate, chosen)) / len(chosen) > 0.97 * max(map(world.rate, range(MOST_STEPS + 1)))


@pytest.mark.parametrize(("step_ns", "pass_ns"), [(1e6, 0.0), (1e5, 2e6)])
def test_a_useless_drafter_takes_two_parts_in_a_hundred_at_most(step_ns: float, pass_ns: float):
    pace, world = DraftSteps(), World(0.0, plain_ns=1e7, step_ns=step_ns, sessions=8, pass_ns=pass_ns)
    world.run(pace, 400)
    chosen, part = world.run(pace, 2000)
    assert part <= 0.02
    # It is tried all the same.
    assert sum(chosen) > 10


def test_steps_end_at_high_load_and_come_back():
    pace = DraftSteps()
    low = World(0.8, plain_ns=8e6, step_ns=5e5, sessions=16)
    high = World(0.8, plain_ns=3e7, step_ns=2e6, node_ns=2e5, sessions=256)
    assert low.pays() and not high.pays()
    low.run(pace, 200)
    assert min(low.run(pace, 50)[0]) > 2
    high.run(pace, 300)
    chosen, part = high.run(pace, 1000)
    assert part <= 0.02 and chosen.count(0) > 700
    low.run(pace, 400)
    assert min(low.run(pace, 50)[0]) > 2


@pytest.mark.parametrize("sessions", [4, 16, 64])
@pytest.mark.parametrize("slower", [2, 8])
def test_steps_come_back_soon_after_very_high_load(sessions: int, slower: int):
    low = World(0.8, plain_ns=8e6, step_ns=5e5, sessions=sessions)
    high = World(0.8, plain_ns=slower * 8e6, step_ns=slower * 5e5, node_ns=1e6, sessions=1024)
    pace = DraftSteps()
    low.run(pace, 300)
    high.run(pace, 300)
    _, part = high.run(pace, 1000)
    assert part <= 0.02
    low.run(pace, 60)
    chosen, _ = low.run(pace, 40)
    best = max(map(low.rate, range(MOST_STEPS + 1)))
    assert sum(map(low.rate, chosen)) / len(chosen) > 0.95 * best


def test_steps_that_have_not_run_at_high_load_come_back_with_the_others():
    pace = DraftSteps()
    low = World(0.8, plain_ns=6e6, step_ns=1e6, sessions=16)
    high = World(0.8, plain_ns=1.2e7, step_ns=3e6, node_ns=125, sessions=1024)
    low.run(pace, 300)
    high.run(pace, 600)
    low.run(pace, 100)
    chosen, _ = low.run(pace, 100)
    best = max(map(low.rate, range(MOST_STEPS + 1)))
    assert sum(map(low.rate, chosen)) / len(chosen) > 0.97 * best


def test_without_drafted_sessions_there_are_no_steps():
    pace = DraftSteps()
    assert pace.choose(1) > 0
    assert pace.choose(0) == 0
    for _ in range(300):
        pace.note_round(tokens=4, accepted=0, round_ns=10**7, plain_ns=10**7, steps=[])
    # Rounds of others say nothing of the drafter.
    pace.note_step(0, expanded=1.0, sessions=1, step_ns=10**5)
    assert pace.choose(4) > 2
