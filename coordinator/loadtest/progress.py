"""The live view of a run: a bar, and what is known so far."""

import asyncio
from collections.abc import MutableSequence, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.coordinator.loadtest.client_process import Watch
from outrider.coordinator.loadtest.driving import BEGUN, COUNTERS, ENDED, FAILED, FIRST_TOKENS, TOKENS, TTFT_US
from outrider.coordinator.loadtest.options import Point

_INTERVAL_S = 0.2


class ProgressView:
    """One bar a run; use with `with`."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, point: Point, total: int | None) -> Watch:
        """A bar for a run of so many requests."""
        task = self._progress.add_task(point.label, total=total, now="")

        async def watch(counters: Sequence[MutableSequence[int]]) -> None:
            before = [0] * COUNTERS
            while True:
                now = totals(counters)
                self._progress.update(task, completed=now[ENDED], now=describe(now, before))
                before = now
                try:
                    await asyncio.sleep(_INTERVAL_S)
                except asyncio.CancelledError:
                    ended = totals(counters)[ENDED]
                    self._progress.update(task, completed=ended, total=ended, now="")
                    raise

        return watch


def totals(counters: Sequence[MutableSequence[int]]) -> list[int]:
    """Over all processes."""
    return [sum(each[place] for each in counters) for place in range(COUNTERS)]


def describe(now: Sequence[int], before: Sequence[int]) -> str:
    """Return a line on running requests and on those that ended since the last one."""
    tokens_per_s = (now[TOKENS] - before[TOKENS]) / _INTERVAL_S
    parts = [f"{now[BEGUN] - now[ENDED]} under way", f"{tokens_per_s:,.0f} tokens/s of those that ended"]
    if now[FIRST_TOKENS]:
        parts.append(f"TTFT {now[TTFT_US] / now[FIRST_TOKENS] / 1e3:.0f} ms")
    if now[FAILED]:
        parts.append(f"[red]{now[FAILED]} failed[/]")
    return ", ".join(parts)
