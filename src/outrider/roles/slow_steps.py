"""Log of slow steps of a serving worker, and of kernels compiled or graphs captured while it serves (torch-free).

All of that belongs into the time before a worker serves. Where it comes later, whole seconds pass in which nothing
grows or is verified, and nothing else shows why.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

LONG_STEP_NS = 500_000_000
"""Steps that take this long are logged."""
# Between two lines of a worker.
_LEAST_APART_S = 1.0
# Causes that a line names.
_MOST_CAUSES = 8


class _Preparation(NamedTuple):
    number: int
    what: str
    seconds: float


_numbers = count(1)
# Of this process, newest last: whichever thread compiles, its kernels are everybody's.
_preparations: deque[_Preparation] = deque(maxlen=256)
_is_listening = threading.Event()


def note_preparation(what: str, seconds: float) -> None:
    """Note that something was compiled or captured, by any thread."""
    _preparations.append(_Preparation(next(_numbers), what, seconds))


def listen_to_triton() -> None:
    """From now on every kernel that is compiled, or read from the disk, is noted; nothing where there is no Triton."""
    compilation: Any = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
    if compilation is None or _is_listening.is_set():
        return
    _is_listening.set()
    listener = compilation.listener

    def compiled(**found: Any) -> None:
        kind = "kernel read" if found["cache_hit"] else "kernel compiled"
        note_preparation(f"{kind}: {found['src'].name}", found["times"].total / 1e6)
        if listener is not None:
            listener(**found)

    compilation.listener = compiled


class SlowStepLog:
    """The lines of one worker.

    Args:
        kind: of step, in a line.
    """

    def __init__(self, logger: logging.Logger, kind: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._kind, self._now = logger, kind, now
        self._seen = 0
        self._causes: list[str] = []
        self._suppressed = 0
        self._logged_s: float | None = None

    def begin(self) -> None:
        """Note that the worker serves from now on: earlier preparations held nobody up."""
        listen_to_triton()
        self._seen = _preparations[-1].number if _preparations else 0

    def note(self, step_ns: int, *, rows: int, sessions: int) -> None:
        """Note the end of a step."""
        has_news = bool(_preparations) and _preparations[-1].number > self._seen
        if step_ns < LONG_STEP_NS and not has_news and not self._suppressed:
            return
        if has_news:
            self._take_news()
        if step_ns < LONG_STEP_NS and not self._causes:
            return
        now_s = self._now()
        if self._logged_s is not None and now_s - self._logged_s < _LEAST_APART_S:
            self._suppressed += has_news or step_ns >= LONG_STEP_NS
            return
        self._logger.warning(
            "%s: a step of %d rows of %d sessions took %.0f ms; %s%s",
            self._kind,
            rows,
            sessions,
            step_ns / 1e6,
            self._causes_text(),
            f" ({self._suppressed} more such steps since the last line)" if self._suppressed else "",
        )
        self._logged_s, self._suppressed = now_s, 0
        self._causes.clear()

    def _take_news(self) -> None:
        news = [one for one in list(_preparations) if one.number > self._seen]
        self._seen = news[-1].number
        self._causes += [f"{one.what} {1e3 * one.seconds:.0f} ms" for one in news]

    def _causes_text(self) -> str:
        if not self._causes:
            return "nothing was compiled or captured in it"
        rest = len(self._causes) - _MOST_CAUSES
        named = ", ".join(self._causes[:_MOST_CAUSES])
        return f"prepared while serving: {named}" + (f" and {rest} more" if rest > 0 else "")
