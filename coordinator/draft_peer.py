"""A draft worker as the scheduler sees it."""

from dataclasses import dataclass, field

from outrider.coordinator.firing import Latency
from outrider.coordinator.links import DraftLink
from outrider.v1 import registry_pb2


@dataclass(kw_only=True)
class DraftPeer:
    """One draft worker's link and its sessions.

    Attributes:
        last_growth_ns: when it last sent growth, of whatever session.
        response: from a commit to the first growth that knows of it.
    """

    worker_id: str
    link: DraftLink
    limits: registry_pb2.WorkerLimits
    sessions: set[int] = field(default_factory=set)
    last_growth_ns: int = 0
    response: Latency = field(default_factory=Latency)

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return len(self.sessions) < self.limits.max_sessions
