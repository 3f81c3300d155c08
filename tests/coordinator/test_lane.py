"""What a lane learns of its target, and what it makes of it."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.coordinator import clock
from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.firing import MissRates
from outrider.coordinator.forest import Forest
from outrider.coordinator.generation import Generation
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.messages import GenerationRequest, Growth, GrowthBatch, VerifyResult
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.coordinator.rounds import Flight, RoundPace, Way
from outrider.coordinator.session import Session
from outrider.coordinator.text_stream import TextStream
from outrider.draft_distribution import DraftDistribution
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.v1 import registry_pb2

MS = 1_000_000


class Time:
    """A clock that a test moves."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def time():
    time = Time()
    with clock.replaced_by(time):
        yield time


class Link:
    """Takes batches, and answers when the test says so."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.closed: list[int] = []

    def close_session(self, session_id: int, epoch: int) -> None:
        self.closed.append(session_id)

    def submit(self, trees: Any, *, openings: Any = ()) -> "asyncio.Future[VerifyResult]":
        self.batches.append([tree.session_id for tree in trees])
        return asyncio.get_running_loop().create_future()


def make_lane() -> TargetLane:
    limits = registry_pb2.WorkerLimits(max_sessions=8, max_tree_nodes=16, max_step_tokens=64)
    return TargetLane("target", Link(), limits)  # pyright: ignore[reportArgumentType]


def result_of(flight: Flight, *, step_ms: float) -> VerifyResult:
    step_ns = round(step_ms * MS)
    return VerifyResult(step=1, verdicts=[], step_ns=step_ns, forward_ns=step_ns, step_tokens=flight.rows)


def alone(*, rows: int, submitted_ns: int, is_alone: bool = True, sessions: int = 2) -> Flight:
    held: list[Any] = [None] * sessions
    future: Any = None
    return Flight(sessions=held, rows=rows, submitted_ns=submitted_ns, is_alone=is_alone, result=future)


def test_the_pace_tells_steps_overheads_and_gaps_apart(time):
    """Steps of 4 ms, results 1 ms later than that, and batches that leave 2 ms after the result before."""
    pace = RoundPace()
    for _ in range(200):
        submitted_ns = time.now_ns + 2 * MS
        time.now_ns = submitted_ns + 5 * MS
        pace.observe(alone(rows=10, submitted_ns=submitted_ns), 4 * MS, tokens=6, result_ns=time.now_ns)
    assert pace.overhead_ns == pytest.approx(1 * MS)
    assert pace.gap_ns == pytest.approx(3 * MS, rel=0.01)
    assert pace.rows == pytest.approx(10)
    assert pace.rate(2) == pytest.approx(6 / (7 * MS), rel=0.01)
    assert pace.rate(4) == pytest.approx(2 * pace.rate(2))


def test_a_batch_behind_another_says_nothing_of_the_way_to_the_target(time):
    pace = RoundPace()
    time.now_ns = 5 * MS
    pace.observe(alone(rows=10, submitted_ns=0), 4 * MS, tokens=4, result_ns=time.now_ns)
    overhead_ns = pace.overhead_ns
    time.now_ns = 9 * MS
    assert (
        pace.observe(alone(rows=10, submitted_ns=1 * MS, is_alone=False), 4 * MS, tokens=4, result_ns=time.now_ns)
        == 4 * MS
    )
    assert pace.overhead_ns == overhead_ns


def test_after_a_pause_a_round_is_not_as_long_as_the_pause(time):
    pace = RoundPace()
    time.now_ns = 5 * MS
    pace.observe(alone(rows=4, submitted_ns=0), 4 * MS, tokens=4, result_ns=time.now_ns)
    time.now_ns = 1000 * MS
    assert pace.observe(alone(rows=4, submitted_ns=995 * MS), 4 * MS, tokens=4, result_ns=time.now_ns) == 9 * MS


async def test_the_second_group_leaves_shortly_before_the_first_ones_step_ends(time):
    lane = make_lane()
    lane.way.current = Way.TWO_GROUPS
    for _ in range(100):
        time.now_ns += 10 * MS
        flight = lane.submit([], [], waited_ns=0)
        time.now_ns += 5 * MS
        lane.flights.clear()
        lane.learn(flight, result_of(alone(rows=8, submitted_ns=0), step_ms=4), emitted=2, result_ns=time.now_ns)
    assert lane.pace.overhead_ns == pytest.approx(1 * MS)
    assert lane.lead_ns(time.now_ns) == 0
    lane.flights.append(alone(rows=8, submitted_ns=time.now_ns))
    assert not lane.is_full
    # Of a step of 4 ms a tenth is left to spare.
    assert lane.lead_ns(time.now_ns) == pytest.approx(3.6 * MS, rel=0.01)
    assert lane.lead_ns(time.now_ns + 4 * MS) < 0
    lane.flights.append(alone(rows=8, submitted_ns=time.now_ns))
    assert lane.is_full


class HearingTrials:
    """Keep what they are told of sessions: those placed, and those sampled."""

    current = Way.WAIT
    ways = (Way.WAIT, Way.NEVER_WAIT)

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def observe(self, *, placed: int, sampled: int, **_: object) -> None:
        self.rounds.append((placed, sampled))


class Growing:
    """A successor that has something to add whenever the test says so; finding it takes a while."""

    def __init__(self, time: Time) -> None:
        self.has_new, self.asked = True, 0
        self._time = time

    def grow(self, flight: Flight) -> object:
        self.asked += 1
        self._time.now_ns += 2 * MS
        return self if self.has_new else None


def lane_ahead(successor: Any) -> tuple[TargetLane, Any, list[Any]]:
    """With a step that runs and what follows it; that step's result, and what was added."""
    lane, added = make_lane(), []
    link: Any = lane.link
    link.extend = added.append
    result = asyncio.get_running_loop().create_future()
    lane.flights.append(replace(alone(rows=8, submitted_ns=0), result=result))
    lane.flights.append(replace(alone(rows=8, submitted_ns=0), result=SimpleNamespace(), successor=successor))
    return lane, result, added


async def test_growth_is_added_to_a_batch_that_follows_a_step_alone(time):
    successor = Growing(time)
    lane, _, added = lane_ahead(successor)
    lane.extend_ahead()
    assert added == [successor]
    behind = lane.flights.pop()
    time.now_ns += 100 * MS
    lane.extend_ahead()
    lane.flights.append(replace(behind, successor=None))
    lane.extend_ahead()
    lane.flights.clear()
    lane.extend_ahead()
    assert successor.asked == len(added) == 1


async def test_nothing_is_added_where_nothing_is_new(time):
    successor = Growing(time)
    successor.has_new = False
    lane, _, added = lane_ahead(successor)
    lane.extend_ahead()
    # Nor does anything wait then.
    lane.extend_ahead()
    assert (successor.asked, added) == (2, [])


async def test_between_additions_is_four_times_what_they_take(time):
    successor = Growing(time)
    lane, _, added = lane_ahead(successor)
    for after_ms, is_added in [(0, True), (0, False), (7, False), (1, True), (7.9, False), (0.1, True), (20, True)]:
        time.now_ns += round(after_ms * MS)
        before = len(added)
        lane.extend_ahead()
        assert len(added) == before + is_added


async def test_nothing_is_added_once_the_result_is_in(time):
    """The answer to what follows may be in as well, and nobody have looked at either."""
    successor = Growing(time)
    lane, result, added = lane_ahead(successor)
    result.set_result(None)
    lane.extend_ahead()
    assert (successor.asked, added) == (0, [])


async def test_trials_hear_how_many_sessions_are_sampled(time):
    lane, forest = make_lane(), Forest()
    told = HearingTrials()
    lane.way = told  # pyright: ignore[reportAttributeAccessIssue]
    sessions: list[Session] = []
    for number, temperature in enumerate((0.0, 0.7, 1.0), start=1):
        sampling = SamplingSpec(max_new_tokens=50, temperature=temperature)
        request = GenerationRequest(request_id=str(number), prompt_token_ids=(number, 2), sampling=sampling)
        generation = Generation(request, max_buffered_events=10, release=lambda generation: None)
        sessions.append(Session(number, generation, 0, TextStream(None), forest))
        lane.place(sessions[-1])

    def play(playing: list[Session], *, ending: list[Session]) -> None:
        flight = lane.submit(playing, lane.trees.choose(lane.group(playing)), waited_ns=0)
        lane.flights.clear()
        time.now_ns += 5 * MS
        for session in ending:
            lane.let_go(session)
        lane.learn(flight, result_of(flight, step_ms=4), emitted=3, result_ns=time.now_ns)

    play(sessions, ending=[])
    # Who has ended with a round was there.
    play(sessions, ending=sessions[1:])
    play(sessions[:1], ending=[])
    assert told.rounds == [(3, 2), (3, 2), (1, 0)]


def grown_lane(values: list[list[float]]) -> tuple[TargetLane, list[Session]]:
    """A lane of sessions, each with a chain of nodes of these estimates."""
    lane, forest, sessions = make_lane(), Forest(), []
    for number, own in enumerate(values, start=1):
        request = GenerationRequest(
            request_id=str(number), prompt_token_ids=(number, 2), sampling=SamplingSpec(max_new_tokens=50), max_nodes=3
        )
        generation = Generation(request, max_buffered_events=10, release=lambda generation: None)
        session = Session(number, generation, 0, TextStream(None), forest)
        if own:
            growth = GrowthBatch.of([_chain(number, own)])
            graft("draft", growth, [session.mirror])
        sessions.append(session)
    return lane, sessions


def _chain(session_id: int, values: list[float]) -> Growth:
    ids = list(range(1, len(values) + 1))
    return Growth(
        session_id=session_id, epoch=1, as_of=2, node_ids=ids, parents=[0, *ids[:-1]], tokens=ids, acceptance=values
    )


def test_leaves_are_worth_their_path_less_what_they_displace():
    lane, sessions = grown_lane([[], [0.9, 0.5], [0.9, 0.8, 0.7]])
    leaves = lane.trees.leaf_values(lane.group(sessions), widths=np.array([4.0, 4.0, 4.0]))
    assert list(leaves.has_tree) == [False, True, True]
    # A bare root is reached for sure; nothing is paid for rows before a rate is known.
    assert leaves.values[0] == pytest.approx(1.0)
    assert leaves.values[1] == pytest.approx(0.45)
    # Three nodes are all that it may send: the next level takes the place of the last, and is worth less than that.
    assert leaves.values[2] == 0.0
    narrow = lane.trees.leaf_values(lane.group(sessions), widths=np.array([0.0, 0.5, 0.0]))
    assert narrow.values[1] == pytest.approx(0.45 / 2)


def test_a_chain_beside_trees_is_sent_as_it_is_now():
    """Nothing of the forest changes when a chain grows, or is committed."""
    lane, (tree,) = grown_lane([[0.9]])
    sampling = SamplingSpec(temperature=1.0, max_new_tokens=50, verification=VerificationRule.REJECTION)
    request = GenerationRequest(request_id="chain", prompt_token_ids=(7, 2), sampling=sampling)
    generation = Generation(request, max_buffered_events=10, release=lambda generation: None)
    assert isinstance(tree.mirror, TreeMirror)
    chain = Session(2, generation, 0, TextStream(None), tree.mirror.forest)
    assert isinstance(chain.mirror, ChainMirror)
    sessions = [tree, chain]
    assert [list(own.tokens) for own in lane.trees.choose(lane.group(sessions))] == [[1], []]
    drawn = [DraftDistribution.quantised([token], [1.0]) for token in (1, 2)]
    chain.mirror.graft("draft", replace(_chain(2, [0.9, 0.8]), distributions=drawn))
    assert [list(own.tokens) for own in lane.trees.choose(lane.group(sessions))] == [[1], [1, 2]]
    chain.token_ids.append(1)
    chain.rows.length[chain.row] += 1
    chain.mirror.commit([1])
    trees = lane.trees.choose(lane.group(sessions))
    assert [list(own.tokens) for own in trees] == [[1], [2]]
    assert len(trees.tokens) == len(trees.parents)


def test_smaller_steps_are_tried_where_none_were_seen():
    """Rows cost more than the first steps let hope, and every step has been of one size."""
    lane, sessions = grown_lane([[0.9, 0.8, 0.7]])
    for _ in range(100):
        lane.cost.observe(4, 4 * MS)
    lane.trees.steps = 1
    assert [len(tree.tokens) for tree in lane.trees.choose(lane.group(sessions))] == [3]
    lane.trees.steps = 47
    assert [len(tree.tokens) for tree in lane.trees.choose(lane.group(sessions))] == [1]
    lane.cost.observe(2, 3.9 * MS)
    assert [len(tree.tokens) for tree in lane.trees.choose(lane.group(sessions))] == [3]


def test_misses_begin_with_what_a_good_pair_shows():
    misses = MissRates()
    assert 2 < misses.tokens_per_round < 4
    assert 0.7 < misses.hit < 0.95
