"""What a step of growth gives, as plain data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution
from outrider.draft_worker.tree_kernels import ACCEPTANCE, NODE_ID, PARENT, SERIAL, TOKEN
from outrider.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.draft_worker.draft_forest import GrownNodes
    from outrider.draft_worker.session import DraftSession


@dataclass(frozen=True, slots=True)
class SessionGrowth:
    """New nodes of one session.

    Attributes:
        owner: whom the growth is for.
        session_id: of that owner.
        epoch: of the session.
        as_of: committed length that the growth continues.
        node_ids: [n].
        parents: [n] node ids, or 0 for the root at length `as_of`; a parent stands before its children.
        tokens: [n].
        acceptance: [n] estimates given the parent.
        distributions: [n] the q each token was drawn from, under rejection; None otherwise.
        complete: sync mode: the round's tree is whole.
    """

    owner: Any
    session_id: int
    epoch: int
    as_of: int
    node_ids: list[int]
    parents: list[int]
    tokens: list[int]
    acceptance: list[float]
    distributions: list[DraftDistribution | None]
    complete: bool


class GrowthColumns(Sequence[SessionGrowth]):
    """New nodes of several sessions, session by session, as columns; a session's own is made where it is asked for.

    Attributes:
        sessions: [P] owner, session id, epoch and committed length of each.
        counts: [P] nodes of each, at least 1.
        node_ids: [n]; so are the others.
        parents: see `SessionGrowth`.
        tokens: see there.
        acceptance: see there.
        distributions: see there; empty where no node has one.
    """

    __slots__ = ("acceptance", "counts", "distributions", "node_ids", "parents", "sessions", "tokens")

    def __init__(
        self,
        sessions: list[tuple[Any, int, int, int]],
        counts: list[int],
        nodes: "GrownNodes",
        distributions: list[DraftDistribution | None],
    ) -> None:
        self.sessions, self.counts, self.distributions = sessions, counts, distributions
        self.node_ids, self.parents = nodes.node_ids.tolist(), nodes.parents.tolist()
        self.tokens, self.acceptance = nodes.tokens.tolist(), nodes.acceptance

    @property
    def owner(self) -> Any:
        """Of all sessions; None where they have several."""
        owner = self.sessions[0][0]
        return owner if all(session[0] is owner for session in self.sessions) else None

    def __len__(self) -> int:
        return len(self.sessions)

    @overload
    def __getitem__(self, index: int) -> SessionGrowth: ...

    @overload
    def __getitem__(self, index: slice) -> list[SessionGrowth]: ...

    def __getitem__(self, index: int | slice) -> SessionGrowth | list[SessionGrowth]:
        return list(self)[index]

    def __iter__(self) -> Iterator[SessionGrowth]:
        begin = 0
        for (owner, session_id, epoch, as_of), count in zip(self.sessions, self.counts, strict=True):
            span = slice(begin, begin := begin + count)
            yield SessionGrowth(
                owner=owner,
                session_id=session_id,
                epoch=epoch,
                as_of=as_of,
                node_ids=self.node_ids[span],
                parents=self.parents[span],
                tokens=self.tokens[span],
                acceptance=self.acceptance[span].tolist(),
                distributions=self.distributions[span] or [None] * count,
                complete=False,
            )


class GrowthStep:
    """What one step gave and what it cost.

    Attributes:
        source: of all its nodes.
        step_ns: from the step's plan to its nodes, without what is in the time of the step before.
        forward_ns: of that the forward, from its launch until its children were there, likewise.
        tokens: rows of the forward.
        sessions: of the forward.
    """

    def __init__(self, source: GrowthSource = GrowthSource.MODEL) -> None:
        self.source = source
        self.step_ns = self.forward_ns = self.tokens = self.sessions = 0
        self._growths: list[SessionGrowth] = []
        # Put together when somebody asks: the next step comes first. The lengths are those that it was grown at.
        self._waiting: list[tuple[Sequence[DraftSession], list[int], GrownNodes, list[DraftDistribution | None]]] = []

    def add_children(
        self,
        sessions: "Sequence[DraftSession]",
        grown: "GrownNodes",
        distributions: list[DraftDistribution | None],
    ) -> None:
        """Growth: the children of nodes of sessions' trees as they stand now; of those in async mode.

        Args:
            sessions: [P] whose.
            grown: the children.
            distributions: [n] the q that each was drawn from; empty where none was.
        """
        if any(grown.expanded):
            self._waiting.append((sessions, [session.length for session in sessions], grown, distributions))

    def add(self, growth: SessionGrowth) -> None:
        """Growth that is put together already."""
        self._growths.append(growth)

    def add_nodes(self, session: "DraftSession", rows: npt.NDArray[np.int64]) -> None:
        """Growth: a sync session's whole tree, rows of its forest."""
        tree = session.tree
        nodes, values = tree.forest.arrays.nodes, tree.forest.arrays.values
        parents = nodes[rows, PARENT]
        serials = nodes[parents, SERIAL].tolist()
        self._growths.append(
            SessionGrowth(
                owner=session.owner,
                session_id=session.key[1],
                epoch=session.epoch,
                as_of=session.length,
                node_ids=nodes[rows, NODE_ID].tolist(),
                parents=np.where(parents == tree.root.row, 0, nodes[parents, NODE_ID]).tolist(),
                tokens=nodes[rows, TOKEN].tolist(),
                acceptance=values[rows, ACCEPTANCE].tolist(),
                distributions=list(map(tree.distributions.get, serials)),
                complete=True,
            )
        )

    @property
    def has_growth(self) -> bool:
        """Whether `growths` may have any."""
        return bool(self._growths or self._waiting)

    def by_owner(self) -> Iterator[tuple[Any, Sequence[SessionGrowth]]]:
        """What the step gave to whom."""
        if not self._growths and len(self._waiting) == 1:
            columns = _columns(*self._waiting[0])
            if columns is None:
                return
            if (owner := columns.owner) is not None:
                yield owner, columns
                return
        owners: dict[int, list[SessionGrowth]] = {}
        for growth in self.growths:
            owners.setdefault(id(growth.owner), []).append(growth)
        for growths in owners.values():
            yield growths[0].owner, growths

    @property
    def growths(self) -> list[SessionGrowth]:
        """What the step gave, sessions without new nodes left out."""
        for waiting in self._waiting:
            columns = _columns(*waiting)
            if columns is not None:
                self._growths += columns
        self._waiting.clear()
        return self._growths


def _columns(
    sessions: "Sequence[DraftSession]",
    lengths: list[int],
    grown: "GrownNodes",
    distributions: list[DraftDistribution | None],
) -> GrowthColumns | None:
    """The children of sessions in async mode that have any; None where there are none."""
    counts = grown.counts
    if any(session.is_sync for session in sessions):
        # A sync session's tree travels whole.
        chosen = np.repeat([not session.is_sync for session in sessions], counts)
        grown = replace(
            grown,
            node_ids=grown.node_ids[chosen],
            parents=grown.parents[chosen],
            tokens=grown.tokens[chosen],
            acceptance=grown.acceptance[chosen],
        )
        distributions = [q for q, is_chosen in zip(distributions, chosen, strict=False) if is_chosen]
        counts = [0 if session.is_sync else count for session, count in zip(sessions, counts, strict=True)]
    whose = [
        (session.owner, session.key[1], session.epoch, length)
        for session, length, count in zip(sessions, lengths, counts, strict=True)
        if count
    ]
    return GrowthColumns(whose, [count for count in counts if count], grown, distributions) if whose else None
