"""Who has slots, and whose prompt is computed next.

Sessions are served by age. One that waits for slots takes them from the youngest, which is computed again later; so the
oldest always goes on, and no two sessions take turns to displace each other. A session whose tokens another is just
computing waits for these.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.prefix_cache import common_length
from outrider.target_worker.rounds.kv import RowKv
from outrider.target_worker.rounds.session import Session
from outrider.target_worker.rounds.step_cost import PrefillAllowance

# Share of the free slots that rows may have for rounds to come.
_AHEAD_PART = 4
# Of what a round may take, what short prompts leave to a longer one that is older.
_PREFILL_SHARE = 4
# Another's prefill is waited for where it computes so many of the tokens that are missing, and such a part of them.
_SHARED_TOKENS, _SHARED_PART = 16, 4


def length_ahead(kv: RowKv, running: Sequence[Session], *, rows: int) -> int:
    """Return how many slots a running session should have behind its committed tokens.

    Args:
        kv: of all sessions.
        running: those that share the free slots.
        rows: most that rounds under way and the next one can fill.
    """
    held = sum(max(kv.length(session.row) - session.length, 0) for session in running)
    return max(1, min(rows, (kv.free + held) // (_AHEAD_PART * max(len(running), 1))))


def chunks(
    sessions: Iterable[Session], allowance: PrefillAllowance, *, most_rows: int, most_chunks: int
) -> Iterator[tuple[Session, int]]:
    """Yield the prompts whose next part a round computes, each with its number of tokens; the oldest first.

    A short prompt that the round can finish overtakes a long one, but never takes all that would move that.
    """
    pending = sorted((session for session in sessions if session.is_prefilling), key=lambda session: session.order)
    rows, count, unfinished = most_rows, most_chunks, list[Session]()
    for session in pending:
        missing = session.length - 1 - session.planned
        granted = min(allowance.rows(session.planned), rows)
        if unfinished:
            granted -= -(-granted // _PREFILL_SHARE)
        if missing <= granted and count > bool(unfinished):
            allowance.spend(missing, session.planned)
            rows, count = rows - missing, count - 1
            yield session, missing
        else:
            unfinished.append(session)
    for session in unfinished[:count]:
        granted = min(allowance.rows(session.planned), rows)
        if granted <= 0:
            return
        size = min(session.length - 1 - session.planned, granted)
        allowance.spend(size, session.planned)
        rows -= size
        yield session, size


def saves(leader: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], known: int) -> bool:
    """Return True if waiting for a session that computes the tokens of `leader` pays.

    Args:
        leader: [m] tokens whose KV is being computed.
        tokens: [n] tokens whose KV is needed.
        known: how many of them have it.
    """
    missing = len(tokens) - known
    enough = max(_SHARED_TOKENS, -(-missing // _SHARED_PART))
    return missing >= enough and common_length(leader, tokens) - known >= enough
