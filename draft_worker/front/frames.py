"""What passes between a draft worker's two processes: frames over a socket pair, one a message of a stream.

The front process speaks gRPC, the growth thread speaks frames. A frame is a header, that is length of the payload, kind
and number of the stream, and the payload, which the front process does not look into.
"""

import struct
from enum import IntEnum

_HEADER = struct.Struct("<IBI")


class Kind(IntEnum):
    """Of a frame."""

    OPENED = 1
    """To the growth thread: a coordinator's stream; the payload is its traceparent, if any."""
    COMMANDS = 2
    """To the growth thread: a `DraftCommands`."""
    DONE = 3
    """To the growth thread: the coordinator has nothing more to say; to be answered with ENDED."""
    LEFT = 4
    """To the growth thread: the stream is gone."""
    GROWTH = 5
    """From the growth thread: a `DraftGrowth`."""
    REFUSED = 6
    """From the growth thread: the stream is to end; the payload is a `Status`."""
    ENDED = 7
    """From the growth thread: the stream is to end in order."""
    HELD = 8
    """To the growth thread: growth of this stream waits to be read; no more of it for now."""
    RESUMED = 9
    """To the growth thread: what waited has left."""


Frame = tuple[Kind, int, bytes]


def pack_frame(kind: Kind, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEADER.pack(len(payload), kind, stream) + payload


class FrameReader:
    """Puts frames together of the pieces in which they arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now, in order."""
        self._buffer += data
        frames, begin, size = [], 0, len(self._buffer)
        while size - begin >= _HEADER.size:
            length, kind, stream = _HEADER.unpack_from(self._buffer, begin)
            end = begin + _HEADER.size + length
            if end > size:
                break
            frames.append((Kind(kind), stream, bytes(self._buffer[begin + _HEADER.size : end])))
            begin = end
        del self._buffer[:begin]
        return frames
