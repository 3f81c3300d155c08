"""Workers' node ids: which slot of the forest each means.

A view is one worker's ids of one session. It is a ring over the id: an entry counts as long as the slot that it points
to still has the serial number that it had when it was named, so that nothing has to be done when a node goes.
"""

import numpy as np

from outrider.compiled import entries
from outrider.coordinator.forest_kernels import Ring
from outrider.coordinator.rows import Ints

# Ids of a view that can be told apart at a time; of older nodes the growth is dropped. A draft holds far fewer nodes of
# a session, and a commit a round ends the life of all but one branch.
RING = 2048
_LEAST_VIEWS = 4


class NodeIds:
    """Ids to slots, for any number of views."""

    def __init__(self) -> None:
        self._slots: Ints = np.zeros(0, dtype=np.int64)
        self._ids: Ints = np.zeros(0, dtype=np.int64)
        self._serials: Ints = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []
        self.ring = self._as_ring()

    def _as_ring(self) -> Ring:
        return Ring(*map(entries, (self._slots, self._ids, self._serials)))

    @property
    def views(self) -> int:
        """Those that there is space for."""
        return len(self._slots) // RING

    def add_view(self) -> int:
        """A view without ids."""
        if not self._free:
            views = self.views
            more = max(views, _LEAST_VIEWS)
            for name in ("_slots", "_ids", "_serials"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more * RING, dtype=np.int64))))
            self._free = list(range(views + more - 1, views - 1, -1))
            self.ring = self._as_ring()
        view = self._free.pop()
        # Slots of serial number 0 are nobody's.
        self._serials[view * RING : (view + 1) * RING] = -1
        return view

    def remove_view(self, view: int) -> None:
        """Its ids mean nothing any more."""
        self._free.append(view)
