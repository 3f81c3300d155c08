"""Growth as rounds take it: the nodes of draft steps, and the records of the device's inbox that they become."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.kernels.pool.records import WORDS, RecordKind
from outrider.target_worker.sessions.requests import SessionKey

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Growth:
    """New nodes of P sessions, one at least, n in all, session by session. All columns are as long as that.

    Attributes:
        keys: [P] whose.
        epochs: [P] of their openings.
        places: [P] of the workers that draft.
        as_of: [P] committed tokens that the drafter had when it made the nodes.
        counts: [P] nodes of each.
        node_ids: [n] what the drafter calls them, rising within a session.
        parents: [n] ids of their parents; 0 is the token at index as_of - 1.
        tokens: [n]
        acceptances: [n] estimated chance that the target accepts each, given its parent.
        drafters: [n] numbers of their drafters' kinds, 0 to 7.
        distributions: [n] the q that each token was drawn from, under `rejection`; empty where no node has one.
        complete: [P] in sync mode, whether these are the last nodes of their tree; empty: none are.
    """

    keys: Sequence[SessionKey]
    epochs: Sequence[int]
    places: Sequence[int]
    as_of: Sequence[int]
    counts: Sequence[int]
    node_ids: Ints
    parents: Ints
    tokens: Ints
    acceptances: npt.NDArray[np.float32]
    drafters: Ints
    distributions: Sequence[DraftDistribution | None] = ()
    complete: Sequence[bool] = ()

    @classmethod
    def of_session(
        cls,
        key: SessionKey,
        epoch: int,
        place: int,
        as_of: int,
        node_ids: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        tokens: Sequence[int] | Ints,
        acceptances: Sequence[float] | npt.NDArray[np.float32],
        *,
        drafter: int = 0,
        distributions: Sequence[DraftDistribution | None] = (),
        is_complete: bool = False,
    ) -> Self:
        """Return the growth of one session."""
        return cls(
            keys=[key],
            epochs=[epoch],
            places=[place],
            as_of=[as_of],
            counts=[len(node_ids)],
            node_ids=np.asarray(node_ids, np.int64),
            parents=np.asarray(parents, np.int64),
            tokens=np.asarray(tokens, np.int64),
            acceptances=np.asarray(acceptances, np.float32),
            drafters=np.full(len(node_ids), drafter),
            distributions=distributions,
            complete=[is_complete],
        )

    @classmethod
    def joined(cls, growths: Sequence[Self]) -> Self:
        """Return growth as one, one behind the other; most of what growth costs it costs once."""
        if len(growths) == 1:
            return growths[0]

        def listed(name: str) -> list[Any]:
            return [value for growth in growths for value in getattr(growth, name)]

        def of_nodes(name: str) -> npt.NDArray[Any]:
            return np.concatenate([getattr(growth, name) for growth in growths])

        def padded(columns: list[Sequence[T]], counts: list[int], blank: T) -> list[T]:
            """A column that may be empty."""
            pairs = zip(columns, counts, strict=True) if any(columns) else ()
            return [value for column, count in pairs for value in (column or [blank] * count)]

        parts, nodes = [len(growth.keys) for growth in growths], [len(growth.node_ids) for growth in growths]
        return cls(
            keys=listed("keys"),
            epochs=listed("epochs"),
            places=listed("places"),
            as_of=listed("as_of"),
            counts=listed("counts"),
            node_ids=of_nodes("node_ids"),
            parents=of_nodes("parents"),
            tokens=of_nodes("tokens"),
            acceptances=of_nodes("acceptances"),
            drafters=of_nodes("drafters"),
            distributions=padded([growth.distributions for growth in growths], nodes, None),
            complete=padded([growth.complete for growth in growths], parts, False),
        )

    def without(self, sessions: Iterable[int]) -> Self:
        """Return the growth of all but some sessions, which are given by their indices."""
        is_kept = np.ones(len(self.keys), np.bool_)
        is_kept[list(sessions)] = False
        numbers, nodes = np.flatnonzero(is_kept).tolist(), np.repeat(is_kept, self.counts)
        return type(self)(
            keys=[self.keys[number] for number in numbers],
            epochs=[self.epochs[number] for number in numbers],
            places=[self.places[number] for number in numbers],
            as_of=[self.as_of[number] for number in numbers],
            counts=[self.counts[number] for number in numbers],
            node_ids=self.node_ids[nodes],
            parents=self.parents[nodes],
            tokens=self.tokens[nodes],
            acceptances=self.acceptances[nodes],
            drafters=self.drafters[nodes],
            distributions=self.distributions and [self.distributions[node] for node in np.flatnonzero(nodes).tolist()],
            complete=self.complete and [self.complete[number] for number in numbers],
        )

    def records(self, openings: Sequence[tuple[int, int] | None]) -> npt.NDArray[np.int32]:
        """Return the nodes as records of the device's inbox.

        Args:
            openings: [P] row and generation of each session; None for one whose nodes are dropped.
        """
        drafted = np.left_shift(1, self.drafters + 16)
        sessions = np.empty((len(openings), 4), np.int64)
        sessions[:, 0] = np.left_shift(self.places, 8) | int(RecordKind.GROWTH)
        sessions[:, 1:3] = [(-1, 0) if opening is None else opening for opening in openings]
        sessions[:, 3] = self.as_of
        sessions = np.repeat(sessions, self.counts, 0)
        records = np.empty((len(self.node_ids), WORDS), np.int32)
        records[:, 0] = sessions[:, 0] | drafted
        # Generations have 32 bits, of which none is a sign.
        records[:, 1:3] = sessions[:, 1:3].astype(np.uint32).view(np.int32)
        records[:, 3], records[:, 4], records[:, 5] = self.node_ids, self.parents, sessions[:, 3]
        records[:, 6] = self.tokens
        # The bits of -0.0 are not those of 0.0.
        records[:, 7] = (self.acceptances + np.float32(0)).view(np.int32)
        return records if None not in openings else records[sessions[:, 1] >= 0]
