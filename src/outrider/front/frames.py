"""Frames between a worker's two processes: over a socket pair, one a message of a call.

The front process speaks gRPC, the thread that owns the model speaks frames. A frame is a header, that is length of the
payload, kind and number of the call, and the payload, which the front process does not look into.
"""

import struct
from enum import IntEnum

_HEADER = struct.Struct("<IBI")


class Kind(IntEnum):
    """Kind of a frame."""

    OPENED = 1
    """To the thread: a coordinator calls; the payload is the method's place among the service's, in one byte, and the
    call's traceparent, if any."""
    MESSAGE = 2
    """To the thread: a message of the coordinator's."""
    DONE = 3
    """To the thread: the coordinator has nothing more to say; to be answered with ENDED."""
    LEFT = 4
    """To the thread: the call is gone."""
    HELD = 5
    """To the thread: answers of this call wait to be read; no more of them for now."""
    RESUMED = 6
    """To the thread: what waited has left."""
    ANSWER = 7
    """From the thread: a message to the coordinator."""
    REFUSED = 8
    """From the thread: the call is to end; the payload is a `Status`."""
    ENDED = 9
    """From the thread: the call is to end in order."""


Frame = tuple[Kind, int, bytes]


def pack_frame(kind: Kind, call: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return _HEADER.pack(len(payload), kind, call) + payload


class FrameReader:
    """Puts frames together of the pieces in which they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole now, in order."""
        self._buffer += data
        frames, begin, size = [], 0, len(self._buffer)
        while size - begin >= _HEADER.size:
            length, kind, call = _HEADER.unpack_from(self._buffer, begin)
            end = begin + _HEADER.size + length
            if end > size:
                break
            frames.append((Kind(kind), call, bytes(self._buffer[begin + _HEADER.size : end])))
            begin = end
        del self._buffer[:begin]
        return frames
