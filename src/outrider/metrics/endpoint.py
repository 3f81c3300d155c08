"""The port on which Prometheus reads a role that has no HTTP server: a thread of its own, off unless it is asked for.

Beyond loopback it takes TLS, and then whoever reads has to show a certificate of the same authority.
"""

import asyncio
import contextlib
import logging
import ssl
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client

from outrider.metrics.families import Describe, Families, registry_of
from outrider.security.binding import missing_protection
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

# A role that does not answer so long is not read this time.
_READ_TIMEOUT_S = 5.0
# A connection that says nothing so long is closed.
_SILENCE_S = 10.0


class _Connection(WSGIRequestHandler):
    """One that ends if it says nothing, or breaks; nothing of it is logged."""

    timeout = _SILENCE_S

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - the name is the base's
        pass


class MetricsEndpoint:
    """Serves `/metrics`.

    Args:
        describe: the role's values; called in the thread that serves unless `on_loop` has wrapped it.
        port: 0 takes a free one.
        tls: None serves in the clear.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, describe: Describe, *, host: str, port: int, tls: TlsConfig | None = None) -> None:
        secured: dict[str, Any] = {}
        if tls is not None:
            secured = {
                "certfile": str(tls.certificate),
                "keyfile": str(tls.key),
                "client_cafile": str(tls.ca),
                "client_auth_required": True,
            }
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, host, registry=registry_of(describe), **secured
            )
        except OSError as error:
            raise OSError(f"cannot serve metrics on {host}:{port}: {error}; choose another metrics_port") from error
        self._server.RequestHandlerClass = _Connection
        if isinstance(self._server.socket, ssl.SSLSocket):
            # Each connection's thread shakes hands: the one that accepts would wait for whoever connects and says
            # nothing, and all who read, and the end of the process, for that one.
            self._server.socket.do_handshake_on_connect = False  # pyright: ignore[reportAttributeAccessIssue] it is there
        if missing_protection(host, {"tls_ca": tls}):
            logger.warning("INSECURE: metrics on %s are served to whoever comes, unencrypted", host)
        self.address = f"{host}:{self._server.server_port}"
        """host:port that is bound."""
        logger.info("metrics on http%s://%s/metrics", "s" if tls else "", self.address)

    async def close(self) -> None:
        """End the server and its thread."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def on_loop(describe: Describe, loop: asyncio.AbstractEventLoop) -> Describe:
    """Serve values of an event loop: they are read on the loop, and formatted on the endpoint's thread."""

    async def describe_there(families: Families) -> None:
        describe(families)

    def read(families: Families) -> None:
        asyncio.run_coroutine_threadsafe(describe_there(families), loop).result(timeout=_READ_TIMEOUT_S)

    return read
