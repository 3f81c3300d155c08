"""Coordinators' calls as the thread that owns a worker's model sees them: frames in, commands out, answers back."""

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message

from outrider import rpc, tracing
from outrider.errors import InvalidRequest, OutriderError
from outrider.front.frames import FrameReader, Kind, pack_frame
from outrider.request_decoding import decode

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
CommandT_co = TypeVar("CommandT_co", covariant=True)


class Call:
    """The way back to whoever has called; any thread may use it.

    Args:
        traceparent: that it came with; empty where it came with none.
    """

    def __init__(self, calls: "Calls[Any]", number: int, traceparent: str) -> None:
        self._calls, self._number = calls, number
        self.traceparent = traceparent

    def answer(self, message: Message) -> None:
        """Send a message."""
        self._calls.send(Kind.ANSWER, self._number, message.SerializeToString())

    def refuse(self, error: OutriderError) -> None:
        """End the call with an error."""
        self._calls.send(Kind.REFUSED, self._number, rpc.status_of(error).SerializeToString())


class CallHandler(Protocol[CommandT_co]):
    """Handler of one call; used on the thread that reads the frames."""

    def take(self, data: bytes) -> Sequence[CommandT_co]:
        """Return the commands of a message."""
        ...

    def hold(self, *, is_held: bool) -> Sequence[CommandT_co]:
        """Return the commands that follow from a caller that does not read what it was sent, or reads on."""
        ...

    def leave(self) -> Sequence[CommandT_co]:
        """Return the commands that follow from the call's end."""
        ...


class Calls(Generic[CommandT]):
    """The calls of all coordinators.

    Args:
        data: the socket to the front process.
        handlers: by method name, makes what handles a call.
    """

    def __init__(
        self,
        data: socket.socket,
        service: ServiceDescriptor,
        handlers: Mapping[str, Callable[[Call], CallHandler[CommandT]]],
    ) -> None:
        self._data = data
        self._methods = [handlers[method.name] for method in service.methods]
        self._frames = FrameReader()
        self._handlers: dict[int, CallHandler[CommandT]] = {}
        # Frames of two threads must not mix.
        self._sending = threading.Lock()

    def commands(self, data: bytes) -> list[CommandT]:
        """Return what coordinators want, of the bytes that have arrived."""
        found: list[CommandT] = []
        for kind, number, payload in self._frames.feed(data):
            if kind is Kind.OPENED:
                self._handlers[number] = self._methods[payload[0]](Call(self, number, payload[1:].decode()))
            elif kind is Kind.MESSAGE:
                found += self._handlers[number].take(payload)
            elif kind is Kind.DONE:
                self.send(Kind.ENDED, number)
            elif kind is Kind.LEFT:
                found += self._handlers.pop(number).leave()
            else:
                found += self._handlers[number].hold(is_held=kind is Kind.HELD)
        return found

    def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        """Hand a frame over."""
        try:
            with self._sending:
                self._data.sendall(pack_frame(kind, number, payload))
        except OSError as error:
            # The front process is gone, and with it whoever would have read this; its end ends this process, too.
            logger.debug("an answer to a call that is gone dropped: %s", error)


class SessionStream(ABC, Generic[CommandT]):
    """A coordinator's stream of commands for its sessions; a `CallHandler`.

    Args:
        role: of the worker, as traces name it.
        message_type: of its messages, which tell of opens and closes as `DraftCommands` and `RoundCommands` do.
    """

    def __init__(self, call: Call, role: str, message_type: Descriptor) -> None:
        self.call = call
        self.traces = tracing.session_traces(role, [(tracing.HEADER, call.traceparent)])
        self._message_type = message_type
        self._is_refused = False

    @abstractmethod
    def unpack(self, message: Any) -> Sequence[CommandT]:
        """Return the commands of a message, in the order in which they take effect.

        Raises:
            InvalidRequest: columns that leave open what belongs to whom; the stream is to end.
        """

    @abstractmethod
    def hold(self, *, is_held: bool) -> Sequence[CommandT]:
        """See `CallHandler`."""

    def take(self, data: bytes) -> Sequence[CommandT]:
        """See `CallHandler`; where it is no message, the stream ends."""
        if self._is_refused:
            return []
        try:
            message: Any = decode(self._message_type, data)
            if isinstance(message, InvalidRequest):
                raise message
            commands = self.unpack(message)
        except InvalidRequest as error:
            self._is_refused = True
            self.call.refuse(error)
            return []
        if self.traces is not None:
            for opened in message.opens:
                self.traces.opened(opened.session_id, opened.epoch, opened.traceparent)
            for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
                self.traces.closed(session_id, epoch)
        return commands

    def leave(self) -> Sequence[CommandT]:
        """See `CallHandler`."""
        if self.traces is not None:
            self.traces.end()
        return []
