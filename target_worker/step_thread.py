"""The one thread that runs the target model: merges what waits into one step, and prefills while nothing waits.

Several coordinators may stream to one target. What has arrived when a step ends becomes the next step, whoever sent
it, as long as no session would stand in it twice. Where the device takes steps one after the other by itself, the next
is begun while the first still runs, so that the device does not wait for the host in between. Batches take effect and
are answered in the order in which they came.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from outrider.errors import WorkerUnavailable
from outrider.metrics.worker import StepCounts
from outrider.step_holdups import StepHoldups
from outrider.step_watch import StepWatch
from outrider.target_worker.sessions import (
    Code,
    OpenRequest,
    Outcome,
    SessionFault,
    SessionKey,
    TreeRequest,
    TreeResult,
)
from outrider.target_worker.verifier import PendingStep, StepResult, Verifier
from outrider.worker import share_interpreter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Steps that are begun and not finished: one that runs, and one that waits for it.
_MOST_IN_FLIGHT = 2
# So long before a step is expected to end, the thread does nothing but wait for it: a batch that comes now is begun
# after it.
_EXPECTED_EARLY_S = 0.0003
# While it may still begin another step, it looks this often whether the one that runs is done.
_GLANCE_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One message of one coordinator.

    Attributes:
        opens: sessions to open.
        closes: (session, epoch) to close after the step.
        trees: to verify; none where the message only opens and closes.
    """

    opens: Sequence[OpenRequest] = ()
    closes: Sequence[tuple[SessionKey, int]] = ()
    trees: Sequence[TreeRequest] = ()


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """A batch's part of a step.

    Attributes:
        results: of its trees, in their order.
        faults: of its opens, with their (session, epoch).
        step: the whole step, over all coordinators; None where the batch had no trees.
    """

    results: Sequence[TreeResult]
    faults: Sequence[tuple[SessionKey, int, SessionFault]]
    step: StepResult | None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How full the target is; `busy` is the share of the time since the last report that steps took.

    Reports alone say how long the step that runs has been running, and whether it may be compiling.
    """

    sessions: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    steps: int = 0
    busy: float = 0.0
    step_age_s: float = 0.0
    is_preparing: bool = False


@dataclass(eq=False, slots=True)
class _Job:
    batch: Batch
    done: "Future[BatchResult]" = field(default_factory=Future)


_Faults = list[tuple[SessionKey, int, SessionFault]]


@dataclass(kw_only=True, eq=False, slots=True)
class _Flight:
    """Jobs whose step has begun.

    Attributes:
        jobs: whose step it is; none where the thread prefills by itself.
        keys: sessions that the jobs open or verify.
        faults: of each job's opens.
        late: what to close when the step is finished.
        pending: the step; None where the jobs have no trees.
        begin_s: when it began.
    """

    jobs: Sequence[_Job] = ()
    keys: frozenset[SessionKey] = frozenset()
    faults: Sequence[_Faults] = ()
    late: list[tuple[SessionKey, int]] = field(default_factory=list)
    pending: PendingStep | None = None
    begin_s: float = field(default_factory=time.perf_counter)


class StepThread:
    """Runs a verifier on a thread of its own.

    Args:
        make_verifier: called on that thread, so that everything of torch happens on one.
    """

    def __init__(self, make_verifier: Callable[[], Verifier]) -> None:
        self._make_verifier = make_verifier
        self._arrived = threading.Condition()
        self._jobs: list[_Job] = []
        self._alone: deque[tuple[Callable[[Verifier], object], Future[Any]]] = deque()
        self._stopping = False
        # Why a session's latest open failed, with its epoch, told with the session's first tree: an open without trees
        # is not answered.
        self._refused: dict[SessionKey, tuple[int, SessionFault]] = {}
        self._thread = threading.Thread(target=self._run, name="target-steps", daemon=True)
        self._flights: deque[_Flight] = deque()
        # How long steps of about so many rows usually take.
        self._usual_s: dict[int, float] = {}
        self._finished_s = 0.0
        self._may_prefill = True
        self._busy_ns = 0
        self._reported = (time.perf_counter_ns(), 0)
        self._gauges = Load()
        self._busy = 0.0
        self.watch = StepWatch()
        """Whether it still gets on."""
        self.counts = StepCounts()
        self._holdups = StepHoldups(logger, "verification")
        self.weights = ""
        """Version of the model's weights, where it is known; sessions that began with other ones are not opened."""
        self.ready: Future[Verifier] = Future()
        """Done when the model is loaded; its exception says why it could not be."""
        self.stopped: Future[None] = Future()
        """Done when the thread ends; its exception is what ended it."""
        # Whoever waits may give up waiting; that must not cancel what others wait for.
        self.ready.set_running_or_notify_cancel()
        self.stopped.set_running_or_notify_cancel()

    def start(self) -> None:
        """Starts the thread; `ready` tells when the model is there."""
        self._thread.start()

    def submit(self, batch: Batch) -> "Future[BatchResult]":
        """Queues a batch. Batches take effect in the order in which they come in."""
        job = _Job(batch)
        # Not to be cancelled: what a batch opens and closes has to happen whoever still waits for its results.
        job.done.set_running_or_notify_cancel()
        with self._arrived:
            if self._stopping or self.stopped.done():
                job.done.set_exception(WorkerUnavailable("the target worker is stopping"))
                return job.done
            self._jobs.append(job)
            self._arrived.notify()
        return job.done

    def run_alone(self, work: "Callable[[Verifier], Result]") -> "Future[Result]":
        """Has the thread run something while no step is in flight; batches that come meanwhile wait.

        What `work` raises ends the thread, as what a step raises does.
        """
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        with self._arrived:
            if self._stopping or self.stopped.done():
                done.set_exception(WorkerUnavailable("the target worker is stopping"))
                return done
            self._alone.append((work, done))
            self._arrived.notify()
        return done

    def stop(self) -> None:
        """Ends the thread after the step in flight; what still waits fails with WorkerUnavailable."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()

    @property
    def load(self) -> Load:
        """The load, `busy` as at the last report."""
        return replace(self._gauges, busy=self._busy)

    def report(self) -> Load:
        """The load, `busy` measured anew since the last call."""
        now, busy = time.perf_counter_ns(), self._busy_ns
        then, busy_then = self._reported
        self._reported = (now, busy)
        self._busy = min((busy - busy_then) / max(now - then, 1), 1.0)
        return replace(self.load, step_age_s=self.watch.age_s, is_preparing=self.watch.is_preparing)

    @property
    def waiting(self) -> int:
        """Batches that no step has begun with."""
        return len(self._jobs)

    def _run(self) -> None:
        share_interpreter()
        error: BaseException | None = None
        try:
            verifier = self._make_verifier()
            self._note(verifier)
            self._holdups.begin()
            self.ready.set_result(verifier)
            self._serve(verifier)
        except BaseException as failure:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            error = failure
        with self._arrived:
            self._stopping = True
            waiting, self._jobs = self._jobs, []
        waiting = [*(job for flight in self._flights for job in flight.jobs), *waiting]
        self._flights.clear()
        reason = "the target worker is stopping" if error is None else f"the target worker failed: {error}"
        while self._alone:
            self._alone.popleft()[1].set_exception(WorkerUnavailable(reason))
        for job in waiting:
            job.done.set_exception(WorkerUnavailable(reason))
        if error is None:
            self.stopped.set_result(None)
            return
        if not self.ready.done():
            self.ready.set_exception(error)
        self.stopped.set_exception(error)

    def _serve(self, verifier: Verifier) -> None:
        busy_from = time.perf_counter_ns()
        while True:
            with self._arrived:
                jobs = self._wait(verifier)
                stopping = self._stopping
            if not self._flights:
                busy_from = time.perf_counter_ns()
            if jobs:
                self._begin(verifier, jobs)
            elif self._flights:
                self._finish(verifier)
            elif self._alone:
                self._run_alone(verifier)
            elif stopping:
                return
            elif verifier.wants_capture:
                self.watch.begins(None)
                verifier.capture()
            else:
                self._prefill(verifier)
            if not self._flights:
                self.watch.rests()
            now = time.perf_counter_ns()
            self._busy_ns += now - busy_from
            busy_from = now
            self._note(verifier)

    def _wait(self, verifier: Verifier) -> list[_Job]:
        """Waits until there is something to do.

        Returns:
            The jobs to begin; or none, and the oldest step is to be finished, or where there is none the thread to be
            ended, a graph captured or a prefill begun.
        """
        while not self._stopping and not self._alone:
            running = [flight for flight in self._flights if flight.pending is not None]
            room = len(running) < _MOST_IN_FLIGHT and all(_may_overlap(flight) for flight in running)
            # Nothing may be in flight during a capture.
            room = room and not verifier.wants_capture
            if self._jobs and room and (jobs := self._take_jobs(verifier)):
                return jobs
            if self._flights:
                # What waits now, waits for a session in flight: batches keep their order.
                left_s = self._left_s() if room and not self._jobs else 0.0
                if left_s <= 0:
                    return []
                self._arrived.wait(min(left_s, _GLANCE_S))
            elif verifier.wants_capture:
                return []
            elif self._may_prefill and verifier.has_pending_prefill:
                due_s = verifier.prefill_due_s
                if due_s <= 0:
                    return []
                self._arrived.wait(due_s)
            else:
                self._arrived.wait()
        return []

    def _left_s(self) -> float:
        """How long the oldest step may be left to itself, in case a batch comes that could be begun beside it."""
        flight = self._flights[0]
        if flight.pending is None or not _may_overlap(flight) or flight.pending.forward.is_done:
            return 0.0
        usual_s = self._usual_s.get(_size(flight), 0.0)
        return flight.begin_s + usual_s - _EXPECTED_EARLY_S - time.perf_counter()

    def _take_jobs(self, verifier: Verifier) -> list[_Job]:
        """The longest run of waiting jobs that asks for no session twice, nor for one that is in flight."""
        seen = set().union(*(flight.keys for flight in self._flights))
        count, rows = 0, verifier.free_rows
        for job in self._jobs:
            trees = {tree.key for tree in job.batch.trees}
            opens = {request.key for request in job.batch.opens}
            taken = not seen.isdisjoint(trees | opens)
            if taken or (self._flights and any(verifier.is_in_flight(key) for key in trees | opens)):
                break
            # A row that this batch closes may still be in flight.
            rows -= len(opens)
            if self._flights and rows < 0 and opens:
                break
            seen |= trees
            count += 1
        jobs, self._jobs = self._jobs[:count], self._jobs[count:]
        return jobs

    def _begin(self, verifier: Verifier, jobs: Sequence[_Job]) -> None:
        """Opens, closes and starts what the jobs ask for."""
        batches = [job.batch for job in jobs]
        keys = {tree.key for batch in batches for tree in batch.trees}
        keys |= {request.key for batch in batches for request in batch.opens}
        flight = _Flight(jobs=jobs, keys=frozenset(keys))
        # In flight from here on, so that whatever goes wrong is told to the jobs.
        self._flights.append(flight)
        # What no step touches is freed before this one, so that its opens find the room.
        for key, epoch in (close for batch in batches for close in batch.closes):
            holder = next((held for held in reversed(self._flights) if key in held.keys), None)
            if holder is None:
                self._close(verifier, key, epoch)
            else:
                holder.late.append((key, epoch))
        trees = [tree for batch in batches for tree in batch.trees]
        rows = sum(1 + len(tree.tokens) for tree in trees)
        # What is to be prefilled comes on top, and its size is not known yet.
        is_unknown = verifier.may_compile or verifier.has_pending_prefill or any(batch.opens for batch in batches)
        self.watch.begins(None if is_unknown else self._usual_s.get(rows.bit_length()))
        flight.faults = [self._open(verifier, batch.opens) for batch in batches]
        if trees:
            flight.pending = verifier.begin(trees)
            self.watch.begins(self._expected_s(verifier, flight))
        self._may_prefill = True

    def _run_alone(self, verifier: Verifier) -> None:
        work, done = self._alone[0]
        # Nobody knows how long it takes.
        self.watch.begins(None)
        result = work(verifier)
        self._alone.popleft()
        self._may_prefill = True
        self._note(verifier)
        done.set_result(result)

    def _prefill(self, verifier: Verifier) -> None:
        flight = _Flight()
        self._flights.append(flight)
        self.watch.begins(None)
        flight.pending = verifier.begin_prefill()
        self.watch.begins(self._expected_s(verifier, flight))

    def _finish(self, verifier: Verifier) -> None:
        """Finishes the oldest step and answers its jobs."""
        flight = self._flights[0]
        self.watch.begins(self._expected_s(verifier, flight))
        step = None if flight.pending is None else verifier.finish(flight.pending)
        trees = [tree for job in flight.jobs for tree in job.batch.trees]
        if step is not None:
            self._tell_refused(trees, step)
            self.counts.note(
                step.step_ns, step.forward_ns, rows=step.tokens, sessions=step.sessions, is_prefill=not flight.jobs
            )
            if flight.jobs:
                self._holdups.note(step.step_ns, rows=step.tokens, sessions=step.sessions)
            else:
                # Nothing computed: older sessions hold the slots, until a batch changes that.
                self._may_prefill = step.tokens > 0
            self._learn(flight)
        for key, epoch in flight.late:
            self._close(verifier, key, epoch)
        self._flights.popleft()
        self._note(verifier)
        results = iter(() if step is None else step.results)
        for job, faults in zip(flight.jobs, flight.faults, strict=True):
            own = [next(results) for _ in job.batch.trees]
            job.done.set_result(BatchResult(results=own, faults=faults, step=step if own else None))

    def _expected_s(self, verifier: Verifier, flight: _Flight) -> float | None:
        """How long a step that has begun should take; None where nobody knows."""
        # What the device does by itself is compiled by now; where the host goes on launching, a kernel may be new.
        if verifier.may_compile and not _may_overlap(flight):
            return None
        return self._usual_s.get(_size(flight))

    def _learn(self, flight: _Flight) -> None:
        size, now_s = _size(flight), time.perf_counter()
        # A step that began while another ran began with that one's end.
        taken_s = now_s - max(flight.begin_s, self._finished_s)
        self._finished_s = now_s
        # A step that compiled something is soon forgotten.
        self._usual_s[size] = min(0.8 * self._usual_s.get(size, taken_s) + 0.2 * taken_s, 2 * taken_s)
        if len(self._flights) > 1:
            self._flights[1].begin_s = now_s

    def _tell_refused(self, trees: Iterable[TreeRequest], step: StepResult) -> None:
        for place, tree in enumerate(trees):
            epoch, fault = self._refused.get(tree.key, (None, None))
            if epoch != tree.epoch:
                continue
            del self._refused[tree.key]
            if step.results[place].outcome is Outcome.ERROR:
                step.results[place] = TreeResult(outcome=Outcome.ERROR, fault=fault)

    def _open(self, verifier: Verifier, opens: Sequence[OpenRequest]) -> _Faults:
        faults: _Faults = []
        for request in opens:
            try:
                if request.weights and self.weights and request.weights != self.weights:
                    message = (
                        f"weights were replaced: {self.weights} runs here, the session began with {request.weights}"
                    )
                    raise SessionFault(Code.ABORTED, message)
                verifier.open(request)
                self._refused.pop(request.key, None)
            except SessionFault as fault:
                self._refused[request.key] = (request.epoch, fault)
                faults.append((request.key, request.epoch, fault))
        return faults

    def _close(self, verifier: Verifier, key: SessionKey, epoch: int) -> None:
        if key in self._refused and self._refused[key][0] <= epoch:
            del self._refused[key]
        verifier.close(key, epoch)

    def _note(self, verifier: Verifier) -> None:
        self._gauges = Load(
            sessions=verifier.session_count,
            slots_used=verifier.slots_used,
            slots_cached=verifier.slots_cached,
            slots_total=verifier.slots_total,
            steps=verifier.steps,
        )


def _may_overlap(flight: _Flight) -> bool:
    return flight.pending is None or flight.pending.forward.may_overlap


def _size(flight: _Flight) -> int:
    """Steps of one size take about as long."""
    return 0 if flight.pending is None else flight.pending.forward.tokens.bit_length()
