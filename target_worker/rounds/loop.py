"""The rounds of a target worker, back to back, one launched ahead of the report that is read.

    read        results of the last round that has ended, bucket and time for the next
    plan        slots for sessions that run, and for those that wait to begin
    grow        steps of a resident drafter, as many as pay
    launch      the next round, with the next parts of prompts

Commands (`open`, `grow`, `limit`, `close`) become records of the device's inbox, and take part in the next round that
begins. Nothing waits for a coordinator. One thread calls everything here; a grammar that has been compiled is noted by
the thread that compiles it.

Some sessions have a say in who takes part in a round: one in sync mode does once its tree is whole, one that is marked
alone when no other does. While there are such sessions no round is launched ahead.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.engine.model_runner import ModelCard, ModelRunner
from outrider.engine.round_rings import Early, Inbox, Report, Rounds
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.pool.records import Records
from outrider.kernels.pool.select import GAIN_SCALE
from outrider.kernels.verification.report import ReportColumn, RoundTime
from outrider.kernels.verification.walk import Finish
from outrider.roles.start_progress import report_stage
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.admission import Admission, Chunk
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.kv import RowKv
from outrider.target_worker.rounds.observer import RoundObserver
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.round_times import Demand, RoundTimes, times_of_buckets
from outrider.target_worker.rounds.session import Level, Session, SessionResult
from outrider.target_worker.rounds.step_cost import StepShape, prefill_pairs
from outrider.target_worker.sessions.requests import (
    Code,
    OpenRequest,
    SessionFault,
    SessionKey,
    check_open,
    fit_fault,
)
from outrider.wire import split_by_counts

# Where a round has left a tree that has not got the last token.
_LEFT = (TreeEnd.MISSED, TreeEnd.STARVED)
# Nodes of a lower value are never worth a row, whatever a row costs.
_LEAST_VALUE = 0.01


@dataclass(kw_only=True, eq=False)
class _Launched:
    """A round under way: its bucket, its chunks, growth steps before it, and the sum of the values that it verifies."""

    bucket: int
    chunks: list[Chunk]
    growth_steps: int = 0
    expected: float = 0.0


class RoundLoop:
    """All sessions of a target, and its rounds.

    Args:
        runner: the target.
        config: sizes.
        times: what rounds take; by default learned from them.
        program: runs rounds; by default one of the target.

    Attributes:
        rounds_read: rounds whose results have been read.
        wake: called, on any thread, when a session that waited may go on, though no command has come.
        observer: hooks for programs that measure.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: RoundConfig,
        *,
        times: RoundTimes | None = None,
        program: RoundProgram | None = None,
    ) -> None:
        self._runner, self._config = runner, config
        self._program = program or RoundProgram.of_runner(runner, config)
        self._drafter = self._program.drafter
        report_stage("warming up (compiles the first time)")
        self._program.warm_up()
        self._inbox = Inbox(self._program.memory, rows=config.max_sessions)
        self._rounds = Rounds(self._program.memory, self._inbox)
        self._kv = RowKv(runner.slots, remembers=runner.config.enable_prefix_caching)
        self._admission = Admission(self._inbox, self._program, self._kv, config)
        self._grammars = GrammarCompiler.of_checkpoint(runner.config.model_path)
        self._times = times or times_of_buckets(
            self._program.buckets,
            self._program.captured_ns,
            slowdown=config.prefill_slowdown,
            on_gpu=runner.device.type == "cuda",
        )
        # By key, in the order of their first opening; by row, those that the device knows.
        self._sessions: dict[SessionKey, Session] = {}
        self._by_row = self._admission.by_row
        self._results: list[SessionResult] = []
        self._launched: deque[_Launched] = deque()
        self._gains = np.zeros(len(self._program.buckets), np.int64)
        self._can_run, self._has_changed, self._level = False, False, Level.PLAIN
        # Whose turn the next round is: that of a session that is alone, None for that of all others.
        self._turn: SessionKey | None = None
        # When the first session in sync mode has waited long enough.
        self._due_ns: int | None = None
        self._opened = self._ended_ns = self._verified_rows = 0
        self.rounds_read = 0
        self.wake: Callable[[], None] = lambda: None
        self.observer = RoundObserver()

    @property
    def model(self) -> ModelCard:
        """Card of the target model."""
        return self._runner.info

    @property
    def config(self) -> RoundConfig:
        """Configuration of the rounds."""
        return self._config

    @property
    def session_count(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def keys(self) -> Collection[SessionKey]:
        """Keys of the open sessions."""
        return self._sessions.keys()

    @property
    def kv(self) -> RowKv:
        """KV slots by row."""
        return self._kv

    @property
    def preemptions(self) -> int:
        """Number of times that a session lost its KV to an older one."""
        return self._admission.preemptions

    @property
    def is_busy(self) -> bool:
        """True while rounds are under way."""
        return self._rounds.under_way > 0

    @property
    def has_work(self) -> bool:
        """True if another `turn` would do something without another command."""
        if self.is_busy or self._inbox.has_records or self._has_changed or self._results:
            return True
        return self._has_running or self._has_chunks

    @property
    def due_s(self) -> float | None:
        """Seconds after which a `turn` does something though it has no work now; None if none will."""
        return None if self._due_ns is None else max(self._due_ns - time.monotonic_ns(), 0) / 1e9

    def open(self, request: OpenRequest) -> None:
        """Open a session, or replace it if it is open under an older epoch.

        Raises:
            SessionFault: an older epoch, tokens or parameters out of range, no room.
        """
        held = self._sessions.get(request.key)
        if held is not None and request.epoch < held.epoch:
            raise SessionFault(Code.FAILED_PRECONDITION, f"epoch {request.epoch} is over: {held.epoch} is open")
        ids = np.array([*request.prompt, *request.output], dtype=np.int64)
        info = self._runner.info
        check_open(
            request,
            ids,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_slots=self._kv.slots.num_slots,
            logprobs=self._config.logprobs,
        )
        if held is None and len(self._sessions) >= self._config.max_sessions:
            message = f"all {self._config.max_sessions} rows are taken: raise max_num_seqs"
            raise SessionFault(Code.RESOURCE_EXHAUSTED, message)
        if held is not None:
            self._end(held)
        self._opened += 1
        session = Session.of_request(
            request,
            ids,
            order=self._opened,
            max_model_len=self._config.max_model_len,
            held=held,
            grammar=self._grammar_of(request.sampling),
            # Until it is its turn: the rounds under way may be those of one that is alone.
            is_aside=request.is_alone or any(other.is_alone for other in self._sessions.values()),
        )
        if session.length >= session.limit:
            self._results.append(SessionResult(key=session.key, epoch=session.epoch, finish=Finish.LENGTH))
        else:
            self._sessions[request.key] = session
            self._plan()

    def grow(self, growth: Growth) -> None:
        """Add nodes that a drafter has made; those of sessions that are not open under their epoch are dropped.

        So are nodes of sessions without speculation, and in sync mode those for another length than it has.
        """
        openings: list[tuple[int, int] | None] = []
        columns = zip(growth.keys, growth.epochs, growth.places, growth.as_of, strict=True)
        for number, (key, epoch, place, as_of) in enumerate(columns):
            session, opening = self._sessions.get(key), None
            if session is not None and session.takes_growth(epoch, as_of):
                if session.is_open:
                    opening = session.row, session.generation
                    if growth.complete and growth.complete[number]:
                        session.tree_at = as_of
                else:
                    # Its row comes later: the tree is to be sent again.
                    session.lost |= 1 << place
            openings.append(opening)
        if growth.distributions:
            self._keep_distributions(growth, openings)
        self._inbox.put(growth.records(openings))

    def _keep_distributions(self, growth: Growth, openings: Sequence[tuple[int, int] | None]) -> None:
        for key, opening, span in zip(growth.keys, openings, split_by_counts(growth.counts), strict=True):
            if opening is not None and any(own := growth.distributions[span]):
                self._sessions[key].add_distributions(growth.node_ids[span].tolist(), own)

    def forget(self, key: SessionKey, epoch: int, place: int) -> None:
        """Drop what the worker at a place has grown: another takes the place, or it has forgotten its tree."""
        session = self._session(key, epoch)
        if session is None:
            return
        session.workers |= 1 << place
        if session.is_open:
            records = Records()
            records.forget(session.row, session.generation, place=place)
            self._inbox.put(records.array())
            # Another worker may call its nodes the same.
            session.distributions.clear()

    def resend(self, key: SessionKey, epoch: int, place: int) -> None:
        """Note that the worker at a place sends its tree again from here on: nothing of it is lost any more."""
        session = self._session(key, epoch)
        if session is not None and session.is_open:
            records = Records()
            records.resent(session.row, session.generation, place=place)
            self._inbox.put(records.array())

    def leave(self, key: SessionKey, epoch: int, place: int) -> None:
        """Note that no worker has a place any more; what was grown there stays."""
        session = self._session(key, epoch)
        if session is not None:
            session.workers &= ~(1 << place)

    def limit(self, key: SessionKey, epoch: int, allow: int) -> None:
        """Set the length up to which a session may run ahead of its client; 0 holds it."""
        session = self._session(key, epoch)
        if session is not None and session.allow != allow:
            session.allow, self._has_changed = allow, True

    def hold(self, key: SessionKey, *, is_held: bool) -> None:
        """Let a session rest while nobody reads its results, or go on."""
        session = self._sessions.get(key)
        if session is not None and session.is_unread != is_held:
            session.is_unread, self._has_changed = is_held, True

    def separate(self, key: SessionKey, epoch: int, *, is_alone: bool) -> None:
        """Give a session rounds of its own, in turn with all others, or join it with these again."""
        session = self._session(key, epoch)
        if session is not None and session.is_alone != is_alone:
            session.is_alone, self._has_changed = is_alone, True

    def _session(self, key: SessionKey, epoch: int) -> Session | None:
        session = self._sessions.get(key)
        return session if session is not None and session.epoch == epoch else None

    def close(self, key: SessionKey, epoch: int) -> None:
        """Close a session that is open under this epoch or an older one; rounds under way no longer count for it."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            self._end(session)

    def turn(self) -> list[SessionResult]:
        """Read what rounds have reported, and launch the next one as soon as that is possible."""
        self._read()
        if not self.is_busy:
            self._release_trees()
            self._take_turns()
        if self._has_changed:
            self.observer.planning()
            self._plan()
        if self._may_launch():
            self.observer.launching()
            self._launch()
            self.observer.launched()
            if not self._program.runs_ahead:
                self._read()
        results, self._results = self._results, []
        return results

    def wait(self) -> None:
        """Let the device get on with the rounds under way, where a `turn` has found nothing new."""
        self._program.wait()

    def drain(self) -> list[SessionResult]:
        """Wait for the rounds under way."""
        self._wait()
        results, self._results = self._results, []
        return results

    def _wait(self) -> None:
        while self.is_busy:
            self._program.wait()
            self._read()

    def reload(self, folder: Path) -> None:
        """Put other weights in the place of those that the model runs with: closes all sessions, forgets all KV.

        Args:
            folder: as `check_weights` has found it to fit.

        Raises:
            CheckpointError: a file cannot be read; nothing may be run any more.
        """
        for session in list(self._sessions.values()):
            self._end(session)
        self._wait()
        self._level = Level.PLAIN
        while self._admission.is_closing:
            self._launch()
            self._wait()
        self._kv.slots.reclaim()
        self._runner.refill(folder)
        if self._program.drafter is not None:
            self._program.drafter.refill()

    def _read(self) -> None:
        """Read what rounds have written: what the next one may gain, and results."""
        while (event := self._rounds.poll()) is not None:
            if isinstance(event, Early):
                self._gains, rows = self._program.read_early(event.words)
                self._can_run = rows > 0
                launched = self._launched[0]
                launched.expected = max(int(self._gains[launched.bucket]), 0) / GAIN_SCALE
            else:
                self._note_report(event)

    def _note_report(self, report: Report) -> None:
        launched, read = self._launched.popleft(), RoundReport(report.words, self._program.shape)
        self._has_changed = True
        self.rounds_read += 1
        self._can_run = read.runnable > 0
        plain_ns, drafted_ns = self._learn(launched, read)
        logprobs, earlier = self._program.logprobs(report.round), len(self._results)
        self._note_chunks(launched, read)
        for number in range(read.sessions):
            if (session := self._session_of(read, number)) is not None:
                self._commit(session, number, read, logprobs)
        prefill_rows = sum(chunk.size for chunk in launched.chunks)
        self.observer.reported(
            read, self._results[earlier:], prefill_rows=prefill_rows, plain_ns=plain_ns, drafted_ns=drafted_ns
        )
        self._admission.released(report.released)

    def _learn(self, launched: _Launched, read: RoundReport) -> tuple[int, int]:
        """Learn what the round took, from the end of the one before if this one had begun by then.

        Returns:
            What it would have taken without nodes, and what growth steps before it took, in nanoseconds.
        """
        columns = read.columns[:, : read.sessions]
        shape = StepShape(
            verify_rows=read.verified_rows,
            keys=int(columns[ReportColumn.LENGTH].sum()),
            prefill_rows=sum(chunk.size for chunk in launched.chunks),
            pairs=sum(prefill_pairs(chunk.size, chunk.start) for chunk in launched.chunks),
        )
        began, ended = read.times_ns[RoundTime.BEGAN], read.times_ns[RoundTime.ENDED]
        tokens = int(columns[ReportColumn.TOKENS].sum())
        round_ns = ended - max(began, self._ended_ns)
        drafted_ns = 0 if self._drafter is None else self._drafter.read(launched.growth_steps)
        self._times.note(launched.bucket, shape, round_ns, tokens=tokens, drafted_ns=drafted_ns)
        if read.sessions:
            self._times.note_accepted(int(columns[ReportColumn.ACCEPTED].sum()), launched.expected)
        self._ended_ns, self._verified_rows = ended, read.verified_rows
        plain_ns = self._times.plain_ns(launched.bucket, shape, round_ns, sessions=read.sessions)
        if self._drafter is not None and read.sessions:
            self._drafter.note_round(columns, time_ns=round_ns + drafted_ns)
        return plain_ns, drafted_ns

    def _session_of(self, read: RoundReport, number: int) -> Session | None:
        """The session of a report's column; None if its row has been closed since."""
        row, generation = read.opening(number)
        session = self._by_row[row]
        return session if session is not None and session.generation == generation else None

    def _note_chunks(self, launched: _Launched, read: RoundReport) -> None:
        """Take note of the chunks that a round has computed; those that it had no room for are planned again.

        What a round computes may have been meant for the one before: records that the ring has no room for come late.
        """
        for number in range(read.sessions, read.sessions + read.chunks):
            if (session := self._session_of(read, number)) is not None:
                # The root's own KV, and that of nodes, are taken note of as they are committed.
                session.cached = min(read.value(ReportColumn.CACHED, number), session.length - 1)
                session.reached = max(session.reached, session.cached)
        for chunk in launched.chunks:
            chunk.plan_again()

    def _commit(self, session: Session, number: int, read: RoundReport, logprobs: npt.NDArray[np.int32]) -> None:
        """Take what a round has committed of one session."""
        tokens, accepted, drafters = read.walk(number)
        finish, rows = read.finish(number), read.value(ReportColumn.ROWS, number)
        fault = session.fault() if finish is Finish.FAULT else None
        if tokens:
            if not session.is_shared:
                # Not before: what a fault has left in the cache is nobody's.
                self._kv.share(session.row, session.history[: session.length - 1])
                session.is_shared = True
            if kept := accepted[: len(tokens) - 1]:
                self._kv.slots.reorder(session.row, session.length - 1, rows, [0, *kept])
            if session.has_host_stops:
                finish = session.end_at_stop(tokens, finish)
                del accepted[len(tokens) :], drafters[len(tokens) :]
            session.commit(tokens)
            if self._drafter is not None:
                self._drafter.commit(session.row, tokens)
            if session.sampling.forced_token_ids:
                self._admission.grow_known(session)
        if finish is Finish.NONE and session.length > self._kv.slots.num_slots:
            fault = fit_fault(session.length, self._kv.slots.num_slots)
        lost = self._lost(session, number, read)
        if tokens or lost or fault is not None:
            result = SessionResult(
                key=session.key,
                epoch=session.epoch,
                round=self.rounds_read,
                tokens=tokens,
                accepted=len(accepted),
                selected=rows - 1,
                selected_by_kind=read.selected_by_kind(number),
                grown_by_kind=self._drafter.take_grown(session.row) if self._drafter and tokens else (0, 0, 0),
                tree_end=read.tree_end(number),
                drafters=drafters,
                finish=finish,
                logprobs=read.logprobs(number, len(tokens), session.sampling.logprobs, logprobs),
                cached_tokens=session.cached_tokens,
                lost=lost,
                fault=fault,
            )
            self._results.append(result)
        if finish is not Finish.NONE or fault is not None:
            self._end(session, remembers=finish is not Finish.FAULT)

    def _lost(self, session: Session, number: int, read: RoundReport) -> int:
        """Return the bit set over draft workers' places with lost growth.

        A resident drafter whose growth was lost begins its tree anew, once the round has left the tree that there is.
        """
        lost, drafter = read.value(ReportColumn.LOST, number), self._drafter
        if drafter is not None and lost >> drafter.place and read.tree_end(number) in _LEFT:
            records = Records()
            records.forget(session.row, session.generation, place=drafter.place)
            records.resent(session.row, session.generation, place=drafter.place)
            self._inbox.put(records.array())
            drafter.forget(session.row)
        return lost & (1 << self._config.places) - 1

    def _plan(self) -> None:
        """Hand out rows and slots; sessions that have begun again learn that their trees are to be sent again."""
        self._has_changed = False
        self._admission.plan(self._sessions.values())
        for session in self._by_row:
            # From here on its trees are taken: it may wait for one.
            if session is not None and session.lost:
                self._results.append(SessionResult(key=session.key, epoch=session.epoch, lost=session.lost))
                session.lost = 0

    def _end(self, session: Session, *, remembers: bool = True) -> None:
        del self._sessions[session.key]
        self._has_changed = True
        if session.is_open:
            self._admission.close(session, remembers=remembers)

    def _may_launch(self) -> bool:
        if not self._rounds.may_launch(can_run=True):
            return False
        active = [session for session in self._by_row if session is not None and session.is_active]
        self._level = max((session.level for session in active if not session.is_aside), default=Level.PLAIN)
        if self.is_busy and (self._level is Level.HOSTED or any(one.bars_launch_ahead for one in active)):
            return False
        return self._rounds.may_launch(self._has_running or self._has_chunks)

    def _release_trees(self) -> None:
        """Let sessions in sync mode take part in the next round: those whose trees are whole, or waited for no more."""
        self._due_ns, now_ns = None, time.monotonic_ns()
        for session in self._by_row:
            if session is None or not session.is_waiting or not session.is_prefilled:
                continue
            if session.waits_since_ns is None:
                session.waits_since_ns = now_ns
            due_ns = session.waits_since_ns + session.sync_wait_ns
            is_whole = session.tree_at == session.length and not self._inbox.is_queued(session.row)
            if is_whole or not session.workers or now_ns >= due_ns:
                session.is_waiting, self._has_changed = False, True
            else:
                self._due_ns = due_ns if self._due_ns is None else min(due_ns, self._due_ns)

    def _take_turns(self) -> None:
        """Set sessions aside for the next round: all but one that is alone, or those that are."""
        sessions = self._sessions.values()
        turns = [None, *(session.key for session in sessions if session.is_alone)]
        last = turns.index(self._turn) if self._turn in turns else 0
        wanting = {session.key if session.is_alone else None for session in sessions if session.wants_turn}
        self._turn = next((turn for turn in turns[last + 1 :] + turns[: last + 1] if turn in wanting), turns[last])
        for session in sessions:
            is_aside = self._turn != (session.key if session.is_alone else None)
            if session.is_aside != is_aside:
                session.is_aside, self._has_changed = is_aside, True

    @property
    def _has_running(self) -> bool:
        """True if the next round would verify a session."""
        if self.is_busy:
            return self._can_run
        # The device may take a session for running that is kept from it, or not know yet that one is.
        return any(
            session is not None and session.is_running and (self._can_run or session.sent_reach != session.reach)
            for session in self._by_row
        )

    @property
    def _has_chunks(self) -> bool:
        return any(session.is_prefilling for session in self._sessions.values())

    def _send_reach(self) -> None:
        """Tell the device how far sessions may go, each once it has reported what it was told before."""
        launched = self.rounds_read + len(self._launched)
        for session in self._by_row:
            if session is None or session.sent_reach == session.reach or session.sent_round > self.rounds_read:
                continue
            records = Records()
            records.limits(session.row, session.generation, end=session.limit, allow=session.reach)
            self._inbox.put(records.array())
            session.sent_reach, session.sent_round = session.reach, launched + 1

    def _launch(self) -> None:
        self._send_reach()
        running = [session for session in self._by_row if session is not None and session.is_running]
        prompts = [session for session in self._sessions.values() if session.is_prefilling]
        # Those whose last chunk is under way are running by then.
        entering = sum(session.is_entering for session in self._sessions.values())
        is_sync = any(session.is_sync for session in running)
        demand = Demand(
            sessions=len(running) + entering,
            keys=sum(session.length for session in running),
            rows=max(len(running), self._verified_rows),
            prompts=len(prompts),
            missing=sum(session.length - 1 - session.planned for session in prompts),
            context=min(prompts, key=lambda session: session.order).planned if prompts else 0,
            takes_all_nodes=is_sync,
        )
        bucket, allowance = self._times.plan(self._gains, demand)
        planned = self._admission.plan_chunks(prompts, allowance)
        prefill = sum(chunk.size for chunk in planned)
        least_value = 0.0 if is_sync else max(self._times.least_value, _LEAST_VALUE)
        self.observer.composed(self._level, sessions=len(running), prefill_rows=prefill)
        growth_steps = 0
        if self._drafter is not None:
            rates = partial(self._times.drafted_rates, demand)
            growth_steps = self._drafter.grow([session for session in self._by_row if session is not None], rates)
        self._program.launch(bucket, self._level, self._by_row, least_value=least_value)
        self._launched.append(_Launched(bucket=bucket, chunks=planned, growth_steps=growth_steps))
        self._rounds.launched()

    def _grammar_of(self, sampling: SamplingSpec) -> SessionGrammar | None:
        if not sampling.grammar:
            return None

        def is_compiled() -> None:
            self._has_changed = True
            self.wake()

        compiled = self._grammars.start(sampling.grammar, sampling.grammar_end_ids, is_compiled)
        return SessionGrammar(compiled, sampling.grammar_end_ids)
