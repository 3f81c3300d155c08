"""Workers that are lost again and again are left alone for a while.

A worker counts as lost when its lease or its stream ends without its having said that it drains: it crashed, hung,
cannot be dialled at the address it names, or sent what no coordinator can use. So many losses within a window, and the
next time it registers it keeps its lease but gets nothing to do; every further loss doubles the pause. What is counted
by has to outlive the process: the name that whoever starts the worker has given it (`--name`), else its address, which
is another one after a restart unless its port is configured.
"""

from collections import deque
from dataclasses import dataclass, field

from outrider.coordinator.sessions import clock

_LONGEST_S = 60.0
_MOST_RECORDS = 1024
# More than the longest pause needs; two to the number of losses is no float some day.
_MOST_DOUBLINGS = 40


@dataclass(kw_only=True)
class _Record:
    losses: deque[float] = field(default_factory=deque)
    pauses: int = 0
    until_s: float = 0.0


class Quarantine:
    """Workers that get no sessions, and until when.

    Args:
        losses: that lead to the first pause.
        window_s: in which they have to be. A worker that stays for that long after a pause starts afresh.
        pause_s: the first pause.
    """

    def __init__(self, *, losses: int, window_s: float, pause_s: float) -> None:
        self._most, self._window_s, self._pause_s = losses, window_s, pause_s
        self._records: dict[str, _Record] = {}

    def note_loss(self, identity: str) -> float:
        """Note the loss of a worker; return how long it is quarantined, in seconds."""
        now_s = clock.now_ns() / 1e9
        record = self._records.pop(identity, None)
        if record is None or now_s > max(record.losses[-1], record.until_s) + self._window_s:
            record = _Record()
        # Behind the others: those lost longest ago are forgotten first.
        self._records[identity] = record
        if len(self._records) > _MOST_RECORDS:
            del self._records[next(iter(self._records))]
        record.losses.append(now_s)
        while record.losses[0] < now_s - self._window_s:
            record.losses.popleft()
        if record.pauses or len(record.losses) >= self._most:
            record.until_s = now_s + min(_LONGEST_S, self._pause_s * 2 ** min(record.pauses, _MOST_DOUBLINGS))
            record.pauses += 1
        return self.left_s(identity)

    def left_s(self, identity: str) -> float:
        """Return the rest of a worker's quarantine in seconds; 0 if there is none."""
        record = self._records.get(identity)
        return 0.0 if record is None else max(0.0, record.until_s - clock.now_ns() / 1e9)
