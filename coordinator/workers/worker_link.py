"""A stream to a worker: reader and writer apart.

A link owns one long-lived bidirectional stream. Two ends that both write before they read would block each other, so
on every link one task reads and one writes. A message that finds nothing being written is begun by whoever has it
(`_flush`), up to where its stream would wait: the writer goes on from there.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from outrider import rpc
from outrider.errors import WorkerUnavailable
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

CommandsT = TypeVar("CommandsT")


class Begun:
    """Runs a coroutine at once until it waits for something, or ends; who awaits this goes on from there, once.

    Attributes:
        is_over: it has ended, without an error; an error that came at once is raised to who awaits.
    """

    def __init__(self, work: Coroutine[Any, None, None]) -> None:
        self._work = work
        self._waited_for: Any = None
        self._error: BaseException | None = None
        self.is_over = False
        try:
            self._waited_for = work.send(None)
        except StopIteration:
            self.is_over = True
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - who awaits gets it
            self._error = error

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is not None:
            raise self._error
        while not self.is_over:
            try:
                try:
                    sent = yield self._waited_for
                except BaseException as error:  # noqa: BLE001 - above all that the task has been cancelled
                    self._waited_for = self._work.throw(error)
                else:
                    self._waited_for = self._work.send(sent)
            except StopIteration:
                self.is_over = True


class Latency:
    """A running mean of a time."""

    def __init__(self) -> None:
        self.mean_ns = 0.0

    def observe(self, elapsed_ns: float) -> None:
        """Take one measured time."""
        # A pause of the whole machine counts as twice the mean at most.
        error_ns = min(elapsed_ns, 2 * self.mean_ns) - self.mean_ns if self.mean_ns else 8 * elapsed_ns
        self.mean_ns += error_ns / 8


class WorkerLink(Generic[CommandsT]):
    """Shared part of links to targets and to drafts: channel, the two tasks, and one notice when the stream is lost.

    Attributes:
        step_latency: of the worker's steps, as it tells them.
    """

    unread_bytes: int | None = None
    """Bytes that the worker may send beyond those read, about; None: megabytes."""

    def __init__(self, address: str, *, tls: TlsConfig | None, role: Role, on_lost: Callable[[str], None]) -> None:
        self.address = address
        # Whatever answers at the address that a worker named has to prove that it is one.
        self._channel = rpc.open_channel(address, tls=tls, peer=role, unread_bytes=self.unread_bytes)
        self._on_lost = on_lost
        self._tasks: list[asyncio.Task[None]] = []
        self.step_latency = Latency()
        self._outgoing: list[CommandsT] = []
        self._outgoing_ready = asyncio.Event()
        self._begun: Begun | None = None
        """A write that `_flush` has begun, and the writer has not taken over yet."""
        self._is_writing = False
        self.is_lost = False

    def _start(self, call: "grpc.aio.StreamStreamCall") -> None:
        self._call = call
        for work in (self._read(), self._write()):
            self._tasks.append(asyncio.create_task(self._guard(work)))

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
            reason = "the worker closed the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError as error:
            reason = str(error)
        except (ValueError, IndexError) as error:
            reason = f"the worker sent a message that cannot be used: {error}"
        except Exception as error:
            # Whatever it is, whoever waits on this link has to hear of it.
            logger.exception("the stream to %s failed", self.address)
            reason = f"{type(error).__name__}: {error}"
        if not self.is_lost:
            self.is_lost = True
            self._on_lost(reason)

    async def _read(self) -> None:
        raise NotImplementedError

    async def _write(self) -> None:
        while True:
            await self._outgoing_ready.wait()
            self._outgoing_ready.clear()
            self._is_writing = True
            if self._begun is not None:
                await self._begun
                self._begun = None
            await self._write_all(self._take_outgoing())
            self._is_writing = False

    async def _write_all(self, messages: Sequence[CommandsT]) -> None:
        for message in messages:
            await self._call.write(message)

    def _flush(self) -> None:
        """Begin to write what is there at once, unless the writer is at it: its turn of the event loop is later."""
        if self.is_lost or self._is_writing or self._begun is not None:
            return
        begun = Begun(self._write_all(self._take_outgoing()))
        if not begun.is_over:
            # Whatever the stream says of it is said to the writer.
            self._begun = begun
            self._outgoing_ready.set()

    def _take_outgoing(self) -> list[CommandsT]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    async def ready(self, *, timeout_s: float) -> None:
        """Wait until the worker answers.

        Raises:
            WorkerUnavailable: it does not in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise WorkerUnavailable(f"{self.address} did not answer within {timeout_s:g} s") from error

    async def close(self) -> None:
        """End the stream; the worker closes the sessions that came over it."""
        self.is_lost = True
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        if (call := getattr(self._call, "_cython_call", None)) is not None:
            # Once a write has failed grpc.aio takes its call for done, and cancels nothing: it would live as long as
            # its connection, here and at the worker.
            call.cancel("the link is closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)
