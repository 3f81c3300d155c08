"""A timer for waits of a few milliseconds: those of event loops, which count in whole ones, miss by up to one.

On Linux the kernel's timer descriptors (timerfd_create(2)) are waited for beside the loop's sockets: late by 0.1 ms.
Elsewhere, and on a simulated clock, the loop's own timer does.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from outrider.coordinator import clock

# Longer waits need no such precision.
_LONGEST_S = 0.1
_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    """struct timespec"""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    """struct itimerspec"""

    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


def _libc() -> Any:
    if sys.platform != "linux":
        return None
    # The calls never block: to let go of the interpreter's lock would only mean to wait for it again.
    libc = ctypes.PyDLL(None, use_errno=True)
    return libc if hasattr(libc, "timerfd_create") else None


_LIBC = _libc()


class Alarm:
    """Rings once after each `set`, unless it is cancelled or set anew before. Until `close` it is of one event loop.

    Args:
        ring: called when it is time, on the event loop.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._is_set = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Takes its descriptor now, not with the first `set`."""
        if not clock.is_replaced():
            self._has_descriptor()

    def set(self, after_s: float) -> None:
        """It is to ring so many seconds from now."""
        self.cancel()
        self._is_set = True
        if after_s > _LONGEST_S or clock.is_replaced() or not self._has_descriptor():
            self._timer = asyncio.get_running_loop().call_later(max(after_s, 0.0), self._go_off)
            return
        # A time of 0 would switch it off.
        self._arm(max(1, round(after_s * 1e9)))

    def cancel(self) -> None:
        """It is not to ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._is_set:
            self._arm(0)
        self._is_set = False

    def close(self) -> None:
        """Gives back its descriptor; it may be set again."""
        self.cancel()
        if self._descriptor >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _has_descriptor(self) -> bool:
        if self._descriptor < 0 and _LIBC is not None:
            self._descriptor = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor >= 0:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._descriptor, self._expired)
        return self._descriptor >= 0

    def _arm(self, after_ns: int) -> None:
        time = _Itimerspec(value=_Timespec(*divmod(after_ns, 1_000_000_000)))
        if _LIBC.timerfd_settime(self._descriptor, 0, ctypes.byref(time), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            # Set anew, or cancelled, after it had expired.
            return
        self._go_off()

    def _go_off(self) -> None:
        self._timer, is_set, self._is_set = None, self._is_set, False
        if is_set:
            self._ring()
