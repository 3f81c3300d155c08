"""How long a target's step takes on a GPU of its own, by what is in it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Self

_NS_PER_MS, _NS_PER_US = 1_000_000, 1_000


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A step takes what its rows take, and something more for every session, whose keys are read.

    The defaults are the 8B shape's on one H200 at contexts of 1,024 to 1,792 tokens. Up to 256 rows they are fitted by
    hand to the device times of docs/performance.md ("Two GPUs", commit 5e3e160), which they meet to 5 %, but for 16
    greedy sessions: those steps had rows of prompts in them. Beyond, where rows are prefill, they are rough: what 512
    rows multiply at the rate of a large product, and 4,096 rows as docs/target-step.md has them ("Prompts").

    Attributes:
        rows_ms: (rows, milliseconds), by rising rows; lines between them, and the last one goes on.
        session_us: microseconds of every session.

    Raises:
        ValueError: fewer than two points, or rows that do not rise.
    """

    rows_ms: Sequence[tuple[int, float]] = (
        (1, 3.9), (16, 4.25), (64, 4.75), (128, 5.4), (192, 5.65), (256, 6.4), (512, 13.0), (4096, 119.0)
    )  # fmt: skip
    session_us: float = 45.0

    def __post_init__(self) -> None:
        rows = [rows for rows, _ in self.rows_ms]
        if len(rows) < 2 or any(first >= second for first, second in pairwise(rows)):
            raise ValueError(f"rows_ms: rows {rows} given, two or more that rise needed")

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` gave."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def step_ns(self, rows: int, sessions: int) -> int:
        """Of a step of so many rows, all sessions' together."""
        place = min(max(bisect_left(self.rows_ms, rows, key=lambda point: point[0]), 1), len(self.rows_ms) - 1)
        (fewer, least_ms), (more, most_ms) = self.rows_ms[place - 1 : place + 1]
        rows_ms = least_ms + (most_ms - least_ms) * (rows - fewer) / (more - fewer)
        return round(rows_ms * _NS_PER_MS + self.session_us * _NS_PER_US * sessions)
