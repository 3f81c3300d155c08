"""The coordinator's clock, in one place, so that a simulation may run it on a time of its own."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_read_ns: Callable[[], int] = time.monotonic_ns


def now_ns() -> int:
    """Nanoseconds of the monotonic clock, or of what stands in for it."""
    return _read_ns()


@contextmanager
def replaced_by(read_ns: Callable[[], int]) -> Iterator[None]:
    """Replace the clock of the whole process while the block lasts; for simulations."""
    global _read_ns  # noqa: PLW0603 - the one place is the point
    before, _read_ns = _read_ns, read_ns
    try:
        yield
    finally:
        _read_ns = before
