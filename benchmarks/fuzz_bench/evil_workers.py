"""The other direction: workers that answer the coordinator with messages that nobody should send.

An evil target may choose any token, so its answers are held against the rules of a stream alone; beside an evil draft
the tokens are those of the honest target.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from benchmarks.fuzz_bench.messages import MessageFuzzer
from benchmarks.fuzz_bench.tiny_service import MODEL_LEN, PROMPT, VOCAB_SIZE
from google.protobuf.message import Message

from outrider.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, registry_pb2, registry_pb2_grpc, target_pb2
from outrider.wire import floats_to_bytes


@dataclass(frozen=True, kw_only=True)
class EvilKind:
    """What is fuzzed.

    Attributes:
        name: of the message.
        is_target: whether the worker that sends it verifies; else it drafts, beside an honest target.
        codes: that requests may end with.
    """

    name: str
    is_target: bool
    codes: frozenset[str]

    @property
    def has_target(self) -> bool:
        """Whether there is an honest target."""
        return not self.is_target


EVIL_KINDS = (
    EvilKind(
        name="VerifyResponse",
        is_target=True,
        codes=frozenset({"OK", "UNAVAILABLE", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
    ),
    EvilKind(name="DraftGrowth", is_target=False, codes=frozenset({"OK"})),
)


class EvilWorker:
    """A worker that answers honestly for a while, then every other time; it registers again and again."""

    def __init__(self, coordinator: str, *, kind: EvilKind, tokenizer_hash: str, seed: int) -> None:
        self._coordinator, self._is_target, self._tokenizer_hash = coordinator, kind.is_target, tokenizer_hash
        output = target_pb2.VerifyResponse if kind.is_target else draft_pb2.DraftGrowth
        self.fuzzer = MessageFuzzer(output, seed=seed)
        self.sent: list[bytes] = []
        self._honest_left = 0
        self._numbers = itertools.count(1)

    def begin_case(self) -> None:
        """Some messages from now on are honest, then one in two is not."""
        self.sent.clear()
        self._honest_left = self.fuzzer.random.choice((0, 0, 1, 2))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listens, and keeps registering."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service, method = ("TargetService", "Verify") if self._is_target else ("DraftService", "Speculate")
        handler = grpc.stream_stream_rpc_method_handler(self._answer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"outrider.v1.{service}", {method: handler}),)
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        registration = asyncio.create_task(self._register(address))
        try:
            yield
        finally:
            registration.cancel()
            await asyncio.gather(registration, return_exceptions=True)
            await server.stop(0)

    async def _register(self, address: str) -> None:
        async with grpc.aio.insecure_channel(self._coordinator, options=CHANNEL_OPTIONS) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    call = registry_pb2_grpc.RegistryServiceStub(channel).Register()
                    await call.write(self._introduction(address))
                    await call.read()
                    heartbeats = asyncio.create_task(self._report(call))
                    try:
                        await call.code()
                    finally:
                        heartbeats.cancel()
                        call.cancel()
                await asyncio.sleep(0.002)

    async def _report(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(registry_pb2.WorkerReport(load=common_pb2.WorkerLoad(slots_total=100)))
                await asyncio.sleep(0.3)

    def _introduction(self, address: str) -> registry_pb2.WorkerReport:
        number = next(self._numbers)
        introduction = registry_pb2.WorkerIntroduction(
            worker_id=f"evil-{number}",
            # One that has not been lost before.
            name=f"evil-{number}",
            role=registry_pb2.WORKER_ROLE_TARGET if self._is_target else registry_pb2.WORKER_ROLE_DRAFT,
            address=address,
            model=common_pb2.ModelInfo(
                name="evil", vocab_size=VOCAB_SIZE, tokenizer_hash=self._tokenizer_hash, max_model_len=MODEL_LEN
            ),
            limits=registry_pb2.WorkerLimits(max_sessions=8, max_tree_nodes=16, max_step_tokens=64),
        )
        return registry_pb2.WorkerReport(introduction=introduction)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        grower = _Grower()
        async for data in requests:
            if self._is_target:
                request = target_pb2.VerifyRequest.FromString(data)
                honest: Message | None = _verified(request) if request.step else None
            else:
                honest = grower.grown(draft_pb2.DraftCommands.FromString(data))
            if honest is None:
                continue
            if self._honest_left > 0 or self.fuzzer.random.random() < 0.5:
                self._honest_left -= 1
                yield honest.SerializeToString()
            else:
                self.sent.append(self.fuzzer.message([honest]))
                yield self.sent[-1]


def _verified(request: target_pb2.VerifyRequest) -> target_pb2.VerifyResponse:
    """Accepts the first node if it has no other parent than the root, and goes on with any token."""
    trees, places = request.trees, itertools.accumulate((0, *request.trees.node_counts))
    response = target_pb2.VerifyResponse(
        step=request.step,
        session_ids=trees.session_ids,
        epochs=trees.epochs,
        outcomes=[target_pb2.OUTCOME_ACCEPTED] * len(trees.session_ids),
        cached_tokens=[0] * len(trees.session_ids),
        report=common_pb2.StepReport(step_ns=100_000, forward_ns=50_000, tokens=1 + len(trees.tokens), sessions=1),
        load=common_pb2.WorkerLoad(sessions=1, slots_total=100),
    )
    for row, (length, count, place) in enumerate(zip(trees.lengths, trees.node_counts, places, strict=False)):
        accepted = min(count, 1)
        response.accepted_counts.append(accepted)
        response.accepted_nodes.extend([1] * accepted)
        tokens = [*trees.tokens[place : place + accepted], (length * 7) % VOCAB_SIZE]
        response.token_counts.append(len(tokens))
        response.tokens.extend(tokens)
        logprobs = response.logprobs.add(row=row, top_count=1, top_token_ids=tokens)
        logprobs.token_logprobs = logprobs.top_logprobs = floats_to_bytes([-1.0] * len(tokens))
    return response


class _Grower:
    """Answers every open and every commit with two nodes."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._lengths: dict[tuple[int, int], int] = {}

    def grown(self, commands: draft_pb2.DraftCommands) -> draft_pb2.DraftGrowth | None:
        for opening in commands.opens:
            length = (len(opening.prompt) + len(opening.output)) // 4
            self._lengths[opening.session_id, opening.epoch] = length
        batch = commands.commits
        for session_id, epoch, position, count in zip(
            batch.session_ids, batch.epochs, batch.positions, batch.token_counts, strict=True
        ):
            self._lengths[session_id, epoch] = position + count
        for key in zip(commands.close_session_ids, commands.close_epochs, strict=True):
            self._lengths.pop(key, None)
        if not self._lengths:
            return None
        growth = draft_pb2.DraftGrowth(
            report=common_pb2.StepReport(step_ns=100_000), load=common_pb2.WorkerLoad(sessions=len(self._lengths))
        )
        for (session_id, epoch), length in self._lengths.items():
            first, second = next(self._ids), next(self._ids)
            growth.session_ids.append(session_id)
            growth.epochs.append(epoch)
            growth.as_of.append(length)
            growth.node_counts.append(2)
            growth.complete.append(True)
            growth.node_ids.extend((first, second))
            growth.parents.extend((0, first))
            growth.tokens.extend((length % VOCAB_SIZE, 7))
        growth.acceptance = floats_to_bytes([0.9] * len(growth.tokens))
        return growth


def evil_request(number: int, kind: EvilKind) -> bytes:
    """What is asked while the worker is evil; even and odd ones are always the same, but for how they speculate."""
    sync = number % 3 == 0
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling_params=generation_pb2.SamplingParams(
            max_new_tokens=8, temperature=1.0, seed=3, n=1 + number % 2, logprobs=1, ignore_eos=True
        ),
        speculation=generation_pb2.SpeculationParams(
            mode=common_pb2.SPECULATION_MODE_SYNC if sync and kind.is_target else common_pb2.SPECULATION_MODE_ASYNC
        ),
        trace=number % 2 == 0,
    )
    return request.SerializeToString()
