"""The target's service of rounds over loopback gRPC, with a tiny model behind it."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.polling import until
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.ahead import AheadProgram
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    oracle_tree,
    random_tree,
)
from tests.target_worker.serving import LEFT, RESENT, SAMPLED, TAKEN, Coordinator, Service

from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT, Code
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_from_bytes, floats_to_bytes, uints_to_bytes


@pytest.fixture(params=[RoundProgram, AheadProgram], ids=["one by one", "ahead"])
async def service(request: pytest.FixtureRequest, checkpoint: Path) -> AsyncIterator[Service]:
    service = Service(checkpoint, request.param)
    await service.start()
    yield service
    await service.stop()


@pytest.mark.parametrize("name", ["greedy", *[name for name in SPECS if SPECS[name].logprobs is not None][:1]])
async def test_tokens_are_those_of_plain_decoding_whatever_growth_does(name, service, reference_model):
    spec = SPECS.get(name, SamplingSpec(max_new_tokens=24))
    plain = plain_decode(reference_model, PROMPT, spec)
    chance, coordinator = random.Random(3), Coordinator(service)
    await coordinator.open(1, spec)
    await coordinator.change(1, 0, TAKEN)
    await coordinator.change(1, 1, TAKEN)
    late: list[target_pb2.RelayedGrowth] = []
    while (1, 1) not in coordinator.finishes:
        done = coordinator.tokens.get((1, 1), [])
        grown = [
            coordinator.growth(1, maker(chance, plain.tokens[len(done) :]), len(PROMPT) + len(done), places=[place])
            for place, maker in enumerate((oracle_tree, random_tree))
        ]
        for growth in grown:
            # Late, lost, twice, or as it should be.
            fate = chance.randrange(4)
            if fate == 0:
                late.append(growth)
            elif fate > 1:
                await coordinator.send(growth=growth)
            if fate == 2:
                await coordinator.send(growth=growth)
        if late and chance.random() < 0.5:
            await coordinator.send(growth=late.pop(0))
        fate = chance.randrange(6)
        if fate < 3:
            await coordinator.change(1, 1, [RESENT, LEFT, TAKEN][fate])
        await coordinator.read()
    assert coordinator.tokens[1, 1] == plain.tokens
    assert not coordinator.errors
    reports = [message.report for message in coordinator.messages if message.HasField("report")]
    assert all(report.step_ns >= report.forward_ns > 0 for report in reports)
    if spec.logprobs is not None:
        found = np.concatenate(
            [floats_from_bytes(entry.token_logprobs) for message in coordinator.messages for entry in message.logprobs]
        )
        expected = [values[token].item() for values, token in zip(plain.logprobs, plain.tokens, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    await service.until_empty()


async def test_nodes_that_are_sent_are_accepted_with_their_sources(service, reference_model):
    plain = plain_decode(reference_model, PROMPT, SAMPLED).tokens
    coordinator = Coordinator(service)
    growth = coordinator.growth(1, (plain[:4], [0, 1, 2, 3]), len(PROMPT), sources=[1, 2, 3, 2])
    await coordinator.open(1, SAMPLED, growth=growth)
    await coordinator.finish(1)
    assert coordinator.tokens[1, 1] == plain
    sources = [bits for message in coordinator.messages for bits in message.accepted_sources]
    assert sources == [2, 4, 8, 4]


async def test_streams_of_two_coordinators_share_rounds_and_the_end_of_one_frees_its_sessions(service, reference_model):
    one, other = Coordinator(service), Coordinator(service, incarnation=8)
    endless = SamplingSpec(max_new_tokens=80)
    for number in (1, 2):
        await one.open(number, endless, allow=len(PROMPT) + 3)
    await other.open(1, endless, allow=len(PROMPT) + 3)
    await one.read_until(lambda: all(len(one.tokens.get((number, 1), [])) == 3 for number in (1, 2)))
    await other.read_until(lambda: len(other.tokens.get((1, 1), [])) == 3)
    one.call.cancel()
    await until(lambda: service.thread.load.sessions == 1)
    await other.bound(1, WITHOUT_LIMIT)
    await other.finish(1)
    assert other.tokens[1, 1] == plain_decode(reference_model, PROMPT, endless).tokens
    await service.until_empty()
    # The writer's end is the stream's, too.
    third = Coordinator(service)
    await third.open(5, endless, allow=0)
    await until(lambda: service.thread.load.sessions == 1)
    await third.call.done_writing()
    assert await third.call.code() is grpc.StatusCode.OK
    await service.until_empty()


async def test_a_session_is_opened_anew_and_older_opens_are_refused(service, reference_model):
    plain = plain_decode(reference_model, PROMPT, SAMPLED).tokens
    coordinator = Coordinator(service)
    await coordinator.open(1, SAMPLED, allow=len(PROMPT) + 5)
    await coordinator.read_until(lambda: len(coordinator.tokens.get((1, 1), [])) == 5)
    await coordinator.open(1, SAMPLED, epoch=3)
    await coordinator.open(1, SAMPLED, epoch=2)
    # Of an epoch that is over: without effect.
    await coordinator.close(1, epoch=2)
    await coordinator.bound(1, 0, epoch=1)
    await coordinator.finish(1, epoch=3)
    assert coordinator.tokens[1, 3] == plain
    await coordinator.read_until(lambda: coordinator.errors)
    assert {key: error.code for key, error in coordinator.errors.items()} == {(1, 2): Code.FAILED_PRECONDITION}
    await coordinator.open(2, SamplingSpec(max_new_tokens=80))
    await coordinator.read_until(lambda: coordinator.tokens.get((2, 1)))
    await coordinator.close(2)
    await service.until_empty()


BAD = {
    "token": {"tokens": uints_to_bytes([61])},
    "acceptance": {"acceptance": floats_to_bytes([1.5])},
    "nan": {"acceptance": floats_to_bytes([float("nan")])},
    "node_ids": {"node_ids": uints_to_bytes([0])},
    "places": {"places": [4]},
    "as_of": {"as_of": [0]},
    "distributions": {
        "distributions": common_pb2.DraftDistributions(
            counts=[1], token_ids=uints_to_bytes([3]), weights=uints_to_bytes([5])
        )
    },
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_part_of_a_message_ends_its_session_alone(name, service, reference_model):
    coordinator = Coordinator(service)
    for number in (1, 2):
        await coordinator.open(number, SAMPLED, allow=0)
    await coordinator.send(growth=coordinator.growth(1, ([3], [0]), len(PROMPT), **BAD[name]))
    await coordinator.read_until(lambda: coordinator.errors)
    (error,) = coordinator.errors.values()
    assert (error.session_id, error.code) == (1, Code.INVALID_ARGUMENT)
    assert "growth." in error.message
    await coordinator.bound(2, WITHOUT_LIMIT)
    await coordinator.finish(2)
    assert coordinator.tokens[2, 1] == plain_decode(reference_model, PROMPT, SAMPLED).tokens
    await service.until_empty()


async def test_opens_that_cannot_be_are_told(service):
    coordinator = Coordinator(service)
    await coordinator.open(1, SAMPLED, prompt=[61])
    await coordinator.open(2, SAMPLED, mode=9)
    await coordinator.open(3, SamplingSpec(min_new_tokens=2**32 - 1))
    await coordinator.send(opens=[common_pb2.SessionOpen(session_id=4, epoch=1, prompt=b"abc")])
    await coordinator.change(5, 0, 0)
    await coordinator.bound(6, 2**31)
    await coordinator.read_until(lambda: len(coordinator.errors) == 6)
    assert {error.code for error in coordinator.errors.values()} == {Code.INVALID_ARGUMENT}


async def test_columns_of_different_lengths_end_the_stream(service):
    coordinator = Coordinator(service)
    await coordinator.open(1, SAMPLED, allow=0)
    await coordinator.send(growth=coordinator.growth(1, ([3, 4], [0, 1]), len(PROMPT), tokens=uints_to_bytes([3])))
    assert await coordinator.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "growth.tokens, bytes: 4 entries given, 8 needed" in await coordinator.call.details()
    await service.until_empty()


async def test_sync_trees_give_the_same_tokens_one_round_each(service, reference_model):
    plain = plain_decode(reference_model, PROMPT, SAMPLED).tokens
    coordinator, chance = Coordinator(service), random.Random(2)
    # Held until its drafter is known: without one, a round would wait for no tree.
    await coordinator.open(1, SAMPLED, mode=2, max_nodes=8, sync_wait_ms=10**9, allow=0)
    await coordinator.change(1, 0, TAKEN)
    await coordinator.bound(1, WITHOUT_LIMIT)
    # Growth that comes before its row is to be sent again.
    await until(lambda: service.thread.load.slots_used)
    nodes: list[int] = []
    while (1, 1) not in coordinator.finishes:
        done = len(coordinator.tokens.get((1, 1), []))
        tree = oracle_tree(chance, plain[done:][:2])
        whole = coordinator.growth(1, tree, len(PROMPT) + done, complete=True)
        nodes.append(min(len(tree[0]), 2 * (len(plain) - done - 1)))
        await coordinator.send(growth=whole)
        await coordinator.read()
    assert coordinator.tokens[1, 1] == plain
    assert coordinator.selected[1] == nodes


async def test_alone_and_without_speculation_the_tokens_are_the_same(service, reference_model):
    coordinator = Coordinator(service)
    specs = {number: SamplingSpec(temperature=1.0, seed=number, max_new_tokens=16) for number in range(1, 5)}
    for number, spec in specs.items():
        await coordinator.open(number, spec, mode=3 if number == 4 else 1)
    for number in (1, 2):
        await coordinator.bound(number, WITHOUT_LIMIT, alone=True)
    await coordinator.send(growth=coordinator.growth(4, ([1, 2], [0, 0]), len(PROMPT)))
    await coordinator.finish(*specs)
    for number, spec in specs.items():
        assert coordinator.tokens[number, 1] == plain_decode(reference_model, PROMPT, spec).tokens
    assert not any(coordinator.selected[4])
    await service.until_empty()


class Unread:
    """The server's end of a call whose client does not read until it is told to."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.written: list[target_pb2.RoundResults] = []

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: bytes) -> None:
        await self.may_write.wait()
        self.written.append(target_pb2.RoundResults.FromString(message))


async def test_sessions_of_a_stream_that_is_not_read_rest_until_it_is(service, reference_model):
    spec = SamplingSpec(max_new_tokens=60)
    opening = common_pb2.SessionOpen(session_id=1, epoch=1, prompt=uints_to_bytes(PROMPT), sampling=spec.to_proto())
    may_end = asyncio.Event()

    async def commands() -> AsyncIterator[bytes]:
        yield target_pb2.RoundCommands(incarnation=9, opens=[opening]).SerializeToString()
        await may_end.wait()

    context: Any = Unread()
    call = asyncio.create_task(service.relay.stream(0, commands(), context))
    other = Coordinator(service)
    await until(lambda: service.thread.holds)
    await other.open(1, spec)
    await other.finish(1)
    await until(lambda: not service.thread.watch.age_s)
    # It has not ended, though another that began later has.
    assert (service.thread.load.sessions, context.written) == (1, [])
    context.may_write.set()
    plain = plain_decode(reference_model, PROMPT, spec).tokens

    def tokens() -> list[int]:
        return [token for message in context.written for token in message.tokens]

    await until(lambda: len(tokens()) == len(plain))
    assert tokens() == plain == other.tokens[1, 1]
    may_end.set()
    await call
    await service.until_empty()
