"""Admission of sessions: who has a row and slots, and whose prompt is computed next.

Sessions are served by age. One that waits for slots takes them from the youngest, which is computed again later; so the
oldest always goes on, and no two sessions take turns to displace each other. A session whose tokens another is just
computing waits for these.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.prefix_cache import common_length
from outrider.engine.round_rings import Inbox, Release
from outrider.kernels.pool.records import Records
from outrider.roles.log_output import about
from outrider.target_worker.rounds.buckets import MAX_CHUNKS
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.kv import RowKv
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.session import Session
from outrider.target_worker.rounds.step_cost import PrefillAllowance

logger = logging.getLogger(__name__)

# Share of the free slots that rows may have for rounds to come.
_AHEAD_PART = 4
# Slots that a row gets beyond these where there are enough: a record for each token would cost every round.
_AT_A_TIME = 16
# Of what a round may take, what short prompts leave to a longer one that is older.
_PREFILL_SHARE = 4
# Another's prefill is waited for where it computes so many of the tokens that are missing, and such a part of them.
_SHARED_TOKENS, _SHARED_PART = 16, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A part of a session's prompt, from index `start` on, and the opening of the row that it is for."""

    session: Session
    generation: int
    start: int
    size: int

    def plan_again(self) -> None:
        """Have what the round had no room for planned again, once it is read."""
        session = self.session
        is_same = session.is_open and session.generation == self.generation
        if is_same and session.cached < self.start + self.size:
            session.planned = session.cached


class Admission:
    """The rows and KV slots that sessions have. Called between rounds, on their thread.

    Args:
        inbox: the device's.
        program: describes rows to the device.
        kv: slots of the rows.
        config: sizes.

    Attributes:
        by_row: [S], the sessions that the device knows; None where a row has none.
        preemptions: how often a session lost its KV to an older one.
    """

    def __init__(self, inbox: Inbox, program: RoundProgram, kv: RowKv, config: RoundConfig) -> None:
        self._inbox, self._program, self._kv, self._config = inbox, program, kv, config
        # Most rows of a session that rounds under way and the next one fill.
        self._rows_ahead = config.max_session_rows * (1 + program.runs_ahead)
        self._ahead = 1
        # A row that no session has yet.
        self._spare_row: tuple[int, int] | None = None
        # Rows that the device still has to close: the tokens whose KV is remembered.
        self._closing: dict[int, npt.NDArray[np.int32]] = {}
        self.by_row: list[Session | None] = [None] * config.max_sessions
        self.preemptions = 0

    @property
    def is_closing(self) -> bool:
        """True while rows have been closed here and not on the device."""
        return bool(self._closing)

    def released(self, releases: Iterable[Release]) -> None:
        """Take back the slots of rows that the device has closed."""
        for release in releases:
            self._kv.end(release.row, self._closing.pop(release.row))

    def plan(self, sessions: Iterable[Session]) -> None:
        """Give running sessions the slots that they need next, and let those that wait begin; the oldest first."""
        ordered = sorted(sessions, key=lambda session: session.order)
        running = [session for session in ordered if session.is_running]
        self._ahead = length_ahead(self._kv, running, rows=self._rows_ahead)
        for session in running:
            # One that is older may have taken its slots.
            if session.is_running:
                self._extend(session)
        for session in ordered:
            if not session.is_open and not session.is_held and not self._begin(session):
                return

    def _extend(self, session: Session) -> None:
        """Let a running session have slots for the rounds to come, of the youngest where none is free."""
        row, had = session.row, self._kv.slots.length(session.row)
        if had >= session.length + self._ahead:
            return
        needed = min(session.length + self._program.runs_ahead, session.limit - 1, self._kv.slots.num_slots)
        if had < needed and not self._make_room(session, needed - had):
            if not self._kv.freed_by(self._closing):
                self._preempt(session)
            return
        ahead = self._ahead + (_AT_A_TIME if self._ahead == self._rows_ahead else 0)
        wanted = min(session.length + ahead, had + self._kv.slots.free, self._kv.slots.max_row_len)
        if wanted > had and self._kv.extend(row, wanted):
            records = Records()
            records.slots(row, session.generation, start=had, slots=self._kv.slots.table[row, had:wanted].tolist())
            self._inbox.put(records.array())

    def _begin(self, session: Session) -> bool:
        """Make a session known to the device; return False if younger ones have to wait as well."""
        if session.grammar is not None and not session.grammar.is_ready:
            return True
        if self._spare_row is None:
            self._spare_row = self._inbox.take_row()
        if self._spare_row is None:
            return False
        (row, generation), length = self._spare_row, session.length
        tokens = session.history[: length - 1]
        known = self._kv.begin(row, tokens)
        if self._is_being_computed(tokens, known):
            self._kv.end(row, tokens[:known])
            return True
        needed = min(length + 1, session.limit, self._kv.slots.num_slots) - known
        if needed > self._kv.slots.free and not self._make_room(session, needed):
            self._kv.end(row, tokens[:known])
            return False
        self._kv.extend(row, min(length + self._ahead, known + self._kv.slots.free, self._kv.slots.max_row_len))
        self._spare_row = None
        session.row, session.generation = row, generation
        session.is_open, session.is_shared = True, False
        session.cached_tokens += max(0, min(known, session.prompt_len) - session.reached)
        session.cached = session.planned = known
        session.reached = max(session.reached, known)
        self.by_row[row] = session
        slots = self._kv.slots.table[row, : self._kv.slots.length(row)]
        self._program.describe_row(session, slots)
        session.sent_reach, session.sent_round = session.reach, 0
        records = Records()
        records.open(row, generation, length=length, cached=known, end=session.limit, allow=session.reach)
        records.slots(row, generation, start=len(slots), slots=[])
        self._inbox.put(records.array())
        session.grown = 0
        self.grow_known(session)
        return True

    def plan_chunks(self, prompts: Iterable[Session], allowance: PrefillAllowance) -> list[Chunk]:
        """Have the next round compute the next parts of prompts, and return them."""
        planned = list[Chunk]()
        for session, size in chunks(prompts, allowance, most_chunks=MAX_CHUNKS):
            records = Records()
            records.prefill(session.row, session.generation, start=session.planned, size=size)
            self._inbox.put(records.array())
            planned.append(Chunk(session=session, generation=session.generation, start=session.planned, size=size))
            session.planned += size
        return planned

    def grow_known(self, session: Session) -> None:
        """Put the tokens of an output that has only to be scored into its pool, as many as a round verifies."""
        if (growth := session.forced_growth(self._config.max_session_rows - 1)) is not None:
            self._inbox.put(growth.records([(session.row, session.generation)]))

    def _is_being_computed(self, tokens: npt.NDArray[np.int32], known: int) -> bool:
        """True if another session is about to share so much of what the tokens need that waiting for it pays."""
        return self._kv.remembers and any(
            # One that is held may rest for long before it shares anything.
            leader is not None
            and not (leader.is_shared or leader.is_held)
            and saves(leader.history[: leader.length - 1], tokens, known)
            for leader in self.by_row
        )

    def _make_room(self, session: Session, count: int) -> bool:
        """Preempt others until so many slots are free: those that are held first, then the youngest; not older ones.

        Slots of preempted sessions are free once no round uses them.

        Returns:
            Whether they are free now.
        """
        others = (other for other in self.by_row if other is not None and other is not session)
        weaker = [other for other in others if other.is_held or other.order > session.order]
        weaker.sort(key=lambda other: (other.is_held, other.order))
        victims, coming = list[Session](), list(self._closing)
        while count > self._kv.slots.free + self._kv.freed_by(coming):
            if not weaker:
                return False
            victims.append(weaker.pop())
            coming.append(victims[-1].row)
        for victim in victims:
            self._preempt(victim)
        return count <= self._kv.slots.free

    def _preempt(self, session: Session) -> None:
        """Take a session's slots; it begins again when there are enough, and its trees are to be sent again."""
        logger.info("session %d is preempted: out of KV slots", session.key[1], extra=about(session_id=session.key[1]))
        self.preemptions += 1
        self.close(session, remembers=True)
        session.lost = (1 << self._config.places) - 1

    def close(self, session: Session, *, remembers: bool) -> None:
        """Have the device close a session's row; others may find its KV if it is remembered."""
        self._closing[session.row] = session.history[: session.cached if remembers else 0].copy()
        self.by_row[session.row] = None
        records = Records()
        records.close(session.row, session.generation)
        self._inbox.put(records.array())
        session.is_open, session.row = False, -1
        session.cached = session.planned = session.tree_at = 0
        session.is_waiting, session.waits_since_ns = session.is_sync, None
        session.distributions.clear()


def length_ahead(kv: RowKv, running: Sequence[Session], *, rows: int) -> int:
    """Return how many slots a running session should have behind its committed tokens.

    Args:
        kv: of all sessions.
        running: those that share the free slots.
        rows: most that rounds under way and the next one can fill.
    """
    held = sum(max(kv.slots.length(session.row) - session.length, 0) for session in running)
    return max(1, min(rows, (kv.slots.free + held) // (_AHEAD_PART * max(len(running), 1))))


def chunks(
    prompts: Iterable[Session], allowance: PrefillAllowance, *, most_chunks: int
) -> Iterator[tuple[Session, int]]:
    """Yield the prompts whose next part a round computes, each with its number of tokens; the oldest first.

    A short prompt that the round can finish overtakes a long one, but never takes all that would move that.
    """
    count, unfinished = most_chunks, list[Session]()
    for session in sorted(prompts, key=lambda session: session.order):
        missing = session.length - 1 - session.planned
        granted = allowance.rows(session.planned)
        if unfinished:
            granted -= -(-granted // _PREFILL_SHARE)
        if missing <= granted and count > bool(unfinished):
            allowance.spend(missing, session.planned)
            count -= 1
            yield session, missing
        else:
            unfinished.append(session)
    for session in unfinished[:count]:
        granted = allowance.rows(session.planned)
        if granted <= 0:
            return
        size = min(session.length - 1 - session.planned, granted)
        allowance.spend(size, session.planned)
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
