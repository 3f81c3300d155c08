"""Which machines of the cluster have died: Ray itself takes some 15 seconds to notice."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.deploy import placement
from outrider.deploy.placement import Probe

# Of a node that refuses connections Ray's process has ended, and what comes after it is another node. One look may
# have met a process that was about to listen.
REFUSED_TIMEOUT_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a look at the machines gave.

    Attributes:
        known: address by id of the nodes that Ray takes for alive.
        silent: of those, the ids of the ones that have not answered for too long.
    """

    known: Mapping[str, str]
    silent: frozenset[str]


class Machines:
    """Looks at the machines, and remembers since when one has not answered.

    Args:
        silence_s: how long one may be silent.
        clock: in seconds.
    """

    def __init__(self, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._clock = silence_s, clock
        self._silent_since: dict[str, float] = {}
        self._refused_since: dict[str, float] = {}

    async def look(self) -> Seen:
        """Asks every node that Ray takes for alive."""
        nodes = await asyncio.to_thread(placement.living_nodes)
        probes = await asyncio.gather(*(placement.probe(node) for node in nodes))
        found = dict(zip((node.node_id for node in nodes), probes, strict=True))
        self._note(self._silent_since, found, {Probe.SILENT, Probe.REFUSES})
        self._note(self._refused_since, found, {Probe.REFUSES})
        known = {node.node_id: node.address for node in nodes}
        return Seen(known=known, silent=frozenset(filter(self._is_dead, found)))

    def _note(self, since: dict[str, float], found: dict[str, Probe], kinds: set[Probe]) -> None:
        now_s = self._clock()
        for node_id in [node_id for node_id in since if found.get(node_id) not in kinds]:
            del since[node_id]  # it answers, or Ray has noticed too
        for node_id, probe in found.items():
            if probe in kinds:
                since.setdefault(node_id, now_s)

    def _is_dead(self, node_id: str) -> bool:
        now_s = self._clock()
        silent_s = now_s - self._silent_since.get(node_id, now_s)
        refused_s = now_s - self._refused_since.get(node_id, now_s)
        return silent_s > self._silence_s or refused_s > min(REFUSED_TIMEOUT_S, self._silence_s)
