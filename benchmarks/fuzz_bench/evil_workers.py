"""The other direction: workers that answer the coordinator with messages that nobody should send.

Three kinds: the results of a target's rounds, a draft's trees, and the heartbeats of a draft whose trees are honest. An
evil target may choose any token, so what it sends is held against the rules of a stream alone; beside an evil draft the
tokens are those of the honest target.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from benchmarks.fuzz_bench.honest_answers import Decoder, Grower, heartbeat, introduction
from benchmarks.fuzz_bench.messages import MessageFuzzer
from benchmarks.fuzz_bench.tiny_service import PROMPT
from google.protobuf.message import Message

from outrider.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS
from outrider.v1 import common_pb2, draft_pb2, generation_pb2, registry_pb2, target_pb2

# Messages that are remembered for a finding.
_REMEMBERED = 16
_HEARTBEAT_S = 0.3
# Between heartbeats that are the point.
_EVIL_HEARTBEAT_S = 0.003
# Between rounds of an evil target.
_ROUND_S = 0.003


@dataclass(frozen=True, kw_only=True)
class EvilKind:
    """Kind of messages to fuzz.

    Attributes:
        name: of the message.
        message_type: its class.
        is_target: whether the worker that sends it verifies; else it drafts, beside an honest target.
        codes: that requests may end with.
    """

    name: str
    message_type: type[Message]
    is_target: bool
    codes: frozenset[str]

    @property
    def has_target(self) -> bool:
        """True if there is an honest target."""
        return not self.is_target


EVIL_KINDS = (
    EvilKind(
        name="RoundResults",
        message_type=target_pb2.RoundResults,
        is_target=True,
        codes=frozenset({"OK", "UNAVAILABLE", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
    ),
    EvilKind(name="DraftGrowth", message_type=draft_pb2.DraftGrowth, is_target=False, codes=frozenset({"OK"})),
    EvilKind(name="WorkerReport", message_type=registry_pb2.WorkerReport, is_target=False, codes=frozenset({"OK"})),
)


class EvilMessages:
    """Messages of all evil workers of a run, which therefore stop together.

    Attributes:
        kind: of the messages.
        sent: so far.
        last: the last ones.
    """

    def __init__(self, kind: EvilKind, *, seed: int) -> None:
        self.kind, self.sent = kind, 0
        self.last: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._fuzzer = MessageFuzzer(kind.message_type, seed=seed)

    def turns(self) -> Iterator[bool]:
        """Yield for each message of a stream whether it is evil: a few at first are not, then every other one is."""
        yield from [False] * self._fuzzer.random.choice((0, 0, 1, 2))
        while True:
            yield self._fuzzer.random.random() >= 0.5

    def of(self, honest: Message) -> bytes:
        """One that is to be sent instead of this."""
        data = self._fuzzer.message([honest])
        self.sent += 1
        self.last.append(data)
        return data


class EvilWorker:
    """A worker that answers honestly for a while, then every other time; it registers again and again."""

    # Of all of them: a name that has been lost before would be left alone for a while.
    _numbers = itertools.count(1)

    def __init__(self, coordinator: str, messages: EvilMessages, *, tokenizer_hash: str) -> None:
        self._coordinator, self._messages, self._tokenizer_hash = coordinator, messages, tokenizer_hash
        self._is_target = messages.kind.is_target
        self._beats = messages.kind.message_type is registry_pb2.WorkerReport

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen, and keep registering."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        service, method = ("TargetService", "Verify") if self._is_target else ("DraftService", "Speculate")
        handler = grpc.stream_stream_rpc_method_handler(self._verify if self._is_target else self._speculate)
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
        path = "/outrider.v1.RegistryService/Register"
        async with grpc.aio.insecure_channel(self._coordinator, options=CHANNEL_OPTIONS) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    call = channel.stream_stream(path)()
                    hello = introduction(
                        next(self._numbers),
                        address=address,
                        is_target=self._is_target,
                        tokenizer_hash=self._tokenizer_hash,
                    )
                    await call.write(hello.SerializeToString())
                    await call.read()
                    heartbeats = asyncio.create_task(self._report(call))
                    try:
                        await call.code()
                    finally:
                        heartbeats.cancel()
                        call.cancel()
                await asyncio.sleep(0.002)

    async def _report(self, call: Any) -> None:
        turns = self._messages.turns() if self._beats else itertools.repeat(False)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for number, is_evil in enumerate(turns):
                honest = heartbeat(number)
                await call.write(self._messages.of(honest) if is_evil else honest.SerializeToString())
                await asyncio.sleep(_EVIL_HEARTBEAT_S if self._beats else _HEARTBEAT_S)

    async def _verify(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        turns, decoder = self._messages.turns(), Decoder()

        async def hear() -> None:
            async for data in requests:
                decoder.take(target_pb2.RoundCommands.FromString(data))

        hearing = asyncio.create_task(hear())
        try:
            while not hearing.done():
                if (honest := decoder.round()) is not None:
                    yield self._messages.of(honest) if next(turns) else honest.SerializeToString()
                await asyncio.sleep(_ROUND_S)
        finally:
            hearing.cancel()

    async def _speculate(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        turns, grower = itertools.repeat(False) if self._beats else self._messages.turns(), Grower()
        async for data in requests:
            honest = grower.grown(draft_pb2.DraftCommands.FromString(data))
            if honest is not None:
                yield self._messages.of(honest) if next(turns) else honest.SerializeToString()


def evil_request(number: int, kind: EvilKind) -> bytes:
    """Return a request to send meanwhile; all even ones are equal, and all odd ones, but for speculation."""
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
