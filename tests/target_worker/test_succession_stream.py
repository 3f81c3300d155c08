"""Batches sent ahead over a stream: what a target answers, whoever they are of and whatever ends meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.target_worker.test_service import PROMPT, Service, opening, plain_tokens, read, request
from tests.target_worker.test_succession import addition, batch
from transformers import PreTrainedModel

from outrider.succession import addition_from_proto, extended, succession_from_proto, surviving_columns
from outrider.target_worker.succession import StreamSteps
from outrider.target_worker.verifier import Verifier
from outrider.v1 import target_pb2
from outrider.wire import floats_to_bytes

ACCEPTED, ENDED, ERROR = target_pb2.OUTCOME_ACCEPTED, target_pb2.OUTCOME_ENDED, target_pb2.OUTCOME_ERROR


@pytest.fixture(params=[False, True], ids=["answered first", "begun first"])
async def service(
    checkpoint: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """A step is answered before its successor begins, as on a CPU, or after that, as on a GPU."""
    monkeypatch.setattr(Verifier, "goes_on_alone", request.param)
    service = Service(checkpoint)
    await service.start()
    yield service
    await service.stop()


def chain(tokens: Sequence[int], *, below: int, behind: int) -> list[tuple[int, int]]:
    """Tokens one below the other, the first below node `below`; `behind` nodes are verified by the step."""
    parents = [below, *range(behind + 1, behind + len(tokens))]
    return list(zip(tokens, parents, strict=True))


async def test_successors_go_on_where_their_steps_end(service: Service, reference_model: PreTrainedModel) -> None:
    """Each is sent before the one before it is answered, a hit with its tree, a miss as a plain step."""
    plain = plain_tokens(reference_model, 12)
    wrong = (plain[4] + 1) % 61
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, [])), opens=[opening(1)]))
    # What step 1 emits, plain[0], and below it two tokens more.
    await call.write(request(2, batch(1, (1, 5, chain(plain[:3], below=0, behind=0)))))
    first = await read(call)
    assert (list(first.tokens), list(first.verified_counts)) == (plain[:1], [])
    # Step 2 verifies two nodes, and emits plain[1:4].
    await call.write(request(3, batch(2, (1, 6, chain([*plain[3:6], wrong], below=2, behind=2)))))
    second = await read(call)
    assert (list(second.tokens), list(second.accepted_nodes)) == (plain[1:4], [1, 2])
    assert list(second.verified_counts) == [2]
    # Of three, the last is wrong.
    await call.write(request(4, batch(3, (1, 9, chain([wrong], below=1, behind=3)))))
    third = await read(call)
    assert (list(third.tokens), list(third.accepted_nodes), list(third.verified_counts)) == (plain[4:7], [1, 2], [3])
    fourth = await read(call)
    assert (list(fourth.tokens), list(fourth.verified_counts)) == (plain[7:8], [0])
    # A successor may come when its step was answered long ago, and the stream may go on without one.
    await call.write(request(5, batch(4, (1, 12, chain(plain[7:10], below=0, behind=0)))))
    fifth = await read(call)
    assert (list(fifth.tokens), fifth.ahead_ns < 0) == (plain[8:11], True)
    await call.write(request(6, batch(0, (1, 16, []))))
    assert list((await read(call)).tokens) == plain[11:12]
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    await service.until_empty()


def added(more: target_pb2.TreeAddition) -> target_pb2.VerifyRequest:
    return target_pb2.VerifyRequest(incarnation=1, addition=more)


async def test_what_follows_a_successor_is_verified_with_it(
    service: Service, reference_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 ends when all has come; what the answers say is what both ends find in what was sent."""
    plain = plain_tokens(reference_model, 8)
    wrong = (plain[2] + 1) % 61
    running, came, ends = asyncio.Event(), [], StreamSteps.ends
    loop = asyncio.get_running_loop()
    finished = threading.Event()

    def waits(steps: StreamSteps, *of: Any) -> None:
        if of[0] == 1:
            loop.call_soon_threadsafe(running.set)
            assert finished.wait(30)
        ends(steps, *of)

    def note(steps: StreamSteps, more: Any, add: Any = StreamSteps.add) -> None:
        add(steps, more)
        came.append(more)
        if len(came) == 3:
            finished.set()

    monkeypatch.setattr(StreamSteps, "ends", waits)
    monkeypatch.setattr(StreamSteps, "add", note)
    sessions = [(1, 5, [(plain[0], 0)]), (2, 5, [])]
    more = [
        addition(2, [(plain[1], 1), (wrong, 2)], [(plain[0], 0)]),
        addition(2, [], [(plain[1], 1), (plain[2], 2)]),
        addition(2, [(plain[2], 2), (plain[3], 4)], []),
    ]
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, []), (2, 5, [])), opens=[opening(1), opening(2)]))
    await running.wait()
    await call.write(request(2, batch(1, *sessions)))
    for each in more:
        await call.write(added(each))
    first, second = await read(call), await read(call)
    assert (list(first.tokens), first.additions) == (plain[:1] * 2, 3)
    assert list(second.token_counts) == [4, 3]
    assert list(second.tokens) == [*plain[1:5], *plain[1:4]]
    assert second.additions == 0
    grown, _ = extended(succession_from_proto(batch(1, *sessions)), list(map(addition_from_proto, more)))
    # As the step was: two roots.
    grown = replace(grown, is_in_step=np.array([True, True]))
    found = surviving_columns(grown, np.zeros(2, dtype=np.int64), np.array(plain[:1] * 2))
    assert list(second.verified_counts) == found.counts.tolist() == [4, 2]
    # What comes too late, for the last batch that is answered long ago, changes nothing.
    await call.write(added(addition(2, [(3, 9)], [])))
    await call.write(request(3, batch(2, (1, 6, []), (2, 6, []))))
    third = await read(call)
    assert (list(third.tokens), third.additions) == ([plain[5], plain[4]], 0)
    call.cancel()
    await service.until_empty()


async def test_a_late_successor_has_no_additions(service: Service, reference_model: PreTrainedModel) -> None:
    plain = plain_tokens(reference_model, 3)
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, [])), opens=[opening(1)]))
    first = await read(call)
    await call.write(request(2, batch(1, (1, 5, chain(plain[:2], below=0, behind=0)))))
    await call.write(added(addition(2, [(plain[2], 2)])))
    second = await read(call)
    assert (first.additions, list(second.verified_counts), list(second.tokens)) == (0, [1], plain[1:3])
    call.cancel()
    await service.until_empty()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (addition(1, [(3, 0)]), "addition.step: 1 given"),
        (addition(2), "addition.node_counts: 0 entries given, 1 needed"),
        (target_pb2.TreeAddition(step=2, node_counts=[1], tokens=[3], parents=[0]), "addition.values: 0 bytes given"),
    ],
    ids=["another step", "no counts", "no values"],
)
async def test_what_cannot_be_added_ends_the_stream_with_its_reason(
    service: Service, wrong: target_pb2.TreeAddition, message: str
) -> None:
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, [])), opens=[opening(1)]))
    await call.write(request(2, batch(1, (1, 5, [(3, 0)]))))
    await call.write(added(wrong))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await read(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")
    await service.until_empty()


async def test_sessions_that_end_fail_or_are_new(service: Service, reference_model: PreTrainedModel) -> None:
    plain = plain_tokens(reference_model, 3)
    call = service.verify()
    opens = [opening(1, stop_token_ids=(plain[0],)), opening(2, max_new_tokens=1), opening(3)]
    await call.write(request(1, batch(0, *((number, 5, []) for number in (1, 2, 3, 4))), opens=opens))
    old = [(number, 5, chain(plain[:2], below=0, behind=0)) for number in (1, 2, 3, 4)]
    await call.write(request(2, batch(1, *old, (5, 5, chain(plain[:1], below=0, behind=0))), opens=[opening(5)]))
    first, second = await read(call), await read(call)
    assert list(first.outcomes) == [ACCEPTED, ACCEPTED, ACCEPTED, ERROR]
    assert list(second.outcomes) == [ENDED, ENDED, ACCEPTED, ENDED, ACCEPTED]
    assert list(second.verified_counts) == [0, 0, 1, 0, 1]
    assert list(second.token_counts) == [0, 0, 2, 0, 2]
    assert list(second.tokens) == [*plain[1:3], *plain[:2]]
    assert not second.errors
    await call.write(request(3, batch(2, (1, 5, []))))
    third = await read(call)
    assert (list(third.outcomes), third.report.tokens) == ([ENDED], 0)
    call.cancel()
    await service.until_empty()


async def test_a_session_closed_in_between_is_closed_behind_what_was_sent(
    service: Service, reference_model: PreTrainedModel
) -> None:
    plain = plain_tokens(reference_model, 3)
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, []), (2, 5, [])), opens=[opening(1), opening(2)]))
    await call.write(request(2, batch(1, (1, 5, []), (2, 5, []))))
    await call.write(request(0, close_session_ids=[1], close_epochs=[1]))
    assert list((await read(call)).tokens) == plain[:1] * 2
    assert list((await read(call)).tokens) == plain[1:2] * 2
    await call.write(request(3, batch(2, (1, 6, []), (2, 6, []))))
    third = await read(call)
    # Not ENDED: its coordinator might think that it goes on, and would never hear of it.
    assert (list(third.outcomes), list(third.tokens)) == ([ERROR, ACCEPTED], plain[2:3])
    assert "open it again" in third.errors[0].message
    call.cancel()
    await service.until_empty()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"follows": 7}, "follows: 7 given"),
        ({"follows": 2}, "follows: 2 given"),
        ({"resident": [True]}, "resident: given"),
        ({"values": b"1234567"}, "values: 7 bytes given, 4 needed"),
        ({"values": floats_to_bytes([float("nan")])}, "values: numbers from 0 to 1"),
        ({"max_nodes": [1, 2]}, "max_nodes: 3 entries given, 1 needed"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_what_cannot_follow_ends_the_stream_with_its_reason(
    service: Service, change: dict[str, Any], message: str
) -> None:
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, [])), opens=[opening(1)]))
    await read(call)
    trees = batch(1, (1, 5, [(3, 0)]))
    trees.MergeFrom(target_pb2.TreeBatch(**change))
    await call.write(request(2, trees))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")
    await service.until_empty()


async def test_a_stream_that_ends_with_a_successor_waiting_leaves_nothing(service: Service) -> None:
    call = service.verify()
    await call.write(request(1, batch(0, (1, 5, [])), opens=[opening(1)]))
    await call.write(request(2, batch(1, (1, 5, [(3, 0)]))))
    call.cancel()
    await service.until_empty()


async def test_two_coordinators_ahead_at_once(service: Service, reference_model: PreTrainedModel) -> None:
    plain = plain_tokens(reference_model, 10)

    async def coordinator(incarnation: int) -> list[int]:
        call, tokens, verified = service.verify(), [], 0
        message = request(1, batch(0, (1, len(PROMPT), [])), opens=[opening(1)])
        message.incarnation = incarnation
        await call.write(message)
        for step in range(2, 8):
            # What is verified is right, so it is accepted; every second time what is sent is not.
            is_right = step % 2 == 0
            sent = [token if is_right else (token + 1) % 61 for token in plain[len(tokens) + verified :][:2]]
            ahead = batch(step - 1, (1, len(PROMPT) + len(tokens), chain(sent, below=verified, behind=verified)))
            message = request(step, ahead)
            message.incarnation = incarnation
            await call.write(message)
            answer = await read(call)
            assert list(answer.verified_counts) == ([verified] if step > 2 else [])
            tokens += answer.tokens
            verified = 1 if is_right else 0
        tokens += (await read(call)).tokens
        await call.done_writing()
        return tokens

    # Seven steps, of which three verify a node.
    assert await asyncio.gather(*(coordinator(number) for number in range(3))) == [plain] * 3
    await service.until_empty()
