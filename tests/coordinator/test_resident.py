"""Growth of a target that drafts by itself: it comes with results, into the same trees as any draft's."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.coordinator.messages import (
    FaultKind,
    Growth,
    GrowthBatch,
    SessionOpening,
    SpeculationMode,
    TreeSubmission,
    VerifyResult,
)
from outrider.coordinator.resident import graft_resident, resident_growth
from outrider.coordinator.rows import NO_WORKERS
from outrider.coordinator.text_stream import TextStream
from outrider.growth_source import GrowthSource
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_to_bytes


class SelfDrafting:
    """A fake target that grows a chain of right guesses below every result, for sessions that may speculate.

    Args:
        target: the plain fake, whose verdicts these are.
        next_token: its choice.
        depth: of the chains.
    """

    def __init__(self, target: Any, next_token: Any, *, depth: int = 3) -> None:
        self.target, self._next_token, self._depth = target, next_token, depth
        self.modes: dict[int, SpeculationMode] = {}
        self._ids: dict[tuple[int, int], int] = {}
        self._submit = target.submit
        target.submit = self.submit
        self.spoil = lambda growth: growth

    def submit(
        self, trees: Sequence[TreeSubmission], *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        self.modes |= {opening.session_id: opening.mode for opening in openings}
        return asyncio.ensure_future(self._with_growth(self._submit(trees, openings=openings)))

    async def _with_growth(self, result: "asyncio.Future[VerifyResult]") -> VerifyResult:
        found = await result
        growths = [
            self._chain(verdict.session_id, verdict.epoch)
            for verdict in found.verdicts
            if verdict.token_ids and self.modes[verdict.session_id] is not SpeculationMode.OFF
        ]
        return replace(found, growth=self.spoil(GrowthBatch.of(growths))) if growths else found

    def _chain(self, session_id: int, epoch: int) -> Growth:
        _, committed, _, _ = self.target.sessions[session_id]
        tokens = list(committed)
        first = self._ids.get((session_id, epoch), 1)
        self._ids[session_id, epoch] = first + self._depth
        for _ in range(self._depth):
            tokens.append(self._next_token(tokens))
        ids = range(first, first + self._depth)
        return Growth(
            session_id=session_id,
            epoch=epoch,
            as_of=len(committed),
            node_ids=ids,
            parents=[0, *ids[:-1]],
            tokens=tokens[len(committed) :],
            acceptance=[0.9] * self._depth,
            sources=[GrowthSource.EAGLE] * self._depth,
        )


def self_drafting(bench: Any, expect_output: Any, **options: Any) -> tuple[Any, SelfDrafting]:
    target = bench.add_target(step_s=0.001, ahead=False)

    def next_token(tokens: Sequence[int]) -> int:
        return expect_output(tokens, SimpleNamespace(max_new_tokens=1, stop_token_ids=()))[0]

    # The choice reads the first token, the last and the length: a prompt that is all of them will do.
    return target, SelfDrafting(target, next_token, **options)


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("mode", list(SpeculationMode))
async def test_growth_that_comes_with_a_result_is_in_the_next_batch(
    bench: Any, expect_output: Any, make_request: Any, assert_idle: Any, *, mode: SpeculationMode, drafts: int
) -> None:
    target, _ = self_drafting(bench, expect_output)
    for number in range(drafts):
        bench.add_draft(f"draft-{number}", accuracy=0.5)
    requests = [make_request(number, mode=mode) for number in range(1, 6)]
    results = await asyncio.gather(*(bench.generate(request) for request in requests))
    for request, (outputs, result) in zip(requests, results, strict=True):
        assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
        if mode is SpeculationMode.OFF:
            assert result.speculation.verify_steps == 40
        elif not drafts:
            # One plain step, then four tokens a step.
            assert result.speculation.verify_steps == 1 + -(-39 // 4)
        else:
            assert result.speculation.verify_steps <= 1 + -(-39 // 4)
    assert_idle(bench)
    assert not target.sessions


async def test_whom_its_target_drafts_for_lacks_no_draft(bench: Any, expect_output: Any, make_request: Any) -> None:
    target, _ = self_drafting(bench, expect_output)
    task = asyncio.create_task(bench.generate(make_request()))
    while not target.batches:
        await asyncio.sleep(0)
    assert bench.scheduler.speculating_sessions() == (1, 1)
    while len(target.batches) < 3:
        await asyncio.sleep(0.001)
    assert bench.scheduler.speculating_sessions() == (1, 0)
    await task


async def test_a_session_that_is_opened_anew_takes_the_new_numbers(
    bench: Any, expect_output: Any, make_request: Any, assert_idle: Any
) -> None:
    """The target has lost it: node ids begin anew, and those of before mean nothing."""
    target, _ = self_drafting(bench, expect_output)
    target.fault_kind = FaultKind.LOST
    request = make_request()
    task = asyncio.create_task(bench.generate(request))
    while len(target.batches) < 4:
        await asyncio.sleep(0.001)
    target.fail_sessions |= set(target.sessions)
    outputs, result = await task
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert result.speculation.acceptance_length > 3
    assert_idle(bench)


@pytest.mark.parametrize("is_lost", [False, True], ids=["drained", "lost"])
async def test_a_target_that_is_left_holds_back_nothing_that_is_passed(
    bench: Any, expect_output: Any, make_request: Any, until: Any, *, is_lost: bool
) -> None:
    """What a worker does not know of yet is kept for it: of one that has the session no more, for ever."""
    target, _ = self_drafting(bench, expect_output)
    request = make_request(sampling=SamplingSpec(max_new_tokens=100_000))
    generation = bench.scheduler.submit(request, [TextStream(None)])
    (session,) = generation.sessions
    await until(lambda: len(target.batches) > 3)
    assert session.rows.as_of[session.row] != NO_WORKERS
    second = bench.add_target("second", step_s=0.001, ahead=False)
    if is_lost:
        bench.scheduler.remove_target("target", "a test")
    else:
        bench.scheduler.drain_worker("target", on_empty=lambda: None)
    await until(lambda: len(second.batches) > 3)
    assert session.rows.as_of[session.row] == NO_WORKERS
    generation.cancel()


async def test_growth_of_sessions_that_are_gone_or_of_another_length_is_dropped(
    bench: Any, expect_output: Any, make_request: Any, assert_idle: Any
) -> None:
    target, drafting = self_drafting(bench, expect_output)

    def spoil(growth: GrowthBatch) -> GrowthBatch:
        late = {1: [as_of + 1 for as_of in growth.as_of], 2: growth.as_of}
        which = len(target.batches) % 3
        if which == 0:
            return replace(growth, session_ids=[999 + place for place, _ in enumerate(growth.session_ids)])
        return replace(growth, as_of=late[which]) if which == 1 else replace(growth, epochs=[9 for _ in growth.epochs])

    drafting.spoil = spoil
    request = make_request()
    outputs, result = await bench.generate(request)
    assert outputs == [expect_output(request.prompt_token_ids, request.sampling)]
    assert result.speculation.verify_steps == 40
    totals = bench.scheduler.totals
    # The last step's session has ended: nothing is grown that could be dropped.
    assert totals.dropped_nodes == totals.serving.grown_nodes > 0
    assert_idle(bench)


def response(**changes: Any) -> target_pb2.VerifyResponse:
    """A result with growth of two sessions, changed here and there."""
    answer = target_pb2.VerifyResponse(step=3, session_ids=[1, 2], epochs=[1, 1])
    columns: dict[str, Any] = {
        "session_ids": [1, 2],
        "epochs": [1, 1],
        "as_of": [9, 4],
        "node_counts": [2, 1],
        "node_ids": [7, 8, 1],
        "parents": [0, 7, 0],
        "tokens": [5, 6, 5],
        "acceptance": floats_to_bytes([0.5, 0.4, 0.3]),
        "sources": [common_pb2.GROWTH_SOURCE_EAGLE] * 3,
    }
    for name, values in (columns | changes).items():
        if isinstance(values, bytes):
            setattr(answer.growth, name, values)
        else:
            getattr(answer.growth, name).extend(values)
    return answer


def test_growth_is_read_from_a_result() -> None:
    growth = resident_growth(response(), 100)
    assert growth is not None
    assert growth.tokens.tolist() == [5, 6, 5]
    assert growth.sources is not None
    assert growth.sources.tolist() == [GrowthSource.EAGLE] * 3
    np.testing.assert_allclose(growth.acceptance, [0.5, 0.4, 0.3], rtol=1e-6)
    assert resident_growth(target_pb2.VerifyResponse(step=3), 100) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 6]},
        {"tokens": [5, 100, 5]},
        {"epochs": [1]},
        {"node_counts": [2, 2]},
        {"acceptance": b"abc"},
        {"acceptance": floats_to_bytes([0.5])},
        {"parents": [0, 8, 0]},
        {"session_ids": [1, 1]},
        {"sources": [common_pb2.GROWTH_SOURCE_EAGLE]},
    ],
    ids=str,
)
def test_growth_that_cannot_be_used_is_dropped_and_the_result_stands(changes: dict[str, Any]) -> None:
    assert resident_growth(response(**changes), 100) is None


def test_nobody_there_takes_nothing() -> None:
    growth = resident_growth(response(), None)
    assert growth is not None
    assert graft_resident("target", growth, {}) == (3, 3)
