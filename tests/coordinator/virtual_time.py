"""An event loop whose time jumps to the next timer instead of waiting for it.

What runs on it takes next to no time, so a step of 2 ms is one of 2 ms however busy the machine is, and what is waited
for comes at once. The coordinator's clock is replaced for as long as the loop lives.
"""

import asyncio
import selectors
from contextlib import ExitStack
from math import ceil

from outrider.coordinator.sessions import clock


class _JumpingSelector(selectors.SelectSelector):
    """No test in virtual time waits for files: where the loop would sleep, time goes on at once."""

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
        self._replaced = ExitStack()
        self._replaced.enter_context(clock.replaced_by(self._read_ns))

    def time(self) -> float:
        """Seconds, as asyncio asks for them."""
        return self._jumping.now_ns / 1e9

    def _read_ns(self) -> int:
        # A microsecond later every time: nothing takes no time at all.
        self._jumping.now_ns += 1_000
        return self._jumping.now_ns

    def close(self) -> None:
        super().close()
        self._replaced.close()
