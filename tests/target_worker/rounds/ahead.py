"""A device that runs rounds by itself: launched ones wait in a queue, half-rounds run when it is told to go on."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.session import Level, Session


@dataclass
class _Queued:
    bucket: int
    level: Level
    least_value: float
    is_packed: bool = False


class AheadProgram(RoundProgram):
    """Rounds on a CPU as on a GPU: reports lag behind launches, and a round begins when the one before has ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.chance = random.Random(0)
        self.most_queued = 0
        self._queued: deque[_Queued] = deque()
        self.runs_ahead = True

    def warm_up(self) -> None:
        self.runs_ahead = False
        super().warm_up()
        self.runs_ahead = True

    def launch(self, bucket: int, level: Level, by_row: Sequence[Session | None], *, least_value: float = 0.0) -> None:
        if level is Level.HOSTED or not self.runs_ahead:
            assert not self._queued, "the host has a part in a round, and others are under way"
            super().launch(bucket, level, by_row, least_value=least_value)
            return
        self._queued.append(_Queued(bucket, level, least_value))
        self.most_queued = max(self.most_queued, len(self._queued))

    def wait(self) -> None:
        self.go_on()

    def go_on(self) -> None:
        """Run some half-rounds: up to the packed rows, or from the forward pass on."""
        while self._queued and self.chance.random() < 0.6:
            first = self._queued[0]
            if not first.is_packed:
                self._set_least_value(first.least_value)
                self._pack(first.bucket)
                first.is_packed = True
                continue
            self._end(first.bucket, first.level, self._forward(first.bucket))
            self._queued.popleft()
