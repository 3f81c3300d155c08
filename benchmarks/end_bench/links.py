"""Proxies between a coordinator and its workers, which make each link's round trips longer."""

from __future__ import annotations

import asyncio
import selectors
import threading
from typing import Self

from benchmarks.faults.proxy import Conditions, Proxy

from outrider.roles.ports import free_port

# Where workers listen, and where coordinators dial them: the same port of another address of this machine.
LISTENING, PROXIED = "127.0.0.1", "127.0.0.2"
_PATIENCE_S = 5.0


class Links:
    """Proxies of all workers, in a thread of their own; use with `with`."""

    def __init__(self) -> None:
        # Others round what they wait to whole milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._proxies: list[tuple[str, Proxy]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _role, proxy in self._proxies:
            asyncio.run_coroutine_threadsafe(proxy.close(), self._loop).result(_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, role: str) -> list[str]:
        """Start the proxy of a worker; return the worker's options: where it listens, and where it is dialled."""
        port = free_port(LISTENING)
        proxy = Proxy((LISTENING, port), listen=(PROXIED, port))
        self._proxies.append((role, proxy))
        asyncio.run_coroutine_threadsafe(proxy.start(), self._loop).result(_PATIENCE_S)
        return ["--port", str(port), "--advertised-host", PROXIED]

    def lengthen(self, link: str, added_ms: float) -> None:
        """Make round trips to the workers of a role longer, and those to all others as they are by themselves.

        Args:
            link: role of the workers; "" for none.
            added_ms: to each round trip, half of it each way.
        """
        self._loop.call_soon_threadsafe(self._set, link, added_ms / 2e3)

    def _set(self, link: str, delay_s: float) -> None:
        for role, proxy in self._proxies:
            proxy.conditions = Conditions(delay_s=delay_s if role == link else 0.0)
