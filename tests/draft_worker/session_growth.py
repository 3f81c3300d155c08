"""Growth session by session, as tests read it."""

from dataclasses import dataclass
from typing import Any

from outrider.draft_worker.rounds.growth import Growth
from outrider.drafting.draft_distribution import DraftDistribution


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionGrowth:
    """One session's part of a `Growth`; attributes as there, of one session."""

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
    forgot: bool
    again: bool


def sessions_of(growth: Growth | None) -> list[SessionGrowth]:
    """Return each session's part; none of no growth."""
    found, begin = list[SessionGrowth](), 0
    for place, count in enumerate(growth.counts if growth is not None else ()):
        assert growth is not None
        span = slice(begin, begin := begin + count)
        found.append(
            SessionGrowth(
                owner=growth.owners[place],
                session_id=growth.session_ids[place],
                epoch=growth.epochs[place],
                as_of=growth.as_of[place],
                node_ids=growth.node_ids[span],
                parents=growth.parents[span],
                tokens=growth.tokens[span],
                acceptance=growth.acceptance[span],
                distributions=growth.distributions[span] or [None] * count,
                complete=growth.complete[place],
                forgot=growth.forgot[place],
                again=growth.again[place],
            )
        )
    return found
