"""Events for watchers agree with what the session really did."""

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

import pytest
from tests.coordinator.fake_workers import make_request

from outrider.coordinator.live.tap import FORMAT, VERSION, watch
from outrider.coordinator.sessions.messages import GenerationResult, TokenDelta
from outrider.sampling import SpeculationMode
from outrider.v1.generation_pb2 import Round


def as_bytes(token: int) -> bytes:
    return b"%d " % token


async def run_from_start(bench, request) -> tuple[list[dict[str, Any]], Any]:
    """The lines of a generation and all its events."""
    generation = bench.submit(request)
    watcher = watch(generation.sessions[0], as_bytes, max_lines=100_000)
    events = [event async for event in generation]
    return [json.loads(line) for line in watcher.take()], events


def of_kind(lines, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("e") == kind]


class Follower:
    """A reader that takes every line at its word, and complains of nodes that are unknown or end twice."""

    def __init__(self, lines) -> None:
        self.live: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.root = 0
        for line in lines:
            getattr(self, line.get("e", "header"))(line)

    def header(self, line) -> None:
        assert (line["format"], line["version"]) == (FORMAT, VERSION)

    def tree(self, line) -> None:
        self.live = {node[0]: node[1] for node in line["nodes"]}
        self.root = line["root"][0]

    def grow(self, line) -> None:
        for node_id, parent, *_ in line["nodes"]:
            assert node_id not in self.live
            assert parent == self.root or parent in self.live
            self.live[node_id] = parent
        self.counts["grown"] += len(line["nodes"])

    def drop(self, line) -> None:
        self.end_of("abandoned", line["nodes"])

    def verdict(self, line) -> None:
        emitted = [node_id for node_id, *_ in line["emitted"]]
        assert line["accepted"] == emitted[: len(line["accepted"])]
        assert len(line["accepted"]) <= line["selected"]
        above = self.root
        for node_id in line["accepted"]:
            assert self.live[node_id] == above
            above = node_id
        self.end_of("accepted", line["accepted"])
        self.end_of("abandoned", line["abandoned"])
        self.root = emitted[-1]
        # A guess that was not verified may turn out to be the target's own token.
        self.live.pop(self.root, None)
        self.counts["rounds"] += 1
        self.counts["selected"] += line["selected"]
        self.counts["emitted"] += len(emitted)
        # Nothing hangs from what is gone.
        assert all(parent in self.live or parent == self.root for parent in self.live.values())

    def end_of(self, kind: str, node_ids) -> None:
        for node_id in node_ids:
            del self.live[node_id]
        self.counts[kind] += len(node_ids)

    def deliver(self, line) -> None:
        pass

    def end(self, line) -> None:
        assert not self.live


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("accuracy", [0.3, 1.0])
async def test_lines_add_up_to_the_rounds_figures(bench, *, mode, accuracy):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=accuracy)
    bench.add_draft("second", accuracy=0.5)
    lines, events = await run_from_start(bench, make_request(mode=mode, trace=True))
    result = events[-1]
    assert isinstance(result, GenerationResult)
    follower = Follower(lines)
    counts = result.speculation
    assert follower.counts["rounds"] == counts.verify_steps
    assert follower.counts["accepted"] == counts.accepted_tokens
    assert follower.counts["selected"] == counts.drafted_tokens
    assert follower.counts["emitted"] == result.choices[0].completion_tokens
    assert lines[-1]["counts"] == {
        name: follower.counts[name] for name in ("rounds", "grown", "selected", "accepted", "abandoned", "emitted")
    }
    assert lines[-1]["reason"] == "length"


async def test_every_round_is_told_as_it_was(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    lines, events = await run_from_start(bench, make_request(trace=True))
    rounds = [event for event in events if isinstance(event, Round)]
    assert len(rounds) == len(of_kind(lines, "verdict"))
    for record, verdict in zip(rounds, of_kind(lines, "verdict"), strict=True):
        assert (verdict["selected"], len(verdict["accepted"])) == (record.selected, record.accepted)
        assert [token for _, token, _ in verdict["emitted"]] == list(record.emitted_token_ids)
        assert (verdict["step"], verdict["forward"]) == (record.step_ns // 1000, record.forward_ns // 1000)
    assert sum(record.accepted for record in rounds) > 0
    times = [verdict["t"] for verdict in of_kind(lines, "verdict")]
    between = [after.result_ns - before.result_ns for before, after in itertools.pairwise(rounds)]
    assert [after - before for before, after in itertools.pairwise(times)] == pytest.approx(
        [each / 1000 for each in between], abs=1
    )
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert len(of_kind(lines, "deliver")) == len(deltas)


async def test_watching_may_begin_and_end_in_the_middle(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    generation = bench.submit(make_request(trace=True))
    (session,), watcher, rounds = generation.sessions, None, list[Round]()
    async for event in generation:
        rounds += [event] if isinstance(event, Round) else []
        if watcher is None and len(rounds) == 3:
            watcher = watch(session, as_bytes)
    assert watcher is not None
    assert session.tap is None
    verdicts = of_kind(map(json.loads, watcher.take()), "verdict")
    assert 0 < len(verdicts) < len(rounds)
    for record, verdict in zip(rounds[-len(verdicts) :], verdicts, strict=True):
        assert [token for _, token, _ in verdict["emitted"]] == list(record.emitted_token_ids)
        assert verdict["selected"] == record.selected


async def test_growth_that_is_sent_again_is_shown_once(bench):
    """The target is lost, and the next one is sent the whole tree: watchers have seen all of it."""
    first = bench.add_target("first", step_s=0.005)
    bench.add_draft(accuracy=0.9, delay_s=0.001)
    generation = bench.submit(make_request())
    watcher = watch(generation.sessions[0], as_bytes, max_lines=100_000)
    await asyncio.sleep(0.022)
    bench.add_target("second", step_s=0.005)
    first.is_lost = True
    events = [event async for event in generation]
    follower = Follower([json.loads(line) for line in watcher.take()])
    assert follower.counts["accepted"] == events[-1].speculation.accepted_tokens


async def test_the_tap_goes_with_its_last_watcher(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft()
    session = bench.begin()
    assert session.tap is None
    first, second = watch(session, as_bytes), watch(session, as_bytes)
    assert session.tap is not None
    first.close()
    first.close()
    assert session.tap is not None
    second.close()
    assert session.tap is None


async def test_a_request_that_is_cancelled_ends_its_watchers(bench):
    bench.add_target(step_s=0.001)
    session = bench.begin()
    watcher = watch(session, as_bytes)
    session.generation.cancel()
    lines = await watcher.read(timeout_s=30)
    assert json.loads(lines[-1])["reason"] == "cancelled"
    assert watcher.is_ended
    assert await watcher.read(timeout_s=30) == []


async def test_what_a_slow_watcher_misses_is_counted_and_made_up_for(bench):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    generation = bench.submit(make_request())
    slow = watch(generation.sessions[0], as_bytes, max_lines=8)
    whole = watch(generation.sessions[0], as_bytes, max_lines=100_000)
    lines, deltas = [], 0
    async for event in generation:
        deltas += isinstance(event, TokenDelta)
        if deltas == 8 and not lines:
            lines += slow.take()
            assert len(lines) == 8
    generation.cancel()
    # Behind what it may hold there is room for the gap, the tree and the end.
    rest = slow.take()
    assert len(rest) <= 8 + 3
    lines = [json.loads(line) for line in lines + rest]
    all_lines = [json.loads(line) for line in whole.take()]
    gaps = [place for place, line in enumerate(lines) if line.get("e") == "gap"]
    assert len(gaps) == 2
    assert all(lines[place + 1]["e"] == "tree" for place in gaps)
    # Every line was got or counted, none of them twice.
    assert len(lines) - 2 * len(gaps) + sum(lines[place]["lost"] for place in gaps) == len(all_lines)
    assert lines[-1] == all_lines[-1]


async def test_texts_are_whole_characters_and_tokens_without_one_show_their_id(bench):
    bench.add_target()
    pieces = {1: b"caf", 2: b"\xc3", 3: b"\xa9"}
    session = bench.begin()
    header, tree = map(json.loads, watch(session, lambda token: pieces.get(token, b"")).take())
    assert header["prompt"] == "café"
    assert tree["root"] == [0, 3, "\ufffd"]
    _, tree = map(json.loads, watch(bench.begin(), lambda token: b"").take())
    assert tree["root"] == [0, 3, "⟨3⟩"]
