"""Sessions that are opened together and decoded to their ends, and what is recorded of their rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from benchmarks.rounds.drafters import Grown, ReplayDrafter

from outrider.drafting.growth_source import GrowthSource
from outrider.kernels.verification.report import ReportColumn, RoundTime
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.observer import RoundObserver
from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions.requests import OpenRequest

INCARNATION = 1
# Messages of growth between two looks at the device.
_AT_ONCE = 16
# By the number of its message modulo so many, an accepted node tells which message brought it.
_KINDS = 8


@dataclass(kw_only=True, eq=False)
class BenchSession:
    """A session of a measurement.

    Attributes:
        number: its id.
        prompt, sampling, sources: as it is opened.
        output: committed so far.
        messages: of growth, so far.
    """

    number: int
    prompt: Sequence[int]
    sampling: SamplingSpec
    sources: Collection[GrowthSource] = ()
    output: list[int] = field(default_factory=list)
    messages: int = 0


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Tokens that a round has committed of a session.

    Attributes:
        number: of the session.
        tokens: in order.
        kinds: of each accepted node, the bit set of the messages that brought it, modulo eight.
    """

    number: int
    tokens: Sequence[int]
    kinds: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round as it was reported.

    Attributes:
        generation: in which generation.
        measured: whether it counts: all sessions run, another round came before, and no prompt is computed.
        times_ns: moments by `RoundTime`, on the device's clock.
        sessions: with verified rows.
        rows: verified.
        tokens: committed.
        accepted: nodes among them.
        drafted_ns: what growth steps of a resident drafter took before it.
        commits: by session, where they are kept.
    """

    generation: int
    measured: bool
    times_ns: Sequence[int]
    sessions: int
    rows: int
    tokens: int
    accepted: int
    drafted_ns: int = 0
    commits: Sequence[Commit] = ()


@dataclass(frozen=True, kw_only=True)
class Span:
    """Time that the host has spent on a stage."""

    stage: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Written:
    """Growth as it was written into the inbox.

    Attributes:
        kind: number of its message among the session's, modulo eight.
        at_ns: when, on the host's clock.
        grown: the nodes.
    """

    kind: int
    at_ns: int
    grown: Grown


class Recorder(RoundObserver):
    """Records rounds.

    Args:
        keeps: whether commits, growth and the host's stages are kept too.

    Attributes:
        rounds: reported.
        spans, written: of the generation under way, where they are kept.
        generation: its number.
        measures: whether rounds that are reported now count.
        counted, counted_ns: rounds that count, and their time.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self.rounds: list[Round] = []
        self.spans: list[Span] = []
        self.written: list[Written] = []
        self.generation, self.measures = 0, False
        self.counted = self.counted_ns = 0
        self._stage, self._began_ns, self._has_read = "", 0, False

    def reported(
        self,
        report: RoundReport,
        results: Sequence[SessionResult],
        *,
        prefill_rows: int,
        plain_ns: int,
        drafted_ns: int,
    ) -> None:
        """See `RoundObserver`."""
        columns = report.columns[:, : report.sessions]
        commits = [
            Commit(number=result.key[1], tokens=result.tokens, kinds=result.drafters)
            for result in (results if self.keeps else ())
        ]
        round_ = Round(
            generation=self.generation,
            measured=self.measures and not prefill_rows,
            times_ns=report.times_ns,
            sessions=report.sessions,
            rows=report.verified_rows,
            tokens=int(columns[ReportColumn.TOKENS].sum()),
            accepted=int(columns[ReportColumn.ACCEPTED].sum()),
            drafted_ns=drafted_ns,
            commits=commits,
        )
        if round_.measured:
            self.counted += 1
            self.counted_ns += round_.times_ns[RoundTime.ENDED] - self.rounds[-1].times_ns[RoundTime.ENDED]
        self.rounds.append(round_)
        self._has_read = True

    def planning(self) -> None:
        """See `RoundObserver`."""
        self.begin("plan")

    def launching(self) -> None:
        """See `RoundObserver`."""
        self.begin("launch")

    def launched(self) -> None:
        """See `RoundObserver`."""
        self.begin("read")

    def begin_generation(self) -> None:
        """Start a new set of records: other sessions are opened."""
        self.generation += 1
        self.measures = False
        self.spans.clear()
        self.written.clear()

    def begin(self, stage: str) -> None:
        """End the host's stage, and begin another; a look at the device that finds nothing is none."""
        if not self.keeps:
            return
        now = time.perf_counter_ns()
        if self._stage and (self._stage != "read" or self._has_read):
            self.spans.append(Span(stage=self._stage, begin_ns=self._began_ns, end_ns=now))
        self._stage, self._began_ns, self._has_read = stage, now, False

    def wrote(self, written: Written) -> None:
        """Growth has been written."""
        if self.keeps:
            self.written.append(written)


class Driver:
    """Decodes sessions by a loop's rounds, with growth of a drafter.

    Args:
        loop: the rounds.
        drafter: None: plain rounds.
        recorder: of the rounds.
        may_measure: whether rounds count by now; asked after each result.

    Attributes:
        lost: messages of the target that growth was lost.
    """

    def __init__(
        self, loop: RoundLoop, drafter: ReplayDrafter | None, recorder: Recorder, *, may_measure: Callable[[], bool]
    ) -> None:
        self._loop, self._drafter, self._recorder, self._may_measure = loop, drafter, recorder, may_measure
        self._open: dict[int, BenchSession] = {}
        self.lost = 0
        loop.observer = recorder

    def generate(self, sessions: Sequence[BenchSession], *, is_enough: Callable[[], bool]) -> None:
        """Open sessions, and decode them until all have ended or it is enough.

        Raises:
            RuntimeError: a session has failed.
        """
        loop, recorder = self._loop, self._recorder
        recorder.begin_generation()
        self._open = {session.number: session for session in sessions}
        for session in sessions:
            loop.open(_request(session))
            if self._drafter is not None:
                self._drafter.open(session.number, session.prompt, session.sampling)
        while self._open and not is_enough():
            self._grow()
            recorder.begin("read")
            results = loop.turn()
            recorder.begin("")
            for result in results:
                self._note(result)
            if results:
                recorder.measures = self._measures(sessions)
            else:
                time.sleep(0)
        for number in list(self._open):
            self._end(number)
            loop.close((INCARNATION, number), 1)
        while loop.has_work:
            loop.turn()

    def _measures(self, sessions: Sequence[BenchSession]) -> bool:
        """True once rounds count: all sessions run and, as far as that comes early, have grown."""
        if len(self._open) < len(sessions) or not all(session.output for session in sessions):
            return False
        is_late = any(2 * len(session.output) > session.sampling.max_new_tokens for session in sessions)
        grows = self._drafter is None or is_late or all(session.messages for session in sessions)
        return grows and self._may_measure()

    def _grow(self) -> None:
        if self._drafter is None:
            return
        for _ in range(_AT_ONCE):
            grown = self._drafter.take(time.perf_counter_ns())
            if grown is None:
                return
            if (session := self._open.get(grown.number)) is not None:
                self._write(session, grown)

    def _write(self, session: BenchSession, grown: Grown) -> None:
        kind = session.messages % _KINDS
        session.messages += 1
        self._loop.grow(
            Growth.of_session(
                (INCARNATION, session.number),
                1,
                0,
                grown.as_of,
                grown.node_ids,
                grown.parents,
                grown.tokens,
                grown.acceptances,
                drafter=kind,
            )
        )
        self._recorder.wrote(Written(kind=kind, at_ns=time.perf_counter_ns(), grown=grown))

    def _note(self, result: SessionResult) -> None:
        number = result.key[1]
        session = self._open.get(number)
        if session is None:
            return
        if result.fault is not None:
            raise RuntimeError(f"session {number}: {result.fault}")
        session.output += result.tokens
        if result.finish is not Finish.NONE:
            self._end(number)
            return
        if self._drafter is None:
            return
        if result.tokens:
            self._drafter.commit(number, result.tokens, time.perf_counter_ns())
        self.lost += bool(result.lost)

    def _end(self, number: int) -> None:
        del self._open[number]
        if self._drafter is not None:
            self._drafter.close(number)


def _request(session: BenchSession) -> OpenRequest:
    return OpenRequest(
        key=(INCARNATION, session.number),
        epoch=1,
        prompt=session.prompt,
        output=(),
        sampling=session.sampling,
        sources=session.sources,
    )
