"""What watchers are told is what the session really did."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.coordinator.chain_mirror import ChainMirror
from outrider.coordinator.live.mirror_nodes import mirror_nodes
from outrider.coordinator.live.tap import FORMAT, VERSION, watch
from outrider.coordinator.messages import GenerationResult, Growth, RoundRecord, SpeculationMode, TokenDelta
from outrider.coordinator.text_stream import TextStream
from outrider.draft_distribution import DraftDistribution


def as_bytes(token: int) -> bytes:
    return b"%d " % token


async def watched_run(bench, request, *, max_lines: int = 100_000, after: int = 0) -> tuple[list[dict[str, Any]], Any]:
    """The lines of a generation, watched from its start or after so many rounds, and all its events."""
    generation = bench.scheduler.submit(request, [TextStream(None)])
    session, events, watcher = generation.sessions[0], [], None
    assert session.tap is None
    async for event in generation:
        events.append(event)
        if watcher is None and sum(isinstance(each, RoundRecord) for each in events) >= after:
            watcher = watch(session, as_bytes, max_lines=max_lines)
    generation.cancel()
    assert session.tap is None
    return ([json.loads(line) for line in watcher.take()] if watcher is not None else []), events


async def run_from_start(bench, request, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    generation = bench.scheduler.submit(request, [TextStream(None)])
    watcher = watch(generation.sessions[0], as_bytes, **options)
    events = [event async for event in generation]
    generation.cancel()
    return [json.loads(line) for line in watcher.take()], events


def of_kind(lines, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("e") == kind]


class Follower:
    """A reader that takes every line at its word, and complains of nodes that are unknown or judged twice."""

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

    def send(self, line) -> None:
        assert set(line["nodes"]) <= self.live.keys()

    def drop(self, line) -> None:
        self.end_of("abandoned", line["nodes"])

    def verdict(self, line) -> None:
        above = self.root
        for node_id in line["accepted"]:
            assert self.live[node_id] == above
            above = node_id
        for kind in ("accepted", "rejected", "abandoned"):
            self.end_of(kind, line[kind])
        self.root = line["emitted"][-1][0]
        # A guess that was never sent may turn out to be the target's own token.
        self.live.pop(self.root, None)
        self.counts["rounds"] += 1
        self.counts["emitted"] += len(line["emitted"])
        # Nothing hangs from what is gone.
        assert all(parent in self.live or parent == self.root for parent in self.live.values())

    def end_of(self, kind: str, node_ids) -> None:
        for node_id in node_ids:
            del self.live[node_id]
        self.counts[kind] += len(node_ids)

    def deliver(self, line) -> None:
        pass

    def lost(self, line) -> None:
        pass

    def end(self, line) -> None:
        assert not self.live


@pytest.mark.parametrize("mode", list(SpeculationMode))
@pytest.mark.parametrize("accuracy", [0.3, 1.0])
async def test_colours_add_up_to_the_rounds_figures(bench, make_request, *, mode, accuracy):
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
    assert follower.counts["accepted"] + follower.counts["rejected"] == counts.drafted_tokens
    assert follower.counts["emitted"] == result.choices[0].completion_tokens
    told = lines[-1]["counts"]
    assert {name: told[name] for name in ("rounds", "accepted", "rejected", "abandoned", "grown")} == {
        name: follower.counts[name] for name in ("rounds", "accepted", "rejected", "abandoned", "grown")
    }
    assert lines[-1]["reason"] == "length"


async def test_every_round_is_told_as_it_was(bench, make_request):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    lines, events = await run_from_start(bench, make_request(trace=True))
    rounds = [event for event in events if isinstance(event, RoundRecord)]
    tokens = {node[0]: node[2] for line in of_kind(lines, "grow") for node in line["nodes"]}
    assert len(rounds) == len(of_kind(lines, "verdict")) == len(of_kind(lines, "send"))
    for record, sent, verdict in zip(rounds, of_kind(lines, "send"), of_kind(lines, "verdict"), strict=True):
        assert [tokens[node_id] for node_id in sent["nodes"]] == list(record.node_tokens)
        assert verdict["accepted"] == [sent["nodes"][number - 1] for number in record.accepted_nodes]
        assert [token for _, token, _ in verdict["emitted"]] == list(record.emitted_token_ids)
        assert verdict["step"] == record.step_ns // 1000
        assert verdict["t"] - verdict["sent"] == pytest.approx((record.result_ns - record.submitted_ns) / 1000, abs=1)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert len(of_kind(lines, "deliver")) == len(deltas)


async def test_watching_may_begin_and_end_in_the_middle(bench, make_request):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    lines, events = await watched_run(bench, make_request(trace=True), after=3)
    follower = Follower(lines)
    rounds = [event for event in events if isinstance(event, RoundRecord)]
    verdicts = of_kind(lines, "verdict")
    assert 0 < follower.counts["rounds"] == len(verdicts) < len(rounds)
    for record, verdict in zip(rounds[-len(verdicts) :], verdicts, strict=True):
        assert len(verdict["accepted"]) == len(record.accepted_nodes)
        assert len(verdict["rejected"]) == len(record.node_tokens) - len(record.accepted_nodes)


async def test_the_tap_goes_with_its_last_watcher(bench, make_request):
    bench.add_target(step_s=0.001)
    bench.add_draft()
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    session = generation.sessions[0]
    assert session.tap is None
    first, second = watch(session, as_bytes), watch(session, as_bytes)
    assert session.tap is not None
    assert session.tap.watchers == 2
    first.close()
    first.close()
    assert session.tap is not None
    second.close()
    assert session.tap is None
    generation.cancel()


async def test_a_request_that_is_cancelled_ends_its_watchers(bench, make_request):
    bench.add_target(step_s=0.001)
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    watcher = watch(generation.sessions[0], as_bytes)
    generation.cancel()
    lines = await watcher.read(timeout_s=30)
    assert json.loads(lines[-1])["reason"] == "cancelled"
    assert watcher.is_ended
    assert await watcher.read(timeout_s=30) == []


async def test_what_a_slow_watcher_misses_is_counted_and_made_up_for(bench, make_request):
    bench.add_target(step_s=0.001)
    bench.add_draft(accuracy=0.7)
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
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


def test_a_chains_nodes_keep_their_keys():
    def drawn(token: int) -> DraftDistribution:
        return DraftDistribution.__new__(DraftDistribution)

    mirror = ChainMirror([1, 2, 3])

    def grow(as_of: int, first: int, parent: int, tokens: list[int]) -> None:
        ids = list(range(first, first + len(tokens)))
        mirror.graft(
            "draft",
            Growth(
                session_id=1, epoch=1, as_of=as_of, node_ids=ids, parents=[parent, *ids[:-1]], tokens=tokens,
                acceptance=[0.5] * len(tokens), distributions=[drawn(token) for token in tokens],
            ),
        )  # fmt: skip

    nodes = mirror_nodes(mirror)
    grow(3, 1, 0, [5, 6, 7])
    first = list(nodes.read())
    assert [node.parent for node in first] == [0, first[0].key, first[1].key]
    # The same tokens drawn anew below the first one are other nodes.
    grow(3, 10, 1, [6, 7])
    second = list(nodes.read())
    assert second[0].key == first[0].key
    assert {node.key for node in second[1:]}.isdisjoint({node.key for node in first})
    tree = SimpleNamespace(distributions=list(mirror.distributions))
    assert nodes.keys_of(tree) == [node.key for node in second]  # type: ignore[arg-type]


async def test_texts_are_whole_characters_and_tokens_without_one_show_their_id(bench, make_request):
    bench.add_target()
    pieces = {1: b"caf", 2: b"\xc3", 3: b"\xa9"}
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    header, tree = map(json.loads, watch(generation.sessions[0], lambda token: pieces.get(token, b"")).take())
    assert header["prompt"] == "café"
    assert tree["root"] == [0, 3, "\ufffd"]
    generation.cancel()
    generation = bench.scheduler.submit(make_request(), [TextStream(None)])
    _, tree = map(json.loads, watch(generation.sessions[0], lambda token: b"").take())
    assert tree["root"] == [0, 3, "⟨3⟩"]
    generation.cancel()
