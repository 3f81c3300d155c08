"""A draft worker as the scheduler sees it."""

from dataclasses import dataclass, field

from outrider.coordinator.workers.links import DraftLink
from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import registry_pb2


@dataclass(kw_only=True)
class DraftPeer:
    """One draft worker's link and its sessions.

    Attributes:
        sources: by what it grows.
        is_draining: it takes no new sessions.
    """

    worker_id: str
    link: DraftLink
    limits: registry_pb2.WorkerLimits
    sessions: set[int] = field(default_factory=set)
    sources: frozenset[GrowthSource] = frozenset({GrowthSource.MODEL})
    is_draining: bool = False

    @property
    def has_room(self) -> bool:
        """True if one more session may be placed here."""
        return not self.is_draining and len(self.sessions) < self.limits.max_sessions
