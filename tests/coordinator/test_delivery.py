"""When clients hear: after the drafts of all sessions of a round, a few in every turn of the event loop."""

import asyncio
from typing import Any

import pytest
from tests.coordinator.streams import LinkToStream, Stream, settle

from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import (
    Commits,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    Growth,
    Outcome,
    RoundResults,
    SpeculationMode,
    TokenDelta,
    TokenLogprobs,
)
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.session import Undelivered
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.workers import relay
from outrider.errors import WorkerUnavailable
from outrider.sampling import SamplingSpec
from outrider.v1 import registry_pb2, target_pb2

LIMITS = registry_pb2.WorkerLimits(max_sessions=50, max_step_tokens=64)


def short_request(tokens: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingSpec(max_new_tokens=tokens), **options
    )


@pytest.fixture
def happened(monkeypatch) -> list[str]:
    """What clients have been told, in order."""
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
    return RoundResults(outcomes=outcomes)


def held(bench: Any, request: GenerationRequest) -> Generation:
    """A request whose target does nothing by itself."""
    bench.limits.max_sessions = 50
    bench.add_target().runs.clear()
    return bench.scheduler.submit(request, [TextStream(None) for _ in range(request.n)])


async def test_drafts_hear_before_any_client(bench, happened):
    generation = held(bench, short_request(4, n=3))
    draft = bench.add_draft(delay_s=1000.0)
    commit = draft.commit

    def noting(commits: Commits) -> None:
        happened.append(f"{len(commits.session_ids)} commits")
        commit(commits)

    draft.commit = noting
    bench.scheduler.take_results("target", a_token_for_all(generation))
    assert happened == ["3 commits", "delta 0", "delta 1", "delta 2"]
    bench.scheduler.take_results("target", a_token_for_all(generation))
    assert happened[4:] == ["3 commits"]
    await settle()
    assert happened[4:] == ["3 commits", "delta 0", "delta 1", "delta 2"]
    generation.cancel()


async def test_many_clients_hear_a_few_in_every_turn_and_each_once(bench, happened):
    """What else there is to do, the next round's results and growth above all, comes in between."""
    generation = held(bench, short_request(4, n=50))
    bench.scheduler.take_results("target", a_token_for_all(generation))
    assert len(happened) == 50, "first tokens are told at once"
    happened.clear()
    bench.scheduler.take_results("target", a_token_for_all(generation))
    heard = [0]
    while heard[-1] < 50:
        await asyncio.sleep(0)
        heard.append(len(happened))
    assert heard == [*range(0, 50, 4), 50]
    assert happened == [f"delta {index}" for index in range(50)]
    await settle()
    assert len(happened) == 50
    generation.cancel()


async def test_growth_comes_before_clients_who_hear_of_several_rounds_together(bench, monkeypatch):
    """While drafts grow, few clients hear at a time; meanwhile rounds go on, and nothing of them is lost."""
    monkeypatch.setattr(relay, "_LATELY_NS", 10**15)
    generation = held(bench, short_request(6, n=50))
    bench.add_draft(delay_s=1000.0)
    deltas: list[TokenDelta] = []
    first = generation.sessions[0]
    for token in range(5, 11):
        grown = Growth(
            session_id=first.session_id, epoch=first.draft_epochs["draft"], as_of=len(first.token_ids),
            node_ids=[token], parents=[0], tokens=[token], acceptance=[0.5],
        )  # fmt: skip
        bench.grow("draft", grown)
        bench.scheduler.take_results("target", a_token_for_all(generation, token, is_over=token == 10))
        await settle()
    async for event in generation:
        if isinstance(event, TokenDelta):
            deltas.append(event)
    assert 50 < len(deltas) < 5 * 50
    for index in range(50):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == [5, 6, 7, 8, 9, 10]
        assert [delta.offset for delta in own] == [
            sum(len(other.token_ids) for other in own[:at]) for at in range(len(own))
        ]


def test_log_probabilities_of_several_rounds_stand_behind_each_other():
    def logprobs(*values: float) -> TokenLogprobs:
        own = [[value] for value in values]
        return TokenLogprobs(token_logprobs=values, top_token_ids=[[1]] * len(values), top_logprobs=own)

    first = Undelivered([5], "a", logprobs(-1.0), None)
    both = first.followed_by(Undelivered([6], "b", logprobs(-3.0), None))
    assert (both.token_ids, both.text) == ([5, 6], "ab")
    assert both.logprobs is not None
    assert list(both.logprobs.token_logprobs) == [-1.0, -3.0]
    assert list(both.logprobs.top_logprobs) == [[-1.0], [-3.0]]


async def test_who_has_not_heard_of_one_round_hears_of_it_before_the_next(bench):
    """Rounds so short that a result is always in before all clients have heard of the last one."""
    request = short_request(3, mode=SpeculationMode.OFF, n=50)
    generation = held(bench, request)
    for token in (5, 6, 7):
        bench.scheduler.take_results("target", a_token_for_all(generation, token, is_over=token == 7))
    outputs: dict[int, list[int]] = {}
    async for event in generation:
        if isinstance(event, TokenDelta):
            own = outputs.setdefault(event.index, [])
            assert event.offset == len(own)
            own += event.token_ids
    assert outputs == {index: [5, 6, 7] for index in range(50)}


async def test_the_end_of_a_request_is_told_at_once_and_behind_the_tokens_of_all_choices(bench, happened):
    """Both end in one round: both are delivered whole before the result that ends the request."""
    generation = held(bench, short_request(1, n=2))
    bench.scheduler.take_results("target", a_token_for_all(generation, is_over=True))
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
    link = LinkToStream(stream, on_results=lambda results: scheduler.take_results("target", results))
    scheduler.add_target("target", link, LIMITS)
    generation = scheduler.submit(short_request(2, n=2), [TextStream(None), TextStream(None)])
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
        scheduler.take_results("target", results)
        if rounds == 2:
            raise RuntimeError("a defect")

    reasons: list[str] = []
    link = LinkToStream(stream, on_results=take, on_lost=reasons.append)
    scheduler.add_target("target", link, LIMITS)
    generation = scheduler.submit(short_request(9), [TextStream(None)])
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
