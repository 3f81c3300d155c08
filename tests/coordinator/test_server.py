"""The coordinator's server with workers that are fake, over streams that are real."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.coordinator.fake_workers import FakeTarget, TargetSession
from tests.coordinator.round_servicer import RoundServicer
from tests.coordinator.running import coordinator_running
from tests.polling import until

from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.workers.links import TargetLink
from outrider.drafting.draft_distribution import WEIGHT_SUM
from outrider.errors import WorkerUnavailable
from outrider.rpc import RoleServer, open_channel
from outrider.tokenizer_hash import tokenizer_hash
from outrider.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    target_pb2_grpc,
)
from outrider.wire import WIRE_VERSION, floats_to_bytes, uints_from_bytes, uints_to_bytes

VOCABULARY = 256
LOAD = common_pb2.WorkerLoad(sessions=3)


def next_token(length: int) -> int:
    return (length * 5) % VOCABULARY


ANSWER = [next_token(length) for length in range(3, 23)]


class CountingTarget(FakeTarget):
    """Chooses `next_token` of the length."""

    def choose(self, session: TargetSession) -> int:
        return next_token(len(session.tokens))


def counting_target() -> CountingTarget:
    return CountingTarget(step_s=0.002)


class GuessingDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers every open and commit with the right next three tokens."""

    def __init__(self) -> None:
        self.commands: list[draft_pb2.DraftCommands] = []

    async def Speculate(self, request_iterator, context):  # noqa: N802
        node_id = 0
        lengths: dict[int, int] = {}
        async for commands in request_iterator:
            self.commands.append(commands)
            growth = draft_pb2.DraftGrowth(report=common_pb2.StepReport(step_ns=1_000_000))
            epochs = {}
            for opening in commands.opens:
                lengths[opening.session_id] = len(uints_from_bytes(opening.prompt))
                epochs[opening.session_id] = opening.epoch
            commits = commands.commits
            for session_id, epoch, position, count in zip(
                commits.session_ids, commits.epochs, commits.positions, commits.token_counts, strict=True
            ):
                lengths[session_id] = position + count
                epochs[session_id] = epoch
            for session_id, epoch in epochs.items():
                growth.session_ids.append(session_id)
                growth.epochs.append(epoch)
                growth.as_of.append(lengths[session_id])
                growth.node_counts.append(3)
                growth.node_ids += uints_to_bytes(range(node_id + 1, node_id + 4))
                growth.parents += uints_to_bytes([0, node_id + 1, node_id + 2])
                growth.tokens += uints_to_bytes([next_token(lengths[session_id] + ahead) for ahead in range(3)])
                growth.complete.append(True)
                node_id += 3
            growth.acceptance = floats_to_bytes([0.9] * 3 * len(epochs))
            yield growth


class SpoiltDraft(GuessingDraft):
    """Draft whose growth is changed before it leaves."""

    def __init__(self, spoil: Callable[[draft_pb2.DraftGrowth], object]) -> None:
        super().__init__()
        self.spoil = spoil

    async def Speculate(self, request_iterator, context):  # noqa: N802
        async for growth in super().Speculate(request_iterator, context):
            if growth.tokens:
                self.spoil(growth)
            yield growth


class Worker:
    """A fake worker process: its own server, and a registration that tells of its load once, or never.

    A report that is written while the coordinator ends the call would end it with INTERNAL on this side, whatever the
    coordinator says: so there is none without a cause.
    """

    def __init__(self, servicer, role, coordinator: str, folder, **changes) -> None:
        self.loads: asyncio.Queue[common_pb2.WorkerLoad] = asyncio.Queue()
        self.servicer = servicer
        self.role = role
        self.coordinator = coordinator
        self.hash = tokenizer_hash(folder)
        self.changes = changes
        self.tells_load = True
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.registered = asyncio.Event()
        self.is_to_drain = asyncio.Event()

    async def __aenter__(self):
        add = {
            registry_pb2.WORKER_ROLE_TARGET: target_pb2_grpc.add_TargetServiceServicer_to_server,
            registry_pb2.WORKER_ROLE_DRAFT: draft_pb2_grpc.add_DraftServiceServicer_to_server,
        }[self.role]
        self.server = RoleServer(
            services=[], add_services=lambda server: add(self.servicer, server), address="127.0.0.1:0"
        )
        await self.server.start()
        self.channel = open_channel(self.coordinator)
        self.task = asyncio.create_task(self._register())
        return self

    async def __aexit__(self, *_) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.channel.close()
        await self.server.stop(grace_s=0)

    async def _register(self) -> None:
        call = registry_pb2_grpc.RegistryServiceStub(self.channel).Register(self._reports())
        try:
            async for _lease in call:
                self.registered.set()
            self.code = await call.code()
        except grpc.aio.AioRpcError as error:
            self.code, self.details = error.code(), error.details() or ""
            self.registered.set()

    async def _reports(self) -> AsyncIterator[registry_pb2.WorkerReport]:
        settings = {
            "worker_id": f"worker-{self.role}",
            "role": self.role,
            "address": self.server.address,
            "model": common_pb2.ModelInfo(
                name="fake", vocab_size=VOCABULARY, tokenizer_hash=self.hash, max_model_len=512
            ),
            "limits": registry_pb2.WorkerLimits(max_sessions=8),
            "wire_version": WIRE_VERSION,
        }
        yield registry_pb2.WorkerReport(introduction=registry_pb2.WorkerIntroduction(**settings | self.changes))
        await self.registered.wait()
        if self.tells_load:
            yield registry_pb2.WorkerReport(load=LOAD)
        async for load in self._further_loads():
            yield registry_pb2.WorkerReport(load=load)
        yield registry_pb2.WorkerReport(load=LOAD, draining=True)
        await asyncio.Event().wait()

    async def _further_loads(self) -> AsyncIterator[common_pb2.WorkerLoad]:
        """Yield the loads that a test sets, until the worker is to drain."""
        draining = asyncio.create_task(self.is_to_drain.wait())
        while not draining.done():
            load = asyncio.create_task(self.loads.get())
            await asyncio.wait([draining, load], return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                yield load.result()
            else:
                load.cancel()


def target_worker(coordinator: CoordinatorServer, folder, **changes) -> Worker:
    return Worker(
        RoundServicer(counting_target), registry_pb2.WORKER_ROLE_TARGET, coordinator.address, folder, **changes
    )


def draft_worker(coordinator: CoordinatorServer, folder, **changes) -> Worker:
    return Worker(GuessingDraft(), registry_pb2.WORKER_ROLE_DRAFT, coordinator.address, folder, **changes)


@pytest.fixture
async def coordinator(model_folder, request):
    # A lease lasts for longer than any test, unless its end is what is tested.
    lease_ms = getattr(request, "param", 600_000)
    options = {"model_path": model_folder, "heartbeat_interval_ms": 100, "lease_ms": lease_ms, "drain_s": 0.2}
    async with coordinator_running(**options) as server:
        yield server


def all_serve(coordinator: CoordinatorServer, count: int) -> bool:
    """Return True if this many workers serve and have reported their load."""
    statuses = coordinator.registry.statuses()
    return [(status.state, status.load) for status in statuses] == [("serving", LOAD)] * count


async def generate(
    coordinator: CoordinatorServer, mode: common_pb2.SpeculationMode = common_pb2.SPECULATION_MODE_ASYNC, **settings
) -> list[generation_pb2.GenerateResponse]:
    async with open_channel(coordinator.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            text="abc",
            sampling_params=generation_pb2.SamplingParams(max_new_tokens=20, **settings),
            speculation=generation_pb2.SpeculationParams(mode=mode),
        )
        return [response async for response in stub.Generate(request)]


def tokens_of(responses) -> list[int]:
    return [token for response in responses if response.HasField("delta") for token in response.delta.token_ids]


async def test_tokens_travel_from_the_target_to_the_client(coordinator, model_folder):
    async with target_worker(coordinator, model_folder) as target, draft_worker(coordinator, model_folder):
        await until(lambda: all_serve(coordinator, 2))
        # A sync round waits for its draft, however busy the machine.
        responses = await generate(coordinator, common_pb2.SPECULATION_MODE_SYNC, logprobs=2)
        assert tokens_of(responses) == ANSWER
        assert responses[0].HasField("started")
        finished = responses[-1].finished
        assert finished.usage.completion_tokens == 20
        assert finished.speculation.spec_accepted_tokens > 0
        first = next(response.delta for response in responses if response.HasField("delta"))
        assert list(first.logprobs.top_token_ids)[:2] == [1, 2]
        assert coordinator.info().emitted_tokens_total == 20
        assert all_serve(coordinator, 2)
        await until(lambda: any(message.close_session_ids for message in target.servicer.commands))
    closes = [message for message in target.servicer.commands if message.close_session_ids]
    assert len(closes) == 1


async def test_without_the_option_nothing_is_accepted_at_given_rates(coordinator):
    async with open_channel(coordinator.address) as channel:
        speculation = generation_pb2.SpeculationParams(
            verification=common_pb2.VERIFICATION_RULE_SYNTHETIC, synthetic_rates=[0.5]
        )
        request = generation_pb2.GenerateRequest(text="abc", speculation=speculation)
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        with pytest.raises(grpc.aio.AioRpcError, match="--allow-synthetic") as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def give_distributions(growth: draft_pb2.DraftGrowth, *, weight: int, ahead: int) -> None:
    """Every node's q is one token, `ahead` of the node's own."""
    tokens = uints_from_bytes(growth.tokens)
    growth.distributions.counts.extend([1] * len(tokens))
    growth.distributions.token_ids = uints_to_bytes(tokens + ahead)
    growth.distributions.weights = uints_to_bytes([weight] * len(tokens))


def spoil_last_token(growth: draft_pb2.DraftGrowth) -> None:
    tokens = uints_from_bytes(growth.tokens).tolist()
    growth.tokens = uints_to_bytes([*tokens[:-1], tokens[-1] + VOCABULARY])


def add_token(growth: draft_pb2.DraftGrowth) -> None:
    growth.tokens += uints_to_bytes([1])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_last_token, f"ids below {VOCABULARY} needed"),
        (add_token, "cannot be used"),
        (lambda growth: setattr(growth, "tokens", growth.tokens[:-1]), "multiple of element size"),
        (lambda growth: give_distributions(growth, weight=WEIGHT_SUM - 1, ahead=0), f"{WEIGHT_SUM - 1} given"),
        (lambda growth: give_distributions(growth, weight=WEIGHT_SUM, ahead=1), "own token"),
        (lambda growth: give_distributions(growth, weight=WEIGHT_SUM, ahead=VOCABULARY), "token ids from 0"),
    ],
)
async def test_growth_that_no_target_would_take_costs_the_draft_and_no_request(
    coordinator, model_folder, spoil, reason
):
    draft = Worker(SpoiltDraft(spoil), registry_pb2.WORKER_ROLE_DRAFT, coordinator.address, model_folder)
    async with target_worker(coordinator, model_folder), draft:
        await until(lambda: all_serve(coordinator, 2))
        assert tokens_of(await generate(coordinator)) == ANSWER
        await until(lambda: draft.code is not None)
        assert draft.code is grpc.StatusCode.UNAVAILABLE
        assert reason in draft.details


async def test_a_draft_that_sends_nonsense_again_and_again_is_left_alone(coordinator, model_folder):
    draft = Worker(SpoiltDraft(add_token), registry_pb2.WORKER_ROLE_DRAFT, coordinator.address, model_folder)
    states = lambda: [status.state for status in coordinator.registry.statuses()]  # noqa: E731
    async with target_worker(coordinator, model_folder), draft:
        for _ in range(3):
            await until(lambda: all_serve(coordinator, 2))
            assert tokens_of(await generate(coordinator)) == ANSWER
            await until(lambda: draft.code is grpc.StatusCode.UNAVAILABLE)
            draft.code = None
            draft.task = asyncio.create_task(draft._register())
        await until(lambda: states() == ["serving", "quarantined"])
        commands = len(draft.servicer.commands)
        assert tokens_of(await generate(coordinator)) == ANSWER
        assert len(draft.servicer.commands) == commands
        assert states() == ["serving", "quarantined"]
        # Where it drains meanwhile its lease ends at once.
        left_alone = coordinator.registry.workers[f"worker-{registry_pb2.WORKER_ROLE_DRAFT}"]
        draft.is_to_drain.set()
        await until(lambda: draft.code is grpc.StatusCode.OK)
        assert left_alone.link is None


async def test_a_target_is_used_in_spite_of_quarantine_where_there_is_no_other(coordinator, model_folder):
    async with target_worker(coordinator, model_folder) as target:
        for _ in range(4):
            await until(lambda: coordinator.scheduler.has_target)
            target.task.cancel()
            await until(lambda: not coordinator.registry.workers)
            target.registered.clear()
            target.task = asyncio.create_task(target._register())
        await until(lambda: coordinator.scheduler.has_target)
        assert len(tokens_of(await generate(coordinator))) == 20


async def test_the_lease_of_a_worker_that_drains_ends_in_order(coordinator, model_folder):
    async with target_worker(coordinator, model_folder), draft_worker(coordinator, model_folder) as draft:
        await until(lambda: all_serve(coordinator, 2))
        draft.is_to_drain.set()
        await until(lambda: draft.code is not None)
        assert draft.code is grpc.StatusCode.OK
        assert [status.introduction.role for status in coordinator.registry.statuses()] == [
            registry_pb2.WORKER_ROLE_TARGET
        ]


async def test_a_stranger_is_refused_with_the_reason(coordinator, model_folder):
    own = tokenizer_hash(model_folder)
    for make, reason, model in (
        (draft_worker, "same tokenizer", {"vocab_size": 9, "tokenizer_hash": "0" * 64, "max_model_len": 512}),
        (draft_worker, "vocabulary", {"vocab_size": VOCABULARY + 1, "tokenizer_hash": own, "max_model_len": 512}),
        (target_worker, "max_model_len", {"vocab_size": VOCABULARY, "tokenizer_hash": own, "max_model_len": 100}),
    ):
        async with make(coordinator, model_folder, model=common_pb2.ModelInfo(**model)) as worker:
            await worker.registered.wait()
            assert worker.code is grpc.StatusCode.FAILED_PRECONDITION
            assert reason in worker.details
    assert not coordinator.registry.statuses()


@pytest.mark.parametrize("version", [WIRE_VERSION - 1, WIRE_VERSION + 1, 0], ids=["older", "newer", "none"])
async def test_a_worker_of_another_release_is_refused_with_both_versions(coordinator, model_folder, version):
    # Whatever else it says may mean something else to this release.
    unread = common_pb2.ModelInfo()
    async with draft_worker(coordinator, model_folder, wire_version=version, model=unread) as worker:
        await worker.registered.wait()
    assert worker.code is grpc.StatusCode.FAILED_PRECONDITION
    assert worker.details == (
        f"wire version {version} of the worker is not {WIRE_VERSION} of the coordinator: "
        "start coordinator and workers from one release of Outrider"
    )
    assert not coordinator.registry.statuses()


async def test_a_worker_that_is_back_before_its_lease_has_ended_is_to_try_again(coordinator, model_folder):
    async with target_worker(coordinator, model_folder):
        await until(lambda: coordinator.scheduler.has_target)
        async with target_worker(coordinator, model_folder) as again:
            await again.registered.wait()
            assert again.code is grpc.StatusCode.UNAVAILABLE
            assert "registered already" in again.details
        assert coordinator.scheduler.has_target


@pytest.mark.parametrize("coordinator", [400], indirect=True)
async def test_silence_ends_the_lease(coordinator, model_folder):
    worker = target_worker(coordinator, model_folder)
    worker.tells_load = False
    async with worker:
        await until(lambda: worker.code is grpc.StatusCode.UNAVAILABLE)
        assert "no heartbeat" in worker.details
        assert not coordinator.scheduler.has_target
        assert not coordinator.registry.statuses()
        await until(lambda: worker.servicer.open_streams == 0)


async def test_a_worker_whose_address_does_not_answer_is_let_go(model_folder):
    async with coordinator_running(model_path=model_folder, connect_timeout_s=0.3) as server:
        worker = target_worker(server, model_folder, address="127.0.0.1:1")
        worker.tells_load = False
        async with worker:
            await worker.registered.wait()
            await until(lambda: worker.code is grpc.StatusCode.UNAVAILABLE)
            assert not server.scheduler.has_target


async def test_who_registers_and_says_nothing_is_let_go(model_folder):
    async with (
        coordinator_running(model_path=model_folder, connect_timeout_s=0.1) as server,
        open_channel(server.address) as channel,
        asyncio.timeout(30),
    ):
        call = registry_pb2_grpc.RegistryServiceStub(channel).Register()
        with pytest.raises(grpc.aio.AioRpcError, match=r"did not introduce itself within 0\.1 s") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_workers_it_says_so_and_is_healthy(coordinator):
    with pytest.raises(grpc.aio.AioRpcError, match="no target worker") as caught:
        await generate(coordinator)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with open_channel(coordinator.address) as channel:
        request = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
        response = await health_pb2_grpc.HealthStub(channel).Check(request)  # pyright: ignore[reportAttributeAccessIssue]
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_taken_port_is_named(coordinator, model_folder):
    port = int(coordinator.address.rpartition(":")[2])
    with pytest.raises(OSError, match=str(port)):
        CoordinatorServer(CoordinatorConfig(port=port, model_path=model_folder))


async def test_stopping_ends_streams_with_a_reason(model_folder):
    servicer = RoundServicer(lambda: FakeTarget(step_s=1e6))
    async with (
        coordinator_running(model_path=model_folder) as server,
        Worker(servicer, registry_pb2.WORKER_ROLE_TARGET, server.address, model_folder),
    ):
        await until(lambda: server.scheduler.has_target)
        task = asyncio.create_task(generate(server))
        await until(lambda: server.scheduler.running_sessions == 1)
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_two_coordinators_sessions_at_one_target_do_not_meet(model_folder):
    """Both call their sessions the same, under the same epochs."""
    servicer, role = RoundServicer(counting_target), registry_pb2.WORKER_ROLE_TARGET
    async with (
        coordinator_running(model_path=model_folder) as one,
        coordinator_running(model_path=model_folder) as two,
        Worker(servicer, role, one.address, model_folder),
        Worker(servicer, role, two.address, model_folder),
    ):
        servers = (one, two)
        await until(lambda: all(server.scheduler.has_target for server in servers))
        answers = await asyncio.gather(*(generate(server) for server in servers))
        assert [tokens_of(answer) for answer in answers] == [ANSWER] * 2
        opened = {
            (message.incarnation, own.session_id, own.epoch) for message in servicer.commands for own in message.opens
        }
        assert len({incarnation for incarnation, *_ in opened}) == 2
        assert {tuple(name) for _, *name in opened} == {(1, 1)}
        # What becomes of one's sessions is none of the other's.
        tasks = [asyncio.create_task(generate(server)) for server in servers]
        await until(lambda: all(server.scheduler.running_sessions for server in servers))
        servers[0].scheduler.stop(WorkerUnavailable("stopping"))
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await tasks[0]
        assert tokens_of(await tasks[1]) == ANSWER


async def test_a_target_whose_step_does_not_come_back_is_lost_and_its_sessions_go_on_elsewhere(
    coordinator, model_folder
):
    hung = Worker(RoundServicer(lambda: FakeTarget(step_s=1e6)), registry_pb2.WORKER_ROLE_TARGET, coordinator.address,
                  model_folder, worker_id="hung")  # fmt: skip
    async with hung:
        await until(lambda: all_serve(coordinator, 1))
        task = asyncio.create_task(generate(coordinator))
        await until(lambda: coordinator.scheduler.running_sessions == 1)
        async with target_worker(coordinator, model_folder):
            await until(lambda: all_serve(coordinator, 2))
            told = coordinator.registry.workers["hung"]
            # It may be compiling, or its process was stopped for a moment: neither is its end.
            hung.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=60_000, preparing=True))
            for age_ms in (6_000, 4_000):
                hung.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=age_ms))
            hung.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=6_000, sessions=7))
            await until(lambda: told.load.sessions == 7)
            assert not told.is_lost
            hung.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=6_500))
            await until(lambda: hung.code is grpc.StatusCode.UNAVAILABLE)
            assert "its step has not come back for 6.5 s" in hung.details
            assert tokens_of(await task) == ANSWER


async def test_a_target_of_long_steps_is_given_its_time(coordinator, model_folder):
    """Ten times what its steps take, where that is more than what is configured."""
    async with target_worker(coordinator, model_folder) as worker:
        await until(lambda: all_serve(coordinator, 1))
        told = coordinator.registry.workers[f"worker-{registry_pb2.WORKER_ROLE_TARGET}"]
        assert isinstance(told.link, TargetLink)
        told.link.step_latency.observe(2e9)
        for sessions in (1, 2):
            worker.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=19_000, sessions=sessions))
            await until(lambda sessions=sessions: told.load.sessions == sessions)
        assert not told.is_lost
        for _ in range(2):
            worker.loads.put_nowait(common_pb2.WorkerLoad(step_age_ms=21_000))
        await until(lambda: told.is_lost)
