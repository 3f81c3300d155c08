"""An event loop whose time jumps to the next timer instead of waiting for it.

What runs on it takes no time at all, so a simulation is exact: the same on every machine, busy or not, and as fast as
its Python. The coordinator's clock is replaced while it runs.
"""

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from math import ceil
from typing import Any, TypeVar

from outrider.coordinator import clock

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Nothing of a simulation waits for files: where the loop would sleep, time goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and for nothing that will happen")
            self.now_ns += ceil(max(timeout, 0.0) * 1e9)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at time 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds, as asyncio asks for them."""
        return self._jumping.now_ns / 1e9

    def time_ns(self) -> int:
        """The same in whole nanoseconds."""
        return self._jumping.now_ns


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs it from time 0 on, and gives what it returns."""
    loop = VirtualTimeLoop()
    # Trees are many objects that die young: Python's collector would look through them again and again.
    thresholds = gc.get_threshold()
    gc.set_threshold(300_000)
    try:
        with clock.replaced_by(loop.time_ns), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
