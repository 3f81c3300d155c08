"""Growth steps in worlds whose law is known: as many run as pay, whatever the load was before."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from outrider.target_worker.rounds.draft_steps import MOST_STEPS, DraftSteps, Floats, PromptRatio

MS = 1e6


@dataclass
class World:
    """Each step of a round goes one token deeper in every session, and is right with the same chance at every depth.

    A round verifies as many nodes as pay, and has room for `room` of a session. Committed tokens that no step has taken
    are caught up with by the next ones, `chunk` tokens a step.
    """

    acceptance: float
    plain_ns: float
    step_ns: float
    node_ns: float = 0.0
    sessions: int = 1
    room: int = MOST_STEPS
    # What a round's first step takes beyond the others: a block drafter's pass.
    pass_ns: float = 0.0
    chunk: int = 2048
    chunk_ns: float = 3 * MS
    # Of sessions that end and begin anew: tokens of a prompt and of an answer.
    prompt: int = 0
    answer: int | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def __post_init__(self) -> None:
        # Committed tokens of each session that no step has computed.
        self.gaps = np.zeros(self.sessions, np.int64)
        self.lengths, self.prompts = np.zeros(self.sessions, np.int64), PromptRatio()
        if self.prompt:
            self.begin(np.ones(self.sessions, np.bool_))

    def begin(self, sessions: npt.NDArray[np.bool_]) -> None:
        """Have sessions begin with a prompt."""
        self.gaps[sessions], self.lengths[sessions] = self.prompt, 0
        self.prompts.note_prompt(self.prompt * int(sessions.sum()))

    def expected_rates(self, gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        """As `RoundTimes.drafted_rates`: with the best number of nodes."""
        nodes = np.arange(0, self.room + 1) * self.sessions
        accepted = np.minimum(gained[:, None], row_yield * nodes)
        return ((self.sessions + accepted) / (self.plain_ns + self.node_ns * nodes + drafted_ns[:, None])).max(axis=1)

    def times_ns(self) -> list[float]:
        return [self.step_ns + (0 if number else self.pass_ns) for number in range(MOST_STEPS)]

    def rate(self, steps: int) -> float:
        """Tokens a nanosecond with so many steps before every round, and the best number of nodes."""
        drafted_ns = sum(self.times_ns()[:steps])
        rates = [
            self.sessions
            * sum(self.acceptance**depth for depth in range(nodes + 1))
            / (self.plain_ns + nodes * self.sessions * self.node_ns + drafted_ns)
            for nodes in range(min(steps, self.room) + 1)
        ]
        return max(rates)

    @property
    def best(self) -> float:
        return max(map(self.rate, range(MOST_STEPS + 1)))

    def run(self, pace: DraftSteps, rounds: int) -> tuple[list[int], float]:
        """Let rounds pass; return the steps before each, and tokens a nanosecond of all of them."""
        chosen, tokens, total_ns = [], 0, 0.0
        for _ in range(rounds):
            prompt_ns = self.prompts.close_round(self.sessions) * self.chunk_ns / self.chunk
            steps = pace.choose(self.sessions, self.times_ns(), self.expected_rates, prompt_ns=prompt_ns)
            chosen.append(steps)
            # By session: how deep its tree is.
            drafted_ns, grown = 0.0, np.zeros(self.sessions, np.int64)
            for number in range(steps):
                catches_up = self._catch_up()
                expanded = float((self.acceptance**grown)[self.gaps == 0].sum())
                grown += self.gaps == 0
                step_ns = self.chunk_ns if catches_up else self.times_ns()[number]
                drafted_ns += step_ns
                if catches_up:
                    pace.note_trial(step_ns - self.times_ns()[number] if pace.is_trial and number == steps - 1 else 0.0)
                else:
                    pace.note_step(number, expanded=expanded, sessions=self.sessions)
            draws = self.rng.random((self.sessions, MOST_STEPS)) < self.acceptance
            right = np.where(draws.all(axis=1), MOST_STEPS, draws.argmin(axis=1))
            hits, nodes = np.minimum(right, grown), self._verified(int(grown.max(initial=0)))
            accepted, verified = int(np.minimum(hits, nodes).sum()), int(np.minimum(grown, nodes).sum())
            round_ns = self.plain_ns + verified * self.node_ns
            # Below what has grown there are no places with children.
            misses = int((hits < grown).sum())
            covered = (right > nodes) & (grown > nodes)
            bare = 1 - float(covered.mean())
            pace.note_round(bare=bare, hits=int(hits.sum()), misses=misses, time_ns=round_ns + drafted_ns)
            # A place has one child.
            pace.note_hits(best=int(hits.sum()), hits=int(hits.sum()))
            tokens += self.sessions + accepted
            total_ns += round_ns + drafted_ns
            self.prompts.note_committed(self.sessions + accepted)
            self.lengths += 1 + np.minimum(hits, nodes)
            # The next step takes what follows a tree along with its first nodes.
            self.gaps += np.where(grown > 0, 0, 1)
            if self.answer is not None:
                self.begin(self.lengths >= self.answer)
        return chosen, tokens / total_ns

    def _catch_up(self) -> bool:
        """Compute committed tokens as a step does: short gaps whole, long ones in turn."""
        left, long = self.chunk, np.flatnonzero(self.gaps > 16)
        self.gaps[self.gaps <= 16] = 0
        for session in long:
            taken = min(left, int(self.gaps[session]))
            self.gaps[session] -= taken
            left -= taken
        return len(long) > 0

    def _verified(self, grown: int) -> int:
        """Nodes of each session that a round verifies: as many as pay."""
        rates = [
            sum(self.acceptance**depth for depth in range(nodes + 1))
            / (self.plain_ns + nodes * self.sessions * self.node_ns)
            for nodes in range(min(grown, self.room) + 1)
        ]
        return int(np.argmax(rates))


# Loads of one GPU, by sessions: a round without nodes, a node, a step, nodes that a session has room for.
LOADS = {
    1: {"plain_ns": 4.2 * MS, "step_ns": 0.37 * MS, "node_ns": 0.02 * MS},
    16: {"plain_ns": 5.2 * MS, "step_ns": 0.7 * MS, "node_ns": 0.01 * MS},
    64: {"plain_ns": 7.4 * MS, "step_ns": 1.9 * MS, "node_ns": 0.014 * MS},
    256: {"plain_ns": 17 * MS, "step_ns": 6 * MS, "node_ns": 0.013 * MS, "room": 1},
}


def load(sessions: int, acceptance: float, *, prompt: int = 0, answer: int | None = None) -> World:
    return World(acceptance=acceptance, sessions=sessions, prompt=prompt, answer=answer, **LOADS[sessions])


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("step_ns", [2e5, 1e6, 3e6])
def test_as_many_steps_as_pay(acceptance: float, step_ns: float):
    world = World(acceptance, plain_ns=1e7, step_ns=step_ns, sessions=32)
    pace = DraftSteps()
    world.run(pace, 400)
    chosen, _ = world.run(pace, 200)
    assert sum(map(world.rate, chosen)) / len(chosen) > 0.97 * world.best


def test_a_pass_that_does_not_pay_alone_pays_with_the_steps_that_read_it():
    world = World(0.6, plain_ns=1e7, step_ns=1e5, sessions=32, pass_ns=7e6)
    assert world.rate(1) < world.rate(0) < world.rate(5)
    pace = DraftSteps()
    world.run(pace, 400)
    chosen, _ = world.run(pace, 200)
    assert sum(map(world.rate, chosen)) / len(chosen) > 0.97 * world.best


@pytest.mark.parametrize("sessions", LOADS)
def test_a_useless_drafter_costs_two_parts_in_a_hundred_at_most(sessions: int):
    pace, world = DraftSteps(), load(sessions, 0.0)
    world.run(pace, 200)
    chosen, rate = world.run(pace, 2000)
    assert rate > 0.98 * world.rate(0)
    # It is tried all the same.
    assert sum(chosen) > 5


@pytest.mark.parametrize("sessions", LOADS)
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.95])
def test_steps_never_cost_more_than_they_bring(sessions: int, acceptance: float):
    pace, world = DraftSteps(), load(sessions, acceptance)
    world.run(pace, 300)
    _, rate = world.run(pace, 1000)
    assert rate > 0.98 * world.rate(0)
    assert rate > 0.94 * world.best


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.95])
@pytest.mark.parametrize("after", [16, 64, 256])
@pytest.mark.parametrize("sessions", [1, 16, 64])
def test_what_was_learned_under_one_load_serves_under_another(after: int, sessions: int, acceptance: float):
    pace = DraftSteps()
    load(after, 0.95).run(pace, 300)
    world = load(sessions, acceptance)
    world.run(pace, 100)
    _, rate = world.run(pace, 300)
    assert rate > 0.93 * world.best


@pytest.mark.parametrize("sessions", [1, 16, 64])
def test_a_drafter_that_becomes_good_is_noticed(sessions: int):
    pace = DraftSteps()
    load(sessions, 0.0).run(pace, 1000)
    world = load(sessions, 0.8)
    world.gaps += 200
    chosen, _ = world.run(pace, 2000)
    assert sum(map(world.rate, chosen[-200:])) / 200 > 0.95 * world.best


def full_trees() -> DraftSteps:
    """Steps that have found nothing to expand: rounds had rows for few of the nodes that there were."""
    pace = DraftSteps()
    for _ in range(100):
        pace.note_step(0, expanded=0.0, sessions=256)
        pace.note_round(bare=0.05, hits=95, misses=5, time_ns=17 * MS)
        pace.note_hits(best=95, hits=95)
    return pace


@pytest.mark.parametrize("sessions", [1, 16, 64])
def test_sessions_that_begin_are_drafted_however_full_the_trees_of_others_were(sessions: int):
    pace, world = full_trees(), load(sessions, 0.9, prompt=1024)
    world.run(pace, 100)
    chosen, rate = world.run(pace, 200)
    assert min(chosen) > 1
    assert rate > 0.9 * world.best


@pytest.mark.parametrize(("prompt", "answer"), [(1024, 768), (1024, 64), (4096, 256)])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.7])
@pytest.mark.parametrize("sessions", [16, 64, 256])
def test_what_prompts_cost_is_part_of_what_steps_have_to_be_worth(
    sessions: int, acceptance: float, prompt: int, answer: int
):
    pace, world = DraftSteps(), load(sessions, acceptance, prompt=prompt, answer=answer)
    world.run(pace, 400)
    _, rate = world.run(pace, 800)
    assert rate > 0.97 * world.rate(0)


def test_prompts_that_come_at_once_are_paid_for_by_what_follows():
    share = PromptRatio()
    share.note_prompt(64 * 1024)
    assert share.close_round(64) == pytest.approx(2, rel=0.01)
    ratios = list[float]()
    for _ in range(3000):
        share.note_committed(128)
        ratios.append(share.close_round(64))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 0.01
    # Each of 64 sessions has a prompt of 1,024 for 256 tokens.
    for _ in range(3000):
        share.note_prompt(64 * 4)
        share.note_committed(64)
        last = share.close_round(64)
    assert last == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_no_step_runs_where_trees_end(depth: int):
    """As of a block drafter, whose steps after the first are short."""
    pace, steps = DraftSteps(), [2e5] * MOST_STEPS
    world = World(0.9, plain_ns=1e7, step_ns=2e5, sessions=32)
    for _ in range(400):
        count = pace.choose(32, steps, world.expected_rates, prompt_ns=0.0)
        for number in range(count):
            pace.note_step(number, expanded=32 * 0.9**number if number < depth else 0.0, sessions=32)
        pace.note_round(bare=0.5, hits=9 * depth, misses=depth, time_ns=1e7)
        pace.note_hits(best=9 * depth, hits=9 * depth)
    chosen = [pace.choose(32, steps, world.expected_rates, prompt_ns=0.0) for _ in range(20)]
    assert max(chosen) <= depth + 1
    assert sorted(chosen)[10] == depth


def test_a_row_brings_no_more_than_the_likeliest_child():
    pace, yields = DraftSteps(), list[float]()

    def rates(gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        yields.append(row_yield)
        return gained / (1e6 + drafted_ns)

    for best in (90, 10):
        for _ in range(20):
            pace.note_round(bare=1.0, hits=80, misses=20, time_ns=1e7)
            pace.note_hits(best=best, hits=100)
        pace.choose(4, [1e5] * MOST_STEPS, rates, prompt_ns=0.0)
    assert yields == pytest.approx([0.8 * 0.9, 0.8 * 0.1], rel=0.05)


def test_a_step_that_was_not_noted_says_nothing_of_the_next():
    pace, expected = DraftSteps(), list[list[float]]()

    def rates(gained: Floats, row_yield: float, drafted_ns: Floats) -> Floats:
        expected.append(gained.tolist())
        return gained / (1e6 + drafted_ns)

    pace.note_step(0, expanded=1.0, sessions=1)
    pace.note_round(bare=1.0, hits=1, misses=0, time_ns=1e6)
    pace.choose(1, [1e5] * MOST_STEPS, rates, prompt_ns=0.0)
    # The first step of this round has caught up with a prompt.
    pace.note_step(1, expanded=0.01, sessions=1)
    pace.choose(1, [1e5] * MOST_STEPS, rates, prompt_ns=0.0)
    assert expected[0] == expected[1]


def test_before_anything_is_known_some_steps_run_and_without_sessions_none():
    pace = DraftSteps()
    assert 0 < pace.choose(1, [], load(1, 0.5).expected_rates, prompt_ns=0.0) < MOST_STEPS
    assert pace.choose(0, [1e5] * MOST_STEPS, load(1, 0.5).expected_rates, prompt_ns=0.0) == 0
