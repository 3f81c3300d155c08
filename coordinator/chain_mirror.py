"""The mirror of a session under the rejection rule: a chain of what one draft has drawn, each token with its q.

Nothing here looks at a token or a q of it to decide what stays, for that would bias what the target makes of it: a node
replaces whatever its parent had below it, and a draft that goes takes its chain along.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.coordinator.messages import Growth
from outrider.coordinator.source_mix import NO_COUNTS
from outrider.draft_distribution import DraftDistribution


@dataclass
class _WorkerView:
    """How one worker's node ids map into the chain.

    Attributes:
        places: id to its place in the chain, from 1.
        committed: id to committed length (the node's token is the last of that length), until as_of has passed it.
    """

    places: dict[int, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    as_of: int = 0


class ChainMirror:
    """One session's chain.

    Args:
        token_ids: as of `TreeMirror`.
    """

    is_chain = True
    source_counts = NO_COUNTS
    """Chains are drawn by models."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self.length = len(token_ids)
        self.tokens: list[int] = []
        self.acceptance: list[float] = []
        self.distributions: list[DraftDistribution] = []
        self.root_was_drafted = self.root_was_missed = False
        self._views: dict[str, _WorkerView] = {}
        self._complete_at = -1

    def graft(self, worker_id: str, growth: Growth) -> int:
        """Adds growth; returns how many of its nodes stand in the chain now, or are committed tokens, and are new."""
        if growth.as_of > self.length:
            return 0
        view = self._views.setdefault(worker_id, _WorkerView())
        if growth.as_of > view.as_of:
            view.as_of = growth.as_of
            view.committed = {node: length for node, length in view.committed.items() if length > growth.as_of}
        if growth.complete:
            self._complete_at = max(self._complete_at, growth.as_of)
        return sum(
            self._take(view, growth.as_of, node)
            for node in zip(
                growth.node_ids, growth.parents, growth.tokens, growth.acceptance, growth.distributions, strict=True
            )
        )

    def _take(
        self,
        view: _WorkerView,
        as_of: int,
        node: tuple[int, int, int, float, DraftDistribution | None],
    ) -> bool:
        node_id, parent, token, acceptance, distribution = node
        if distribution is None:
            # Not drawn from anything that the target could divide by.
            return False
        if node_id in view.places or node_id in view.committed:
            return False
        place = view.places.get(parent)
        if place is None:
            length = view.committed.get(parent) if parent else as_of
            if length is None:
                return False
            if length < self.length:
                if self._token_ids[length] != token:
                    return False
                view.committed[node_id] = length + 1
                return True
            place = 0
        self._cut(place)
        self.tokens.append(token)
        self.acceptance.append(min(acceptance, 1.0))
        self.distributions.append(distribution)
        view.places[node_id] = len(self.tokens)
        return True

    def _cut(self, place: int) -> None:
        """Drops what comes after so many nodes: a draft has begun anew there."""
        if place == len(self.tokens):
            return
        del self.tokens[place:], self.acceptance[place:], self.distributions[place:]
        for view in self._views.values():
            view.places = {node_id: held for node_id, held in view.places.items() if held <= place}

    def commit(self, token_ids: Sequence[int], *, keeps_chain: bool = True) -> None:
        """Moves the root along tokens that have just been appended to the session's list."""
        count = len(token_ids)
        along = 0
        while along < min(count, len(self.tokens)) and self.tokens[along] == token_ids[along]:
            along += 1
        for view in self._views.values():
            view.committed |= {node: self.length + place for node, place in view.places.items() if place <= along}
        self.root_was_drafted = along == count
        self.root_was_missed = along < min(count, len(self.tokens))
        self.length += count
        assert self.length == len(self._token_ids)
        if not (self.root_was_drafted and keeps_chain):
            self._cut(0)
            return
        del self.tokens[:count], self.acceptance[:count], self.distributions[:count]
        for view in self._views.values():
            view.places = {node: place - count for node, place in view.places.items() if place > count}

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, or opens the session anew: its ids mean nothing any more, and the chain goes with it."""
        self._views.pop(worker_id, None)
        self._cut(0)

    def close(self) -> None:
        """The session has ended."""

    @property
    def is_complete(self) -> bool:
        """As of `TreeMirror`."""
        return self._complete_at == self.length
