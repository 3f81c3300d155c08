"""A device of a given step time in the place of a model's, on a machine without one."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.draft_bench.models import IdleDevice

from outrider.engine.draft_staging import RankedChildren
from outrider.engine.step_buffers import StagedStep

# A sleep ends late: what is left of the wait is looked on at.
_LATE_NS = 100_000


class TimedDevice(IdleDevice):
    """A launched step that is done after a while; waiting for it leaves the interpreter to others, asking does not.

    Args:
        staged: what was launched.
        device_ns: how long it takes.
        begin_ns: when the device begins with it, by `time.perf_counter_ns`.
    """

    def __init__(self, staged: StagedStep, device_ns: int, begin_ns: int) -> None:
        super().__init__(staged)
        self._device_ns = device_ns
        self._end_ns = begin_ns + device_ns

    @property
    def is_done(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - takes time here
        """Whether the time is over."""
        return time.perf_counter_ns() >= self._end_ns

    def device_ns(self) -> int:
        """The time as given."""
        return self._device_ns

    def wait(self) -> None:
        """Until the time is over."""
        while (left := self._end_ns - time.perf_counter_ns()) > 0:
            time.sleep(max(left - _LATE_NS, 0) * 1e-9)

    def children(self) -> RankedChildren:
        """Drawn ones, when the time is over."""
        self.wait()
        return super().children()


def timed_launch(device_ms: float, launch_ms: float) -> Callable[[StagedStep], TimedDevice]:
    """What launches a step: busy on the host for `launch_ms`, while the device begins, or after its last step."""
    device_ns, free_ns = int(1e6 * device_ms), 0

    def launch(staged: StagedStep) -> TimedDevice:
        nonlocal free_ns
        begin = max(time.perf_counter_ns(), free_ns)
        free_ns = begin + device_ns
        launched = TimedDevice(staged, device_ns, begin)
        end = time.perf_counter_ns() + int(1e6 * launch_ms)
        while time.perf_counter_ns() < end:
            pass
        return launched

    return launch
