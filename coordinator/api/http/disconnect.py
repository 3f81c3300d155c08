"""Ends what is done for a client once the client has gone."""

import asyncio
from types import TracebackType
from typing import Any, Self


class UntilDisconnect:
    """A block that is cancelled, and left in silence, when the client disconnects.

    Args:
        receive: of ASGI; the request's body has been read from it.
    """

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._is_gone = self._is_answered = False

    def answered(self) -> None:
        """To be called before the end of the response is sent: what ends then is no disconnection."""
        self._is_answered = True

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch(), name="http disconnect")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_answered = True
        self._watcher.cancel()
        # Cancelled by somebody else as well: that goes on.
        return self._is_gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:
            self._is_gone = True
            self._task.cancel()
