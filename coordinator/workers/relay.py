"""Relay between a target and the drafts of its sessions: growth one way, commits the other, tokens to clients.

    growth of a draft's step   ->  its sessions' targets
    results of a target's round -> commits to the drafts, then tokens to the clients

Neither waits for anything: what a target verifies is its own choice, from what has come by then.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.coordinator.sessions import clock
from outrider.coordinator.sessions.generation import Generation
from outrider.coordinator.sessions.messages import FaultKind, GrowthBatch, Outcome, RoundResults, SessionFault
from outrider.coordinator.sessions.session import Drafter, Session
from outrider.coordinator.sessions.totals import Totals
from outrider.coordinator.workers.drafts import Drafts
from outrider.coordinator.workers.target_peer import TargetPeer
from outrider.drafting.draft_distribution import pack_distributions
from outrider.drafting.growth_source import GrowthSource, to_proto
from outrider.sampling import SpeculationMode
from outrider.v1 import draft_pb2, target_pb2
from outrider.wire import entries_of, floats_to_bytes, rows_of, uints_to_bytes

if TYPE_CHECKING:
    from outrider.coordinator.sessions.scheduler import Scheduler

# Requests that are written to their clients at once, of which one begins in a turn of the event loop: gRPC reports the
# ends of reads and writes in one line, where further writes would delay results and growth. What a request gets until
# it is its turn goes out as one message.
_WRITES_AT_ONCE = 8
# A write that takes longer waits for its client, and no other waits for it.
_PATIENCE_NS = 10_000_000
_ASYNC = SpeculationMode.ASYNC
_ENDED = SessionFault(kind=FaultKind.LOST, message="the target ended it before its time")


class Relay:
    """Hands on growth, commits and tokens."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        targets: Mapping[str, TargetPeer],
        drafts: Drafts,
        totals: Totals,
        scheduler: "Scheduler",
    ) -> None:
        self._sessions, self._targets, self._drafts = sessions, targets, drafts
        self._totals, self._scheduler = totals, scheduler
        # Requests whose readers wait while there are tokens for them, in the order in which both were so.
        self._line: dict[Generation, None] = {}
        # Of those that are written now, since when.
        self._written: dict[Generation, int] = {}
        self._delivery: asyncio.Handle | None = None

    # ---------------------------------------------------------------------------------------------------------- growth

    def take_growth(self, worker_id: str, growth: GrowthBatch) -> None:
        """Hand on what a draft has grown; it may be late, for sessions that have ended, or of old epochs."""
        peer, taken = self._drafts.peers.get(worker_id), 0
        self._totals.grown_nodes += len(growth.node_ids)
        if peer is None:
            self._totals.dropped_nodes += len(growth.node_ids)
            return
        source, is_model = growth.source, growth.source is GrowthSource.MODEL
        grown, relayed = list[int](), 0
        # Row, epoch at the target and place of each session's part.
        rows_by_target: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        drafter = Drafter(worker_id, source)
        columns = zip(
            growth.session_ids[:], growth.epochs[:], growth.again, growth.forgot, growth.complete,
            growth.node_counts[:], strict=True,
        )  # fmt: skip
        for row, (session_id, epoch, is_again, has_forgotten, is_complete, count) in enumerate(columns):
            session = self._sessions.get(session_id)
            # What a worker grows without having been asked for this source has no place.
            if session is None or session.draft_epochs.get(worker_id) != epoch or drafter not in session.places:
                continue
            if session.is_watched:
                self._show_growth(drafter, session, growth, row)
            if count and not is_again:
                taken += count
                session.sources.note_growth(source, count)
                if is_model and session.mode is _ASYNC:
                    grown.append(row)
            # None while it is nowhere.
            if (target := self._targets.get(session.target_id or "")) is None:
                continue
            relayed += count
            if is_again or has_forgotten:
                self._tell_changes(target, session, drafter, growth, row)
            if count or is_complete:
                rows_by_target[target.worker_id].append((row, session.target_epoch, session.places.index(drafter)))
        self._totals.dropped_nodes += len(growth.node_ids) - relayed
        self._totals.sources.note_growth(source, taken)
        if is_model:
            # Nodes of one step that have the same parent were grown by expanding it.
            self._totals.demand.note_growth(
                peer.link.step_latency.mean_ns,
                steps=growth.steps,
                sessions=len(grown),
                expanded=growth.count_parents(grown),
            )
        for target_id, target_rows in rows_by_target.items():
            rows, epochs, places = zip(*target_rows, strict=True)
            self._targets[target_id].link.grow(_relayed(growth, rows, epochs, places))

    @staticmethod
    def _show_growth(drafter: Drafter, session: Session, growth: GrowthBatch, number: int) -> None:
        """Show one session's part to whoever traces it, or watches its tree."""
        session.note_growth(drafter.worker_id, as_of=growth.as_of[number], nodes=growth.node_counts[number])
        if session.tap is not None:
            session.tap.note_growth(drafter.worker_id, growth, number)

    @staticmethod
    def _tell_changes(target: TargetPeer, session: Session, drafter: Drafter, growth: GrowthBatch, number: int) -> None:
        """Tell a target what a draft says of the trees of the session that it has sent so far."""
        if growth.forgot[number]:
            for place in session.places_of(drafter.worker_id):
                target.change_place(session, place, target_pb2.PLACE_CHANGE_TAKEN)
        if growth.again[number]:
            session.asked_again.discard(drafter)
            target.change_place(session, session.places.index(drafter), target_pb2.PLACE_CHANGE_RESENT)

    # --------------------------------------------------------------------------------------------------------- results

    def take_results(self, worker_id: str, results: RoundResults) -> None:
        """Take what a round has given its sessions: drafts hear at once, clients after that."""
        target, now_ns = self._targets.get(worker_id), clock.now_ns()
        if target is None:
            return
        message = results.message
        open_sessions = [
            (row, session)
            for row, (session_id, epoch) in enumerate(zip(message.session_ids[:], message.epochs[:], strict=True))
            if (session := self._session_of(target, session_id, epoch)) is not None
        ]
        try:
            self._commit(open_sessions, message)
        finally:
            # Tokens are kept even if a draft's link fails.
            outcomes = results.outcomes
            self._take(target, [(session, outcomes[row]) for row, session in open_sessions], results, now_ns)

    def _take(
        self, target: TargetPeer, outcomes: Sequence[tuple[Session, Outcome]], results: RoundResults, now_ns: int
    ) -> None:
        """Add a round's tokens to its sessions, count them, and see to those that have ended."""
        taken, ended = list[tuple[Session, Outcome, int]](), list[Session]()
        for session, outcome in outcomes:
            # Another choice of its request may have ended it.
            if session.is_finished:
                continue
            if outcome.token_ids:
                since_ns, kept = session.committed_ns, session.take(outcome, results, now_ns)
                taken.append((session, kept, since_ns))
                generation = session.generation
                if generation.is_awaited:
                    self._line[generation] = None
                elif generation.is_stalled:
                    self.hold(session, is_held=True)
            if session.result is not None or outcome.is_over:
                ended.append(session)
            elif outcome.lost and not session.is_finished:
                self._drafts.ask_for_lost(session, outcome.lost)
        target.note_round([session for session, _, _ in taken])
        self._totals.note_round(results, taken, now_ns)
        self._scheduler.note_progress([session for session, _, _ in taken])
        for session in [*(one for one, _, _ in taken if not one.generation.times.first_token_ns), *ended]:
            # First tokens are waited for; the end of a request is told behind the tokens of all its choices.
            session.deliver()
        for session in ended:
            self._end(session)
        for error in results.message.errors:
            if (session := self._session_of(target, error.session_id, error.epoch)) is not None:
                self._scheduler.take_fault(session, SessionFault.of(error))
        self._deliver_soon()

    def _commit(self, open_sessions: Sequence[tuple[int, Session]], results: target_pb2.RoundResults) -> None:
        """Tell drafts what their sessions, each with its row, have got, before anything else is done with it.

        A session that has ended with it, perhaps before the last token, is closed there next.
        """
        counts = results.token_counts[:]
        # Rows, epochs and positions.
        rows_by_draft: defaultdict[str, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
        for row, session in open_sessions:
            if counts[row]:
                position = len(session.token_ids)
                for draft_id, epoch in session.draft_epochs.items():
                    rows, epochs, positions = rows_by_draft[draft_id]
                    rows.append(row)
                    epochs.append(epoch)
                    positions.append(position)
        for draft_id, (rows, epochs, positions) in rows_by_draft.items():
            self._drafts.peers[draft_id].link.commit(
                draft_pb2.CommitBatch(
                    session_ids=rows_of(results.session_ids, rows),
                    epochs=epochs,
                    positions=positions,
                    token_counts=rows_of(results.token_counts, rows),
                    tokens=entries_of(results.tokens, counts, rows),
                )
            )

    def _end(self, session: Session) -> None:
        """See to a session that has ended, as it should or not."""
        if session.result is not None:
            self._scheduler.finish_session(session)
        elif not session.is_finished:
            self._scheduler.take_fault(session, _ENDED)

    def _session_of(self, target: TargetPeer, session_id: int, epoch: int) -> Session | None:
        """Return the session if it is this target's under this epoch, and goes on."""
        session = target.sessions.get(session_id)
        if session is None or session.target_epoch != epoch or session.target_id != target.worker_id:
            return None
        return None if session.is_finished else session

    # --------------------------------------------------------------------------------------------------------- clients

    def serve_reader(self, generation: Generation) -> None:
        """A reader waits for more: it gets what has gathered while it was busy, and its sessions go on."""
        self._end_write(generation)
        for session in generation.sessions:
            if session.is_held:
                self.hold(session, is_held=False)
        if any(session.has_news for session in generation.sessions):
            self._line[generation] = None
        self._deliver_soon()

    def forget(self, generation: Generation) -> None:
        """Forget a request that has ended: nothing of it is written any more."""
        self._line.pop(generation, None)
        self._end_write(generation)
        self._deliver_soon()

    def _end_write(self, generation: Generation) -> None:
        if self._written.pop(generation, None) is not None and self._delivery is not None:
            # It may be set for when the write would have taken too long.
            self._delivery.cancel()
            self._delivery = None

    def _deliver_soon(self) -> None:
        if not self._line or self._delivery is not None:
            return
        loop = asyncio.get_running_loop()
        if len(self._written) < _WRITES_AT_ONCE:
            self._delivery = loop.call_soon(self._deliver)
        else:
            self._delivery = loop.call_later(_PATIENCE_NS / 1e9, self._deliver)

    def _deliver(self) -> None:
        """Have the next request written to its client, unless `_WRITES_AT_ONCE` are being written."""
        self._delivery, now_ns = None, clock.now_ns()
        self._written = {
            generation: since_ns for generation, since_ns in self._written.items() if now_ns - since_ns < _PATIENCE_NS
        }
        while self._line and len(self._written) < _WRITES_AT_ONCE:
            generation = next(iter(self._line))
            del self._line[generation]
            if not generation.is_awaited:
                # It got all by the way, with an end or a first token.
                continue
            for session in generation.sessions:
                session.deliver()
            if not generation.is_awaited:
                self._written[generation] = now_ns
            break
        self._deliver_soon()

    def hold(self, session: Session, *, is_held: bool) -> None:
        """Let a session rest at its target, or go on."""
        target = self._targets.get(session.target_id or "")
        if target is not None and not session.is_finished:
            target.hold(session, is_held=is_held)


def _relayed(
    growth: GrowthBatch, rows: Sequence[int], epochs: Sequence[int], places: Sequence[int]
) -> target_pb2.RelayedGrowth:
    """Return some rows of growth under the epochs and places that their target knows."""
    counts, complete, nodes = growth.node_counts, rows_of(growth.complete, rows), growth.nodes_of(rows)
    tokens = growth.tokens[nodes]
    distributions = growth.distributions and entries_of(growth.distributions, counts, rows)
    return target_pb2.RelayedGrowth(
        session_ids=rows_of(growth.session_ids, rows),
        epochs=epochs,
        places=places,
        as_of=rows_of(growth.as_of, rows),
        node_counts=rows_of(counts, rows),
        node_ids=uints_to_bytes(growth.node_ids[nodes]),
        parents=uints_to_bytes(growth.parents[nodes]),
        tokens=uints_to_bytes(tokens),
        acceptance=floats_to_bytes(growth.acceptance[nodes]),
        sources=() if growth.source is GrowthSource.MODEL else [to_proto(growth.source)] * len(tokens),
        distributions=pack_distributions(distributions) if distributions else None,
        complete=complete if any(complete) else (),
    )
