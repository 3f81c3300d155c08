"""Where the host's time of a growth step goes: the thread's processor time by part, with a device that answers at once.

Processor time leaves out what other programs take, but not what they cost through shared caches: the lowest tenth of
many steps is the nearest to a quiet machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.draft_bench.drive import Owner, Point

from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_thread import GrowthThread, spare_collector

_WARM = 100
# What of the growth is timed under which name: the owner of the method, and its name.
_PARTS: dict[str, Callable[[TreeGrowth], tuple[Any, str]]] = {
    "plan": lambda growth: (growth._planner, "plan"),
    "stage": lambda growth: (growth._launcher._steps, "stage_growth"),
    "collect": lambda growth: (growth._launcher, "_ranked"),
    "add": lambda growth: (growth, "_add"),
    "commit": lambda growth: (growth, "commit"),
}


def host_parts(growth: TreeGrowth, point: Point, *, steps: int) -> dict[str, float]:
    """Microseconds of each part of a step, of handing growth out (`hand out`) and of one commit; lowest tenths.

    Args:
        growth: over a model whose device answers at once, without sessions.
        point: what runs.
        steps: that are measured.
    """
    taken: dict[str, list[int]] = defaultdict(list)
    for name, place in _PARTS.items():
        holder, method = place(growth)
        setattr(holder, method, _timed(getattr(holder, method), taken[name]))
    thread = GrowthThread(lambda: growth)
    thread.ready.set_result(growth)
    owner = Owner(growth, thread, point, vocab_size=growth.runner.vocab_size, temperature=1.0)
    # What a target would do is no part of handing growth out.
    owner.commits_at_once = False
    owner.open()
    spare_collector()
    hand_out = _timed(thread._hand_out, taken["hand out"])
    for number in range(_WARM + steps):
        if number == _WARM:
            for times in taken.values():
                times.clear()
        thread._apply_some(growth, block=False)
        if growth.begin() and growth.takes_another:
            # As in serving: one step runs, another one waits for the device.
            continue
        if growth.num_begun:
            hand_out(growth.finish())
            owner.commit()
    return {name: float(np.quantile(times, 0.1)) * 1e-3 for name, times in taken.items()}


def _timed(function: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        result = function(*args, **named)
        taken.append(time.thread_time_ns() - began)
        return result

    return timed
