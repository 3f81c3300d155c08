"""When clients hear: after the drafts of all sessions of a round, one in every turn of the event loop."""

import asyncio
import itertools
from typing import Any

import pytest
from tests.coordinator.fake_workers import growth_of, make_request, results_of
from tests.coordinator.streams import LinkToStream, Stream, settle
from tests.polling import until

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import (
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    Outcome,
    RoundResults,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.workers import relay
from outrider.errors import WorkerUnavailable
from outrider.sampling import SpeculationMode
from outrider.v1 import draft_pb2, registry_pb2, target_pb2

LIMITS = registry_pb2.WorkerLimits(max_sessions=50)


@pytest.fixture
def happened(monkeypatch) -> list[str]:
    """List the events that clients have received, in order."""
    told: list[str] = []
    emit = Generation.emit

    def noting(self: Generation, event: GenerationEvent) -> None:
        if isinstance(event, TokenDelta):
            told.append(f"delta {event.index}")
        elif isinstance(event, GenerationResult):
            told.append("result")
        emit(self, event)

    monkeypatch.setattr(Generation, "emit", noting)
    return told


def a_token_for_all(generation: Generation, token: int = 5, *, is_over: bool = False) -> RoundResults:
    outcomes = [
        Outcome(session_id=session.session_id, epoch=session.target_epoch, token_ids=[token], is_over=is_over)
        for session in generation.sessions
    ]
    return results_of(outcomes)


def held(bench: Any, request: GenerationRequest) -> Generation:
    """A request whose target does nothing by itself."""
    bench.limits.max_sessions = 50
    bench.add_target(rests=True)
    return bench.submit(request)


class Reader:
    """A client's stream; a write to it lasts until `busy` is set, if that is given."""

    def __init__(self, generation: Generation, *, busy: asyncio.Event | None = None) -> None:
        self.generation, self._busy = generation, busy
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.create_task(self._read())

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Tokens of each choice; all offsets are looked at."""
        outputs: dict[int, list[int]] = {}
        for delta in self.deltas:
            own = outputs.setdefault(delta.index, [])
            assert delta.offset == len(own)
            own += delta.token_ids
        return outputs

    async def _read(self) -> None:
        async for event in self.generation:
            if isinstance(event, TokenDelta):
                self.deltas.append(event)
                if self._busy is not None:
                    await self._busy.wait()


async def begun(bench: Any, count: int, tokens: int, *, busy: asyncio.Event | None = None) -> list[Reader]:
    """Requests whose readers have their first token, a 4; with `busy` they get no further until it is set."""
    bench.limits.max_sessions = 50
    bench.add_target(rests=True)
    requests = [make_request(number, tokens=tokens) for number in range(count)]
    readers = [Reader(bench.submit(request), busy=busy) for request in requests]
    await settle()
    bench.scheduler.relay.take_results("target", a_token_each(readers, 4))
    await settle()
    assert all(reader.outputs == {0: [4]} for reader in readers)
    return readers


def a_token_each(readers: list[Reader], token: int, *, is_over: bool = False) -> RoundResults:
    parts = [a_token_for_all(reader.generation, token, is_over=is_over).outcomes for reader in readers]
    return results_of(list(itertools.chain.from_iterable(parts)))


async def test_drafts_hear_before_any_client(bench, happened):
    generation = held(bench, make_request(tokens=4, n=3))
    draft = bench.add_draft(delay_s=1000.0)
    commit = draft.commit

    def noting(commits: draft_pb2.CommitBatch) -> None:
        happened.append(f"{len(commits.session_ids)} commits")
        commit(commits)

    draft.commit = noting
    reader = Reader(generation)
    await settle()
    bench.scheduler.relay.take_results("target", a_token_for_all(generation))
    assert happened == ["3 commits", "delta 0", "delta 1", "delta 2"], "first tokens are told at once"
    await settle()
    bench.scheduler.relay.take_results("target", a_token_for_all(generation))
    assert happened[4:] == ["3 commits"]
    await settle()
    assert happened[4:] == ["3 commits", "delta 0", "delta 1", "delta 2"]
    assert reader.outputs == {index: [5, 5] for index in range(3)}
    generation.cancel()


async def test_one_client_is_written_to_in_a_turn_and_each_hears_once(bench, happened):
    """Other work, the next round's results and growth above all, comes in between."""
    readers = await begun(bench, 50, tokens=4)
    happened.clear()
    bench.scheduler.relay.take_results("target", a_token_each(readers, 5))
    heard = [0]
    while heard[-1] < 50:
        await asyncio.sleep(0)
        heard.append(len(happened))
    assert max(after - before for before, after in itertools.pairwise(heard)) == 1
    await settle()
    assert len(happened) == 50
    assert all(reader.outputs == {0: [4, 5]} for reader in readers)
    for reader in readers:
        reader.generation.cancel()


async def test_rounds_that_end_while_a_client_is_written_to_reach_it_as_one_message(bench):
    busy = asyncio.Event()
    readers = await begun(bench, 12, tokens=5, busy=busy)
    for token in (5, 6, 7, 8):
        bench.scheduler.relay.take_results("target", a_token_each(readers, token, is_over=token == 8))
        await settle()
    assert all(reader.outputs == {0: [4]} for reader in readers)
    busy.set()
    await settle()
    for reader in readers:
        assert [list(delta.token_ids) for delta in reader.deltas] == [[4], [5, 6, 7, 8]]
        assert reader.outputs == {0: [4, 5, 6, 7, 8]}


async def slow_readers(bench: Any, busy: asyncio.Event) -> "list[Reader]":
    """As many readers as are written to at once, which are written to, and read on once `busy` is set."""
    busy.set()
    readers = await begun(bench, 8, tokens=100, busy=busy)
    busy.clear()
    bench.scheduler.relay.take_results("target", a_token_each(readers, 5))
    await settle()
    return readers


async def test_clients_that_take_their_time_keep_no_others_waiting(bench):
    """As many as are written to at once do not read: the rest hears nevertheless."""
    busy = asyncio.Event()
    slow = await slow_readers(bench, busy)
    assert all(reader.outputs == {0: [4, 5]} for reader in slow)
    bench.scheduler.relay.take_results("target", a_token_each(slow, 6))
    quick = [Reader(bench.submit(make_request(100 + number, tokens=4))) for number in range(20)]
    await settle()
    for token in (4, 5):
        bench.scheduler.relay.take_results("target", a_token_each(quick, token))
        await until(lambda token=token: all(reader.outputs.get(0, [])[-1:] == [token] for reader in quick))
    busy.set()
    await until(lambda: all(reader.outputs == {0: [4, 5, 6]} for reader in slow))
    for reader in (*slow, *quick):
        reader.generation.cancel()


async def test_requests_that_end_while_they_are_written_give_up_their_turns(bench, monkeypatch):
    monkeypatch.setattr(relay, "_PATIENCE_NS", 10**13)
    busy = asyncio.Event()
    slow = await slow_readers(bench, busy)
    quick = Reader(bench.submit(make_request(100, tokens=4)))
    await settle()
    for token in (4, 5):
        bench.scheduler.relay.take_results("target", a_token_each([quick], token))
        await settle()
    assert quick.outputs == {0: [4]}, "all turns are taken"
    slow[0].generation.cancel()
    await settle()
    assert quick.outputs == {0: [4, 5]}
    for reader in (*slow, quick):
        reader.generation.cancel()


async def test_clients_hear_of_several_rounds_together_where_these_follow_closely(bench):
    """Meanwhile drafts grow, and nothing is lost."""
    readers = await begun(bench, 50, tokens=7)
    bench.add_draft(delay_s=1000.0)
    (session,) = readers[0].generation.sessions
    for token in range(5, 11):
        bench.grow("draft", growth_of(session, [1], first=token))
        bench.scheduler.relay.take_results("target", a_token_each(readers, token, is_over=token == 10))
        await settle()
    await until(lambda: all(reader.task.done() for reader in readers))
    assert all(reader.outputs == {0: [4, 5, 6, 7, 8, 9, 10]} for reader in readers)
    assert 2 * 50 <= sum(len(reader.deltas) for reader in readers) < 6 * 50


def test_log_probabilities_of_several_rounds_stand_behind_each_other():
    def logprobs(*values: float) -> TokenLogprobs:
        own = [[value] for value in values]
        return TokenLogprobs(token_logprobs=list(values), top_token_ids=[[1]] * len(values), top_logprobs=own)

    assert TokenLogprobs.of([logprobs(-1.0), logprobs(-3.0)]) == logprobs(-1.0, -3.0)


async def test_who_has_not_heard_of_one_round_hears_of_it_before_the_next(bench):
    """Rounds so short that a result is always in before all clients have heard of the last one."""
    request = make_request(tokens=3, mode=SpeculationMode.OFF, n=50)
    generation = held(bench, request)
    for token in (5, 6, 7):
        bench.scheduler.relay.take_results("target", a_token_for_all(generation, token, is_over=token == 7))
    outputs: dict[int, list[int]] = {}
    async for event in generation:
        if isinstance(event, TokenDelta):
            own = outputs.setdefault(event.index, [])
            assert event.offset == len(own)
            own += event.token_ids
    assert outputs == {index: [5, 6, 7] for index in range(50)}


async def test_the_end_of_a_request_is_told_at_once_and_behind_the_tokens_of_all_choices(bench, happened):
    """Both end in one round: both are delivered whole before the result that ends the request."""
    generation = held(bench, make_request(tokens=1, n=2))
    bench.scheduler.relay.take_results("target", a_token_for_all(generation, is_over=True))
    assert happened == ["delta 0", "delta 1", "result"]
    assert bench.scheduler.running_sessions == 0


class Answering(Stream):
    """A target at the other end of the link: a token for each session in every round, until they are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, int] = {}

    async def write(self, commands: target_pb2.RoundCommands) -> None:
        await super().write(commands)
        for opening in commands.opens:
            self.open[opening.session_id] = opening.epoch
        for session_id in commands.close_session_ids:
            self.open.pop(session_id, None)

    def end_round(self, token: int) -> None:
        """Tell of it."""
        count = len(self.open)
        none = [0] * count
        self.results.put_nowait(
            target_pb2.RoundResults(
                session_ids=self.open, epochs=self.open.values(), token_counts=[1] * count, tokens=[token] * count,
                accepted_counts=none, selected_counts=none, cached_tokens=none, lost=none,
                finishes=[target_pb2.FINISH_UNSPECIFIED] * count,
                tree_ends=[target_pb2.TREE_END_STARVED] * count,
            )
        )  # fmt: skip


async def test_commands_of_a_result_are_written_in_the_turn_after_it():
    """Nobody's growth or commit waits for the clients of the round before."""
    scheduler, stream = Scheduler(CoordinatorConfig(port=0)), Answering()
    link = LinkToStream(stream, on_results=lambda results: scheduler.relay.take_results("target", results))
    scheduler.add_target("target", link, LIMITS)
    generation = scheduler.submit(make_request(tokens=2, n=2), [TextStream(None), TextStream(None)])
    await settle()
    assert len(stream.open) == 2
    for token in (5, 6):
        stream.end_round(token)
        await settle()
    events = [event async for event in generation]
    assert [tuple(event.token_ids) for event in events if isinstance(event, TokenDelta)] == [(5,), (5,), (6,), (6,)]
    assert isinstance(events[-1], GenerationResult)
    # Both were closed, in one message.
    assert [sorted(message.close_session_ids) for message in stream.written] == [[], [1, 2]]
    scheduler.stop(WorkerUnavailable("the test is over"))
    await link.close()


async def test_a_defect_in_taking_a_result_ends_the_link_and_not_the_loop(caplog):
    scheduler, stream = Scheduler(CoordinatorConfig(port=0)), Answering()
    rounds = 0

    def take(results: RoundResults) -> None:
        nonlocal rounds
        rounds += 1
        scheduler.relay.take_results("target", results)
        if rounds == 2:
            raise RuntimeError("a defect")

    reasons: list[str] = []
    link = LinkToStream(stream, on_results=take, on_lost=reasons.append)
    scheduler.add_target("target", link, LIMITS)
    generation = scheduler.submit(make_request(tokens=9), [TextStream(None)])
    await settle()
    for token in (5, 6, 7):
        stream.end_round(token)
    await settle()
    assert reasons == ["RuntimeError: a defect"]
    # As the registry does.
    scheduler.remove_target("target", reasons[0])
    tokens: list[int] = []
    with pytest.raises(WorkerUnavailable):
        async for event in generation:
            assert isinstance(event, TokenDelta)
            tokens += event.token_ids
    # What had been committed by then is delivered.
    assert tokens == [5, 6]
    await link.close()
