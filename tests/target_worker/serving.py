"""A target that is served over loopback gRPC, with a tiny model behind it, and what a coordinator sees of it."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.polling import until
from tests.target_worker.rounds.driving import PROMPT, make_runner, rounds_of

from outrider import rpc
from outrider.front.calls import Call, Calls
from outrider.front.inbox import Inbox
from outrider.front.process import Relay
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.reload import Reloader
from outrider.target_worker.rounds.thread import RoundThread
from outrider.target_worker.service import SERVICE, ReloadCall, TargetStream
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes, uints_to_bytes

TAKEN, LEFT, RESENT = (
    target_pb2.PLACE_CHANGE_TAKEN,
    target_pb2.PLACE_CHANGE_LEFT,
    target_pb2.PLACE_CHANGE_RESENT,
)
SAMPLED = SamplingSpec(temperature=1.0, seed=5, max_new_tokens=24)


class Service:
    """A served target, and what a coordinator sees of it."""

    def __init__(self, checkpoint: Path, kind: type[RoundProgram]) -> None:
        self._checkpoint, self._kind = checkpoint, kind
        # What the front process runs, in this one.
        methods = [(method.name, method.client_streaming) for method in SERVICE.methods]
        self.relay = Relay(SERVICE.full_name, methods, most_waiting=4)
        self.server = rpc.RoleServer(
            services=[SERVICE.full_name], add_services=self.relay.add_to, address="127.0.0.1:0"
        )
        self._data, self._their_data = socket.socketpair()
        calls = Calls(self._data, SERVICE, {"Verify": self._verify, "Reload": self._reload})
        self._inbox = Inbox(self._data, calls.commands)
        self.thread = RoundThread(self.make_loop, self._inbox)
        self.reloader = Reloader(self.thread)

    def _verify(self, call: Call) -> TargetStream:
        return TargetStream(call, self.thread)

    def _reload(self, call: Call) -> ReloadCall:
        return ReloadCall(call, self.reloader, self._event_loop)

    def make_loop(self) -> RoundLoop:
        """Load the model; on the thread of the rounds."""
        runner = self.reloader.load(self._checkpoint, lambda: make_runner(self._checkpoint))
        return rounds_of(runner, kind=self._kind, chunk=8)[0]

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._transport, _ = await self._event_loop.create_connection(lambda: self.relay, sock=self._their_data)
        self.thread.start()
        await asyncio.wrap_future(self.thread.ready)
        await self.server.start()
        self.channel = rpc.open_channel(self.server.address)
        self.stub = target_pb2_grpc.TargetServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close(None)
        await self.server.stop(grace_s=0)
        self.thread.stop()
        try:
            await asyncio.wrap_future(self.thread.stopped)
        finally:
            self._transport.close()
            self._data.close()
            self._inbox.close()

    async def until_empty(self) -> None:
        await until(lambda: not self.thread.load.sessions and not self.thread.load.slots_used)


class Coordinator:
    """One stream to a target: what it was given, by (session, epoch)."""

    def __init__(self, service: Service, *, incarnation: int = 7) -> None:
        self.incarnation = incarnation
        self.call: Any = service.stub.Verify(timeout=120)
        self.messages: list[target_pb2.RoundResults] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finishes: dict[tuple[int, int], int] = {}
        self.errors: dict[tuple[int, int], common_pb2.SessionError] = {}
        self.selected: dict[int, list[int]] = {}
        self.lost: list[tuple[int, int]] = []
        self._node_ids = 1

    async def send(self, **fields: Any) -> None:
        await self.call.write(target_pb2.RoundCommands(incarnation=self.incarnation, **fields))

    async def open(
        self,
        number: int,
        spec: SamplingSpec,
        *,
        epoch: int = 1,
        prompt: Sequence[int] = PROMPT,
        allow: int = WITHOUT_LIMIT,
        weights: str = "",
        growth: target_pb2.RelayedGrowth | None = None,
        **limits: Any,
    ) -> None:
        opening = common_pb2.SessionOpen(
            session_id=number,
            epoch=epoch,
            prompt=uints_to_bytes(prompt),
            sampling=spec.to_proto(),
            weights=weights,
            limits=common_pb2.SpeculationLimits(**limits),
        )
        bounds = target_pb2.SessionBounds(session_ids=[number], epochs=[epoch], allow=[allow])
        await self.send(opens=[opening], bounds=bounds, growth=growth)

    async def change(self, number: int, place: int, change: Any, *, epoch: int = 1) -> None:
        changes = target_pb2.PlaceChanges(session_ids=[number], epochs=[epoch], places=[place], changes=[change])
        await self.send(places=changes)

    async def bound(self, number: int, allow: int, *, alone: bool = False, epoch: int = 1) -> None:
        bounds = target_pb2.SessionBounds(session_ids=[number], epochs=[epoch], allow=[allow], alone=[alone])
        await self.send(bounds=bounds)

    async def close(self, number: int, *, epoch: int = 1) -> None:
        await self.send(close_session_ids=[number], close_epochs=[epoch])

    def growth(
        self, number: int, tree: tuple[list[int], list[int]], length: int, *, complete: bool = False, **fields: Any
    ) -> target_pb2.RelayedGrowth:
        """A tree with node ids of its own."""
        tokens, parents = tree
        ids = [0, *range(self._node_ids, self._node_ids + len(tokens))]
        self._node_ids += len(tokens)
        columns: dict[str, Any] = {
            "session_ids": [number],
            "epochs": [1],
            "places": [0],
            "as_of": [length],
            "node_counts": [len(tokens)],
            "node_ids": uints_to_bytes(ids[1:]),
            "parents": uints_to_bytes([ids[parent] for parent in parents]),
            "tokens": uints_to_bytes(tokens),
            "acceptance": floats_to_bytes([0.9] * len(tokens)),
            "complete": [complete],
        }
        return target_pb2.RelayedGrowth(**columns | fields)

    async def read(self) -> target_pb2.RoundResults:
        """The next message, taken note of."""
        async with asyncio.timeout(60):
            message: Any = await self.call.read()
        assert isinstance(message, target_pb2.RoundResults), message
        self.messages.append(message)
        assert len(set(message.session_ids)) == len(message.session_ids)
        first = 0
        for row, key in enumerate(zip(message.session_ids, message.epochs, strict=True)):
            count = message.token_counts[row]
            self.tokens.setdefault(key, []).extend(message.tokens[first : first + count])
            first += count
            self.selected.setdefault(key[0], []).append(message.selected_counts[row])
            if message.finishes[row]:
                self.finishes[key] = message.finishes[row]
            if message.lost[row]:
                self.lost.append((key[0], message.lost[row]))
        assert sum(message.accepted_counts) == len(message.accepted_sources)
        for error in message.errors:
            self.errors[error.session_id, error.epoch] = error
        return message

    async def read_until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            await self.read()

    async def finish(self, *numbers: int, epoch: int = 1) -> None:
        await self.read_until(lambda: all((number, epoch) in self.finishes for number in numbers))
