"""A coroutine that runs up to its first wait at once, in place of behind what else the event loop has to do."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class Begun:
    """Runs a coroutine until it waits for something, or ends; who awaits this goes on from there, once.

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
