"""Weights changed under a coordinator: targets that are fake, streams and registrations that are real."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from tests.coordinator.reloading_target import LENGTH, NEW, OLD, ReloadingTarget, said
from tests.coordinator.running import coordinator_running
from tests.polling import until

from outrider import cli
from outrider.client import AsyncClient
from outrider.coordinator.commands.reload import InFlight, ReloadOutcome, outcome_dict, reload_weights
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.workers import reload
from outrider.errors import Superseded, WorkerRefused, WorkerUnavailable
from outrider.rpc import open_channel
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, registry_pb2, registry_pb2_grpc

Response = generation_pb2.GenerateResponse


def coordinator_of(model_folder, **options) -> contextlib.AbstractAsyncContextManager[CoordinatorServer]:
    settings = {"model_path": model_folder, "heartbeat_interval_ms": 20, "lease_ms": 600_000, "drain_s": 0.1}
    return coordinator_running(**settings | options)


@pytest.fixture
async def coordinator(model_folder) -> AsyncIterator[CoordinatorServer]:
    async with coordinator_of(model_folder) as server:
        yield server


@pytest.fixture
async def pair(coordinator, model_folder) -> AsyncIterator[list[ReloadingTarget]]:
    """Two targets that serve."""
    async with (
        ReloadingTarget("a", model_folder, [coordinator]) as one,
        ReloadingTarget("b", model_folder, [coordinator]) as two,
    ):
        await until(lambda: states(coordinator) == ["serving", "serving"])
        yield [one, two]


def states(coordinator: CoordinatorServer) -> list[str]:
    return [status.state for status in coordinator.registry.statuses()]


def versions(coordinator: CoordinatorServer) -> list[str]:
    info = coordinator.info()
    return [info.weights.version, *(own.introduction.model.weights.version for own in info.workers)]


async def generate(coordinator: CoordinatorServer, **fields) -> list[Response]:
    sampling = generation_pb2.SamplingParams(max_new_tokens=LENGTH)
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]), sampling_params=sampling, **fields
    )
    async with open_channel(coordinator.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return [response async for response in stub.Generate(request, timeout=300)]


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses if response.HasField("delta") for token in response.delta.token_ids]


def weights_of(responses: list[Response]) -> list[str]:
    """As the first delta and the last message say, and no other."""
    deltas = [response.delta.weights for response in responses if response.HasField("delta")]
    assert not any(deltas[1:])
    return [deltas[0], responses[-1].finished.weights]


async def reloaded(*coordinators: CoordinatorServer, path: str = "/new", **options) -> ReloadOutcome:
    return await reload_weights([each.address for each in coordinators], path, timeout_s=300, **options)


async def running_request(
    coordinator: CoordinatorServer, targets: list[ReloadingTarget]
) -> "asyncio.Task[list[Response]]":
    """A request that has begun, and goes on once its target runs again."""
    task = asyncio.create_task(generate(coordinator))
    await pause(targets)
    return task


async def pause(targets: list[ReloadingTarget]) -> None:
    """Until one has stopped in the midst of what it does."""
    for target in targets:
        target.pauses_in = 3
    await until(lambda: any(not target.runs.is_set() for target in targets))
    for target in targets:
        target.pauses_in = 0


def go_on(targets: list[ReloadingTarget]) -> None:
    for target in targets:
        target.runs.set()


async def held_up(
    coordinator: CoordinatorServer, targets: list[ReloadingTarget]
) -> "tuple[asyncio.Task[list[Response]], asyncio.Task[ReloadOutcome]]":
    """A request that runs, and a reload that waits for it."""
    before = await running_request(coordinator, targets)
    reloading = asyncio.create_task(reloaded(coordinator))
    await until(lambda: coordinator.scheduler.weights.is_held)
    return before, reloading


# ----------------------------------------------------------------------------------------------- what runs, and waits


async def test_what_runs_finishes_on_the_old_weights_and_what_waits_begins_on_the_new(coordinator, pair):
    before, reloading = await held_up(coordinator, pair)
    after = asyncio.create_task(generate(coordinator))
    await until(lambda: coordinator.scheduler.waiting_requests == 1)
    assert versions(coordinator) == ["old", "old", "old"]
    assert not reloading.done()
    go_on(pair)
    outcome, old, new = await asyncio.gather(reloading, before, after)
    assert (tokens_of(old), weights_of(old)) == (said("old"), ["old", "old"])
    assert (tokens_of(new), weights_of(new)) == (said("new"), ["new", "new"])
    assert (outcome.weights, outcome.failed, outcome.aborted, outcome.is_same) == (NEW, [], 0, False)
    assert versions(coordinator) == ["new", "new", "new"]
    async with AsyncClient(coordinator.address) as client:
        assert (await client.model_info()).model.weights == NEW
    told = outcome_dict(outcome)
    assert (told["version"], told["reloads"], told["changed"]) == ("new", 1, True)
    # Once more is nothing.
    assert (await reloaded(coordinator)).is_same


async def test_what_runs_finishes_on_a_target_that_comes_back_meanwhile(model_folder):
    async with coordinator_of(model_folder, target_wait_s=300) as coordinator:
        async with ReloadingTarget("a", model_folder, [coordinator]) as target:
            await until(lambda: states(coordinator) == ["serving"])
            before, reloading = await held_up(coordinator, [target])
        async with ReloadingTarget("b", model_folder, [coordinator]), asyncio.timeout(60):
            outcome, old = await asyncio.gather(reloading, before)
            assert (tokens_of(old), weights_of(old)) == (said("old"), ["old", "old"])
            assert (outcome.failed, versions(coordinator)) == ([], ["new", "new"])


async def test_a_hold_is_not_for_those_who_name_weights_and_have_received_nothing(coordinator, pair):
    before, reloading = await held_up(coordinator, pair)
    after = asyncio.create_task(generate(coordinator, weights="old"))
    await until(lambda: len(coordinator.scheduler.sessions) == 2)
    assert coordinator.scheduler.waiting_requests == 1
    go_on(pair)
    await asyncio.gather(reloading, before)
    with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced"):
        await after


async def test_what_runs_can_be_aborted_and_is_told_why(coordinator, pair):
    async with AsyncClient(coordinator.address) as client:
        running = asyncio.create_task(client.generate([1, 2, 3], max_new_tokens=LENGTH))
        await pause(pair)
        reloading = asyncio.create_task(reloaded(coordinator, in_flight=InFlight.ABORT))
        # The client goes on after what breaks, but not after this.
        with pytest.raises(Superseded, match="weights were replaced while it ran"):
            await running
        go_on(pair)
        assert (await reloading).aborted == 1
    assert tokens_of(await generate(coordinator)) == said("new")


async def test_whoever_goes_on_with_tokens_of_the_old_weights_is_told(coordinator, pair):
    first = next(response.delta for response in await generate(coordinator) if response.HasField("delta"))
    text_bytes = len(first.text.encode())
    received = [generation_pb2.Received(index=0, token_ids=first.token_ids, text_bytes=text_bytes)]
    on_old = await generate(coordinator, received=received, weights="old")
    assert tokens_of(on_old) == said("old")[len(first.token_ids) :]
    await reloaded(coordinator)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await generate(coordinator, received=received, weights="old")
    assert ended.value.code() is grpc.StatusCode.ABORTED
    assert "the service runs with new, and the request began with old" in (ended.value.details() or "")


async def test_requests_go_on_when_whoever_reloads_goes_away(coordinator, pair):
    before, reloading = await held_up(coordinator, pair)
    after = asyncio.create_task(generate(coordinator))
    await until(lambda: coordinator.scheduler.waiting_requests == 1)
    reloading.cancel()
    await until(lambda: not coordinator.scheduler.weights.is_held)
    go_on(pair)
    assert [tokens_of(each) for each in await asyncio.gather(before, after)] == 2 * [said("old")]


async def test_a_swap_that_has_begun_is_ended_before_requests_begin(coordinator, pair):
    for target in pair:
        target.copies.clear()
    reloading = asyncio.create_task(reloaded(coordinator))
    await until(lambda: all(target.swaps_begun for target in pair))
    after = asyncio.create_task(generate(coordinator))
    await until(lambda: coordinator.scheduler.waiting_requests == 1)
    reloading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reloading
    # What holds is the swap, not the stream, which has ended by the time that another one is answered.
    async with open_channel(coordinator.address) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Reload(timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match="another reload is under way"):
            await call.read()
    assert coordinator.scheduler.waiting_requests == 1
    for target in pair:
        target.copies.set()
    answer = await after
    assert (tokens_of(answer), weights_of(answer)) == (said("new"), ["new", "new"])
    await until(lambda: not coordinator.scheduler.weights.is_held)
    assert (await reloaded(coordinator)).is_same


async def test_a_hold_that_takes_too_long_changes_nothing(coordinator, pair):
    before = await running_request(coordinator, pair)
    with pytest.raises(WorkerUnavailable, match="nothing has changed"):
        # It cannot end before the request, which does not.
        await reload_weights([coordinator.address], "/new", timeout_s=1.0)
    go_on(pair)
    assert tokens_of(await before) == said("old")
    assert tokens_of(await generate(coordinator)) == said("old")


# -------------------------------------------------------------------------------------------------- who cannot follow


async def test_where_one_target_cannot_run_with_them_nothing_changes(coordinator, pair):
    del pair[1].folders["/new"]
    with pytest.raises(WorkerRefused, match=r"1 of 2 targets .*: b \(127.*\): /new: model.norm.weight is missing"):
        await reloaded(coordinator)
    pair[1].folders["/new"] = "other"
    with pytest.raises(WorkerRefused, match="not hold the same weights on every machine"):
        await reloaded(coordinator)
    assert versions(coordinator) == ["old", "old", "old"]
    assert tokens_of(await generate(coordinator)) == said("old")


async def test_a_target_that_fails_to_swap_is_left_alone_until_it_has(coordinator, pair, monkeypatch):
    monkeypatch.setattr(reload, "_RETRY_S", 0.05)
    pair[1].breaks = "the disk is gone"
    outcome = await reloaded(coordinator)
    assert [(target.name, target.error) for target in outcome.failed] == [("b", "the disk is gone")]
    await until(lambda: sorted(states(coordinator)) == ["other weights", "serving"])
    answers = await asyncio.gather(*(generate(coordinator) for _ in range(12)))
    assert [tokens_of(each) for each in answers] == 12 * [said("new")]
    pair[1].breaks = ""
    await until(lambda: states(coordinator) == ["serving", "serving"])
    assert pair[1].weights == NEW


async def test_after_a_swap_that_failed_on_one_target_the_old_weights_can_be_had_back_on_all(coordinator, pair):
    pair[1].breaks = "the disk is gone"
    outcome = await reloaded(coordinator)
    assert (len(outcome.failed), outcome.previous) == (1, OLD)
    await until(lambda: sorted(states(coordinator)) == ["other weights", "serving"])
    # The one that failed has them still; its disk is as it was.
    back = await reloaded(coordinator, path=outcome.previous.path)
    assert (back.failed, back.previous) == ([], NEW)
    await until(lambda: states(coordinator) == ["serving", "serving"])
    assert versions(coordinator) == ["old", "old", "old"]
    assert [target.weights.reloads for target in pair] == [2, 2]
    assert tokens_of(await generate(coordinator)) == said("old")


async def test_one_that_comes_back_with_old_weights_is_told_to_load(coordinator, pair, model_folder):
    await reloaded(coordinator)
    async with ReloadingTarget("c", model_folder, [coordinator]) as back:
        await until(lambda: states(coordinator) == 3 * ["serving"])
        assert back.weights == NEW


async def test_a_coordinator_that_has_forgotten_takes_the_newest(model_folder):
    newest = common_pb2.Weights(version="new", path="/new", reloads=4)
    async with coordinator_of(model_folder) as coordinator, ReloadingTarget("a", model_folder, [coordinator]) as old:
        await until(lambda: states(coordinator) == ["serving"])
        old.runs.clear()
        begun = asyncio.create_task(generate(coordinator))
        await until(lambda: old.session_count)
        async with ReloadingTarget("b", model_folder, [coordinator], weights=newest):
            # It began on the old weights, and there is nobody left to go on with them.
            with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced") as ended:
                await begun
            assert ended.value.code() is grpc.StatusCode.ABORTED
            old.runs.set()
            await until(lambda: states(coordinator) == ["serving", "serving"])
            assert old.weights == newest
            assert tokens_of(await generate(coordinator)) == said("new")


async def test_weights_of_a_worker_that_nobody_can_reach_are_not_taken(coordinator, pair):
    before, introduction = versions(coordinator), registry_pb2.WorkerIntroduction()
    introduction.CopyFrom(coordinator.info().workers[0].introduction)
    introduction.worker_id, introduction.address = "c", "127.0.0.1:1"
    introduction.model.weights.CopyFrom(common_pb2.Weights(version="new", path="/new", reloads=9))
    async with open_channel(coordinator.address) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Register()
        await call.write(registry_pb2.WorkerReport(introduction=introduction))
        with pytest.raises(grpc.aio.AioRpcError, match="the lease has ended"):
            async for _ in call:
                pass
    assert (states(coordinator), versions(coordinator)) == (["serving", "serving"], before)


async def test_targets_that_were_started_with_different_weights_do_not_mix(model_folder, monkeypatch):
    monkeypatch.setattr(reload, "_RETRY_S", 0.05)
    other = common_pb2.Weights(version="new", path="/elsewhere")
    async with coordinator_of(model_folder) as coordinator:
        async with ReloadingTarget("a", model_folder, [coordinator]):
            await until(lambda: states(coordinator) == ["serving"])
            stranger = ReloadingTarget("b", model_folder, [coordinator], weights=other)
            await stranger.__aenter__()
            await until(lambda: states(coordinator) == ["serving", "other weights"])
            assert tokens_of(await generate(coordinator)) == said("old")
        try:
            # Nobody else serves any more.
            await until(lambda: states(coordinator) == ["serving"])
            assert tokens_of(await generate(coordinator)) == said("new")
        finally:
            await stranger.__aexit__()


async def test_the_command_tells_what_was_done_and_what_was_not(coordinator, pair, capsys):
    async def command(*arguments: str) -> int:
        return await asyncio.to_thread(cli.run, ["reload", "--endpoint", coordinator.address, *arguments])

    assert await command("--target", "/nowhere") == cli.FAILED
    err = capsys.readouterr().err
    assert "2 of 2 targets cannot run with it, nothing has changed: " in err
    assert all(f"{name} (127.0.0.1:" in err for name in "ab")
    assert await command("--target", "/new", "--json") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["version"], told["reloads"], err) == ("new", 1, "")
    assert sorted((each["name"], each["error"]) for each in told["targets"]) == [("a", None), ("b", None)]
    assert await command("--target", "/new") == 0
    assert "run with these already: weights new of /new" in capsys.readouterr().out
    pair[0].breaks = "the disk is gone"
    assert await command("--target", "/old", "--in-flight", "abort") == cli.FAILED
    out, err = capsys.readouterr()
    assert "weights old of /old" in out
    assert "the disk is gone" in out
    assert "1 of 2 targets are out of service" in out
    assert "to go back: outrider reload --target /new" in out
    assert "the targets read /old" in err


# ----------------------------------------------------------------------------------------------- several coordinators


async def test_several_coordinators_hold_before_any_target_swaps(model_folder):
    async with (
        coordinator_of(model_folder) as one,
        coordinator_of(model_folder) as two,
        ReloadingTarget("a", model_folder, [one, two]) as a,
        ReloadingTarget("b", model_folder, [one, two]) as b,
    ):
        await until(lambda: states(one) == states(two) == ["serving", "serving"])
        before = await running_request(two, [a, b])
        reloading = asyncio.create_task(reloaded(one, two))
        await until(lambda: one.scheduler.weights.is_held and two.scheduler.weights.is_held)
        assert versions(one) == versions(two) == ["old", "old", "old"]
        go_on([a, b])
        assert tokens_of(await before) == said("old")
        assert (await reloading).failed == []
        assert versions(one) == versions(two) == ["new", "new", "new"]
        assert [tokens_of(await generate(each)) for each in (one, two)] == 2 * [said("new")]


async def test_a_coordinator_that_was_not_asked_never_mixes(model_folder):
    async with (
        coordinator_of(model_folder) as asked,
        coordinator_of(model_folder) as other,
        ReloadingTarget("a", model_folder, [asked, other]) as target,
    ):
        await until(lambda: states(asked) == states(other) == ["serving"])
        before = await running_request(other, [target])
        assert (await reloaded(asked)).failed == []
        target.runs.set()
        with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced") as ended:
            await before
        assert ended.value.code() is grpc.StatusCode.ABORTED
        await until(lambda: versions(other) == ["new", "new"])
        answer = await generate(other)
        assert (tokens_of(answer), weights_of(answer)) == (said("new"), ["new", "new"])


async def test_two_reloads_at_a_time_and_a_swap_without_a_hold_are_refused(coordinator, pair):
    before, reloading = await held_up(coordinator, pair)
    with pytest.raises(WorkerRefused, match="another reload is under way"):
        await reloaded(coordinator)
    go_on(pair)
    await asyncio.gather(before, reloading)
    async with open_channel(coordinator.address) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Reload(timeout=60)
        await call.write(registry_pb2.ReloadCommand(swap=registry_pb2.ReloadSwap(weights=OLD)))
        with pytest.raises(grpc.aio.AioRpcError, match="hold them first"):
            await call.read()
    assert tokens_of(await generate(coordinator)) == said("new")
