"""The process that speaks gRPC for a worker: `python -m outrider.front.process CONTROL DATA`.

CONTROL and DATA are its ends of two socket pairs to the process whose thread owns the model. Serialised messages pass
through it as they are, so that all the work that gRPC takes is done by an interpreter of its own, and neither a draft's
step nor a target's round ever waits for it. It does what it is told by JSON lines on CONTROL, each of which it answers
with one, and ends when that closes: with the worker, however that ended.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import uvloop
from google.rpc import status_pb2

from outrider import tracing
from outrider.errors import CertificateError
from outrider.front.frames import Frame, FrameReader, Kind, pack_frame
from outrider.roles.log_output import log_to_stderr
from outrider.rpc import RoleServer, abort_with_status, add_methods
from outrider.security.tls import TlsConfig

_Outgoing = asyncio.Queue[bytes | status_pb2.Status | None]

# How a call ends that a worker which stops has not answered.
_STOPPING = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="the worker is stopping")


class Relay(asyncio.Protocol):
    """Calls of coordinators on one side, frames on the other.

    A coordinator may send without reading. A worker hears when messages of a stream wait, and when all have left. What
    the worker does not read is not read here.

    Args:
        methods: name of each method, and whether it is a stream both ways; the others have one message each way.
        most_waiting: messages of a stream that may wait here before the worker hears of it; writing takes its time
            where all is well, too.
    """

    def __init__(self, service: str, methods: Sequence[tuple[str, bool]], *, most_waiting: int) -> None:
        self._service, self._methods, self._most_waiting = service, methods, most_waiting
        self._transport: asyncio.WriteTransport | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._frames = FrameReader()
        self._numbers = itertools.count(1)
        # Of each call, what it is to be sent: messages, an error, None to end.
        self._outgoing: dict[int, _Outgoing] = {}
        self._held: set[int] = set()
        # What ends calls that come from now on; None as long as the worker serves.
        self._ending: status_pb2.Status | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service there, with messages as bytes."""
        handlers: dict[str, Any] = {}
        for place, (name, is_stream) in enumerate(self._methods):
            answer = functools.partial(self.stream if is_stream else self.unary, place)
            make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            handlers[name] = make(answer)
        add_methods(server, self._service, handlers)

    async def stream(
        self, method: int, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Pass on one coordinator's messages, and the answers to it, until it hangs up."""
        await self._refuse_late(context)
        with self._opened(method, context) as (number, outgoing):
            reader = asyncio.create_task(self._read(requests, number, outgoing))
            try:
                while (message := await self._next(outgoing, context)) is not None:
                    await context.write(message)
                    if number in self._held and outgoing.empty():
                        self._held.discard(number)
                        self._send(Kind.RESUMED, number)
            finally:
                reader.cancel()

    async def unary(self, method: int, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Pass on a message, and return the answer."""
        await self._refuse_late(context)
        with self._opened(method, context) as (number, outgoing):
            self._send(Kind.MESSAGE, number, request)
            answer = await self._next(outgoing, context)
        if answer is None:
            await abort_with_status(context, _STOPPING)
        return answer

    def end_calls(self, status: status_pb2.Status | None = None) -> None:
        """End all calls, open or yet to come, once their queued messages have left; with `status`, or in order."""
        self._ending = status or _STOPPING
        for outgoing in self._outgoing.values():
            outgoing.put_nowait(status)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the worker reads more slowly than coordinators write."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._has_room.set()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for frame in self._frames.feed(data):
            self._pass_on(frame)

    @contextlib.contextmanager
    def _opened(self, method: int, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[tuple[int, _Outgoing]]:
        """A call's number and what it is to be sent."""
        number = next(self._numbers)
        outgoing = self._outgoing[number] = asyncio.Queue()
        traceparent = tracing.received(context.invocation_metadata())
        self._send(Kind.OPENED, number, bytes([method]) + traceparent.encode())
        try:
            yield number, outgoing
        finally:
            del self._outgoing[number]
            self._held.discard(number)
            self._send(Kind.LEFT, number)

    async def _next(self, outgoing: _Outgoing, context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
        """The next message to a call; None to end it."""
        message = await outgoing.get()
        if isinstance(message, status_pb2.Status):
            await abort_with_status(context, message)
        return message

    async def _refuse_late(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """End a call that comes when all are to end, before the worker hears of it."""
        if self._ending is not None:
            await abort_with_status(context, self._ending)

    async def _read(self, requests: AsyncIterator[bytes], number: int, outgoing: _Outgoing) -> None:
        try:
            async for message in requests:
                await self._has_room.wait()
                self._send(Kind.MESSAGE, number, message)
        except Exception:  # noqa: BLE001 - whatever ends the call has been told to its coordinator
            outgoing.put_nowait(None)
        else:
            # Not ended here: what was said may be refused yet.
            self._send(Kind.DONE, number)

    def _pass_on(self, frame: Frame) -> None:
        kind, number, payload = frame
        # Not there: the call has ended meanwhile.
        if (outgoing := self._outgoing.get(number)) is None:
            return
        if kind is Kind.ANSWER:
            outgoing.put_nowait(payload)
            if outgoing.qsize() > self._most_waiting and number not in self._held:
                self._held.add(number)
                self._send(Kind.HELD, number)
        else:
            outgoing.put_nowait(None if kind is Kind.ENDED else status_pb2.Status.FromString(payload))

    def _send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        assert self._transport is not None
        self._transport.write(pack_frame(kind, number, payload))


class _Control:
    """The worker's orders, and the answers to them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def next(self) -> Any:
        """Return the next order; end the process where nobody is left to give one, or to say goodbye to."""
        line = await self._reader.readline()
        if not line:
            os._exit(1)
        return json.loads(line)

    def answer(self, **fields: Any) -> None:
        """One line."""
        self._writer.write(json.dumps(fields).encode() + b"\n")


async def _serve(control_socket: socket.socket, data: socket.socket) -> None:
    # Otherwise grpc.aio waits, with the last channel that is closed, for operations that may never come to their end.
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
    control = _Control(*await asyncio.open_connection(sock=control_socket))
    setup = await control.next()
    log_to_stderr(setup["log_level"], setup["log_format"], role=setup["role"])
    service = setup["service"]
    relay = Relay(service, setup["methods"], most_waiting=setup["most_waiting"])
    await asyncio.get_running_loop().create_connection(lambda: relay, sock=data)
    tls = None if setup["tls"] is None else TlsConfig(**{name: Path(path) for name, path in setup["tls"].items()})
    try:
        server = RoleServer(services=[service], add_services=relay.add_to, address=setup["address"], tls=tls)
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
        # Until calls may end.
        status = (await control.next())["status"]
        relay.end_calls(None if status is None else status_pb2.Status.FromString(b64decode(status)))

    await server.stop(drain=drain)
    control.answer()


def main() -> None:
    """Serve until it is told to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Whoever tells every process of a service means the worker, which drains by way of this one.
        signal.signal(number, signal.SIG_IGN)
    ends = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3]]
    for end in ends:
        end.set_inheritable(False)
    uvloop.run(_serve(*ends))


if __name__ == "__main__":
    main()
