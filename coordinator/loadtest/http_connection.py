"""One HTTP/1.1 connection that is kept between requests: h11 over asyncio's streams.

As little as a load generator needs: thousands of these are open at a time, and what one costs is what the client costs.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping

import h11

_READ_BYTES = 64 << 10


class HttpError(Exception):
    """The server answered with a status other than 200, or not in HTTP."""


class HttpConnection:
    """Connection to one server, one request at a time."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._state = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """True if another request can be sent."""
        return self._writer is not None and self._state.our_state is h11.IDLE and not self._writer.is_closing()

    @property
    def was_closed(self) -> bool:
        """True if the server closed it, as after an idle timeout."""
        return self._reader is not None and self._reader.at_eof()

    async def open(self) -> None:
        """Connect to the server.

        Raises:
            OSError: nobody listens there.
        """
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        """Send a request; yield the body as it comes.

        Raises:
            HttpError: the status is not 200, with what the server says.
            OSError: the connection broke.
        """
        assert self._reader is not None and self._writer is not None
        host = f"[{self._host}]" if ":" in self._host else self._host
        all_headers = {"host": f"{host}:{self._port}", "content-length": str(len(body)), **headers}
        messages = [
            h11.Request(method=method, target=path, headers=list(all_headers.items())),
            *([h11.Data(data=body)] if body else []),
            h11.EndOfMessage(),
        ]
        self._writer.write(b"".join(self._state.send(message) or b"" for message in messages))
        status, refusal = 0, b""
        try:
            while not isinstance(event := await self._next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    if status == 200:
                        yield bytes(event.data)
                    else:
                        refusal += bytes(event.data)
            if self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
                self._state.start_next_cycle()
        except h11.RemoteProtocolError as error:
            raise HttpError(f"the server broke off: {error}") from error
        if status != 200:
            raise HttpError(f"HTTP {status}: {refusal[:500].decode('utf-8', errors='replace')}")

    async def _next_event(self) -> h11.Event:
        assert self._reader is not None
        while (event := self._state.next_event()) is h11.NEED_DATA:
            self._state.receive_data(await self._reader.read(_READ_BYTES))
        if not isinstance(event, h11.Event):
            raise HttpError("the server has closed the connection")
        return event

    def close(self) -> None:
        """Close the connection, whatever it is doing."""
        if self._writer is not None:
            self._writer.close()


def server_sent_events(data: bytes, rest: bytes) -> tuple[list[bytes], bytes]:
    """The data of the events that are whole by now, and what of `data` begins the next."""
    *lines, rest = (rest + data).split(b"\n")
    return [line[5:].strip() for line in lines if line.startswith(b"data:")], rest
