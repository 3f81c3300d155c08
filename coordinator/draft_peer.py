"""A draft worker as the scheduler sees it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.compiled import entries
from outrider.coordinator.firing import Latency
from outrider.coordinator.growth_kernels import count_expanded, note_known
from outrider.coordinator.links import DraftLink
from outrider.coordinator.messages import GrowthBatch
from outrider.coordinator.session import Session
from outrider.growth_source import GrowthSource
from outrider.v1 import registry_pb2


@dataclass(kw_only=True)
class DraftPeer:
    """One draft worker's link and its sessions.

    Attributes:
        last_growth_ns: when it last sent growth, of whatever session.
        given_up_ns: when a sync round had waited for it as long as one may, and it had said nothing meanwhile.
        response: from a commit to the first growth that knows of it.
        width: nodes of one session that a step of it expands, an average that forgets.
        sources: by what it grows.
        is_draining: it takes no new sessions.
        number: its own, as sessions note it in `Rows.draft`.
    """

    worker_id: str
    link: DraftLink
    limits: registry_pb2.WorkerLimits
    sessions: set[int] = field(default_factory=set)
    last_growth_ns: int = 0
    given_up_ns: int = 0
    response: Latency = field(default_factory=Latency)
    width: float = 8.0
    sources: frozenset[GrowthSource] = frozenset({GrowthSource.MODEL})
    is_draining: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)

    @property
    def has_model(self) -> bool:
        """Whether it grows on without being asked; a trie answers a commit at once, in full, and then says no more."""
        return GrowthSource.MODEL in self.sources

    @property
    def is_silent(self) -> bool:
        """Whether it was given up and has not spoken since."""
        return self.given_up_ns > self.last_growth_ns

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return not self.is_draining and len(self.sessions) < self.limits.max_sessions

    def note_answers(self, growth: GrowthBatch, sessions: Sequence[Session | None]) -> None:
        """Which commits the draft knows of now; a session is None where the growth is not wanted."""
        states = next((session.rows for session in sessions if session is not None), None)
        if states is None:
            return
        rows = np.array([0 if session is None else session.row for session in sessions])
        found = np.empty(len(rows), dtype=np.int64)
        columns = (rows, np.array(growth.as_of), states.unanswered, states.length, states.was_drafted, found)
        count = note_known(*map(entries, columns))
        for committed_ns in states.committed_ns[found[:count]].tolist():
            self.response.observe(self.last_growth_ns - committed_ns)

    def note_width(self, growth: GrowthBatch) -> int:
        """What a step of this draft has grown; returns how many nodes it has expanded."""
        if not len(growth.parents):
            return 0
        expanded = count_expanded(entries(growth.parents), entries(np.array(growth.node_counts)))
        self.width += 0.05 * (expanded / len(growth.session_ids) - self.width)
        return expanded
