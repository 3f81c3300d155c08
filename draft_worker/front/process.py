"""The process that speaks gRPC for a draft worker: `python -m outrider.draft_worker.front.process CONTROL DATA`.

CONTROL and DATA are its ends of two socket pairs to the process whose thread grows trees. Serialised messages pass
through it as they are, so that all the work that gRPC takes is done by an interpreter of its own, and a growth step
never waits for it. It does what it is told by JSON lines on CONTROL, each of which it answers with one, and ends when
that closes: with the worker, however that ended.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import uvloop
from google.rpc import status_pb2
from grpc_status import rpc_status

from outrider import tracing
from outrider.draft_worker.front.frames import Frame, FrameReader, Kind, pack_frame
from outrider.errors import CertificateError
from outrider.log_output import log_to_stderr
from outrider.rpc import RoleServer
from outrider.security.tls import TlsConfig
from outrider.v1 import draft_pb2

_Outgoing = asyncio.Queue[bytes | status_pb2.Status | None]
_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
# Messages of a stream that may wait here before its sessions rest: what steps of some ten milliseconds have grown.
# Writing takes its time where all is well, too.
_MOST_WAITING = 16


class Relay(asyncio.Protocol):
    """Streams of coordinators on one side, frames on the other.

    A coordinator may commit and yet not read: results come before growth, and every commit gives credit back. What it
    reads late is of commits long past, and costs it as much. So where a stream is not read, its sessions rest until
    what waits has left: what they grow then follows from the last commit.
    """

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._frames = FrameReader()
        self._numbers = itertools.count(1)
        # Of each stream, what it is to be sent: messages, an error, None to end.
        self._outgoing: dict[int, _Outgoing] = {}
        self._held: set[int] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offers the service there, with messages as bytes."""
        handler = grpc.stream_stream_rpc_method_handler(self.speculate)  # pyright: ignore[reportArgumentType] - async
        server.add_generic_rpc_handlers((
            grpc.method_handlers_generic_handler(_SERVICE.full_name, {_SERVICE.methods[0].name: handler}),
        ))  # fmt: skip

    async def speculate(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One coordinator's commands in and growth out, until it hangs up."""
        number = next(self._numbers)
        outgoing = self._outgoing[number] = asyncio.Queue()
        self._send(Kind.OPENED, number, tracing.received(context.invocation_metadata()).encode())
        reader = asyncio.create_task(self._read(requests, number, outgoing))
        try:
            while (message := await outgoing.get()) is not None:
                if isinstance(message, status_pb2.Status):
                    await context.abort_with_status(rpc_status.to_status(message))  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
                await context.write(message)
                if number in self._held and outgoing.empty():
                    self._held.discard(number)
                    self._send(Kind.RESUMED, number)
        finally:
            reader.cancel()
            del self._outgoing[number]
            self._held.discard(number)
            self._send(Kind.LEFT, number)

    def end_streams(self) -> None:
        """Lets every stream end after what it has to send."""
        for outgoing in self._outgoing.values():
            outgoing.put_nowait(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for frame in self._frames.feed(data):
            self._pass_on(frame)

    async def _read(self, requests: AsyncIterator[bytes], number: int, outgoing: _Outgoing) -> None:
        try:
            async for message in requests:
                self._send(Kind.COMMANDS, number, message)
        except Exception:  # noqa: BLE001 - whatever ends the call has been told to its coordinator
            outgoing.put_nowait(None)
        else:
            # Not ended here: what was said may be refused yet.
            self._send(Kind.DONE, number)

    def _pass_on(self, frame: Frame) -> None:
        kind, number, payload = frame
        # Not there: the stream has ended meanwhile.
        if (outgoing := self._outgoing.get(number)) is None:
            return
        if kind is Kind.GROWTH:
            outgoing.put_nowait(payload)
            if outgoing.qsize() > _MOST_WAITING and number not in self._held:
                self._held.add(number)
                self._send(Kind.HELD, number)
        else:
            outgoing.put_nowait(None if kind is Kind.ENDED else status_pb2.Status.FromString(payload))

    def _send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        assert self._transport is not None
        self._transport.write(pack_frame(kind, number, payload))


class _Control:
    """What the worker tells, and what it is answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def next(self) -> Any:
        """What it is told next; ends the process where nobody is left to tell anything, or to say goodbye to."""
        line = await self._reader.readline()
        if not line:
            os._exit(1)
        return json.loads(line)

    def answer(self, **fields: Any) -> None:
        """One line."""
        self._writer.write(json.dumps(fields).encode() + b"\n")


async def _serve(control_socket: socket.socket, data: socket.socket) -> None:
    # Otherwise grpc.aio waits, with the last channel that is closed, for operations that may never come to their end.
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue]
    control = _Control(*await asyncio.open_connection(sock=control_socket))
    setup = await control.next()
    log_to_stderr(setup["log_level"], setup["log_format"], role="draft")
    relay = Relay()
    await asyncio.get_running_loop().create_connection(lambda: relay, sock=data)
    tls = None if setup["tls"] is None else TlsConfig(**{name: Path(path) for name, path in setup["tls"].items()})
    try:
        server = RoleServer(services=[_SERVICE.full_name], add_services=relay.add_to, address=setup["address"], tls=tls)
    except (OSError, CertificateError) as error:
        control.answer(error=str(error), is_certificate=isinstance(error, CertificateError))
        return
    control.answer(address=server.address)
    if await control.next() == "serve":
        await server.start()
        control.answer()
        # Until it is told to leave.
        await control.next()

    async def drain() -> None:
        control.answer()
        # Until streams may end.
        await control.next()
        relay.end_streams()

    await server.stop(drain=drain)
    control.answer()


def main() -> None:
    """Serves until it is told to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Whoever tells every process of a service means the worker, which drains by way of this one.
        signal.signal(number, signal.SIG_IGN)
    ends = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3]]
    for end in ends:
        end.set_inheritable(False)
    uvloop.run(_serve(*ends))


if __name__ == "__main__":
    main()
