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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from outrider import collector
from outrider.errors import WorkerUnavailable
from outrider.metrics.worker import StepCounts
from outrider.step_holdups import StepHoldups
from outrider.step_watch import StepWatch
from outrider.target_worker.asked_trees import row_count
from outrider.target_worker.opens import Opens
from outrider.target_worker.packing import Load
from outrider.target_worker.sessions import TreeRequest
from outrider.target_worker.step_jobs import Batch, BatchResult, Flight, Job
from outrider.target_worker.step_times import StepTimes
from outrider.target_worker.verifier import Verifier
from outrider.worker import share_interpreter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Steps that are begun and not finished: one that runs, and one that waits for it.
_MOST_IN_FLIGHT = 2
# Several coordinators ask at about the same time: what lies between them would say little.
_SHORTEST_WINDOW_NS = 200_000_000
# While it may still begin another step, it looks this often whether the one that runs is done.
_GLANCE_S = 0.0005


class StepThread:
    """Runs a verifier on a thread of its own.

    Args:
        make_verifier: called on that thread, so that everything of torch happens on one.
    """

    def __init__(self, make_verifier: Callable[[], Verifier]) -> None:
        self._make_verifier = make_verifier
        self._arrived = threading.Condition()
        self._jobs: list[Job] = []
        self._alone: deque[tuple[Callable[[Verifier], object], Future[Any]]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="target-steps", daemon=True)
        self._flights: deque[Flight] = deque()
        # Finished, and its jobs are not told yet.
        self._unanswered: Flight | None = None
        self._times = StepTimes()
        self._may_prefill = True
        self._busy_ns = self._busy_from = 0
        self._reported = (time.perf_counter_ns(), 0)
        self._gauges = Load()
        self._busy = 0.0
        self.watch = StepWatch()
        """Whether it still gets on."""
        self.counts = StepCounts()
        self._holdups = StepHoldups(logger, "verification")
        self.opens = Opens()
        """Opens its sessions; knows with which weights."""
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
        job = Job(batch)
        # Made out here: between two steps, where they are looked at, the device may wait.
        _ = batch.keys
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

    @property
    def weights(self) -> str:
        """Version of the model's weights; empty where it is not known."""
        return self.opens.weights

    @weights.setter
    def weights(self, version: str) -> None:
        self.opens.weights = version

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
        """The load, `busy` measured anew since the last call; of calls that follow each other closely, by the first."""
        now, busy = time.perf_counter_ns(), self._busy_ns
        then, busy_then = self._reported
        if now - then >= _SHORTEST_WINDOW_NS:
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
        self._busy_from = time.perf_counter_ns()
        while self.turn(verifier):
            pass

    def turn(self, verifier: Verifier) -> bool:
        """Waits until there is something to do, and does it; False where the thread is to end. For the thread alone."""
        with self._arrived:
            jobs = self._wait(verifier)
            stopping = self._stopping
        if not self._flights:
            self._busy_from = time.perf_counter_ns()
        if jobs:
            self._begin(verifier, jobs)
        elif self._flights:
            self._go_on(verifier)
        elif self._alone:
            self._run_alone(verifier)
        elif stopping:
            return False
        elif verifier.wants_capture:
            self.watch.begins(None)
            verifier.capture()
        else:
            self._prefill(verifier)
        if not self._flights:
            self.watch.rests()
        collector.between_rounds()
        now = time.perf_counter_ns()
        self._busy_ns += now - self._busy_from
        self._busy_from = now
        self._note(verifier)
        return True

    def _wait(self, verifier: Verifier) -> Sequence[Job]:
        """Waits until there is something to do.

        Returns:
            The jobs to begin; or none, and the oldest step is to be finished, or where there is none the thread to be
            ended, a graph captured or a prefill begun.
        """
        while not self._stopping and not self._alone:
            room = self._has_room(verifier)
            if room and (jobs := self._take_jobs(verifier)):
                return jobs
            if self._flights:
                # What waits now, waits for a session in flight: batches keep their order.
                left_s = self._times.left_s(self._flights[0]) if room and not self._jobs else 0.0
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

    def _has_room(self, verifier: Verifier) -> bool:
        """Whether a step may be begun beside those in flight."""
        running = [flight for flight in self._flights if flight.pending is not None]
        room = len(running) < _MOST_IN_FLIGHT and all(flight.may_overlap for flight in running)
        # Nothing may be in flight during a capture.
        return room and not verifier.wants_capture

    def _take_jobs(self, verifier: Verifier) -> Sequence[Job]:
        """The longest run of waiting jobs that asks for no session twice, nor for one that is in flight.

        Nor for one that the run closes: closes take effect behind the step. A successor whose step is not finished
        waits, and so does what came behind it.
        """
        seen = set().union(*(flight.keys for flight in self._flights))
        count, rows = 0, verifier.free_rows
        for job in self._jobs:
            batch = job.batch
            if batch.waits or not seen.isdisjoint(batch.keys):
                break
            if self._flights and any(verifier.is_in_flight(key) for key in batch.keys):
                break
            # A row that this batch closes may still be in flight.
            rows -= len(batch.opens)
            if self._flights and rows < 0 and batch.opens:
                break
            seen |= batch.verifies.union([key for key, _ in batch.closes])
            count += 1
        jobs, self._jobs = self._jobs[:count], self._jobs[count:]
        return jobs

    def _begin(self, verifier: Verifier, jobs: Sequence[Job]) -> None:
        """Opens, closes and starts what the jobs ask for."""
        batches = [job.batch for job in jobs]
        first, *others = batches
        flight = Flight(jobs=jobs, keys=first.keys.union(*(batch.keys for batch in others)))
        # In flight from here on, so that whatever goes wrong is told to the jobs.
        self._flights.append(flight)
        # What no step touches is freed before this one, so that its opens find the room.
        for key, epoch in (close for batch in batches for close in batch.closes):
            holder = next((held for held in reversed(self._flights) if key in held.keys), None)
            if holder is None:
                self.opens.close(verifier, key, epoch)
            else:
                holder.late.append((key, epoch))
        for job in jobs:
            job.resolve()
        trees = flight.trees
        self.watch.begins(self._usual_s(verifier, batches, trees))
        flight.faults = [self.opens.open(verifier, batch.opens) for batch in batches]
        if trees:
            flight.pending = verifier.begin(trees)
            self._expect(verifier, flight)
        self._may_prefill = True

    def _usual_s(self, verifier: Verifier, batches: Sequence[Batch], trees: Sequence[TreeRequest]) -> float | None:
        """How long a step of these usually takes; None where nobody knows."""
        # What is to be prefilled comes on top, and its size is not known yet.
        if verifier.may_compile or verifier.has_pending_prefill or any(batch.opens for batch in batches):
            return None
        return self._times.usual_s.get(row_count(trees).bit_length())

    def _go_on(self, verifier: Verifier) -> None:
        """Finishes the oldest step, and answers its jobs.

        Where that leaves a device without work, what waits for it begins first: answers can leave while it runs.
        """
        waiting = self._jobs
        if waiting:
            # The device is at work meanwhile.
            waiting[0].prepare(self._flights[0].jobs)
        self._finish(verifier)
        try:
            if not self._flights and self._jobs and verifier.goes_on_alone:
                with self._arrived:
                    is_free = not self._stopping and not self._alone and self._has_room(verifier)
                    jobs = self._take_jobs(verifier) if is_free else []
                if jobs:
                    self._begin(verifier, jobs)
        finally:
            self._answer(verifier)

    def _finish(self, verifier: Verifier) -> None:
        """Finishes the oldest step; its jobs are answered by `_answer`."""
        flight = self._flights[0]
        self._expect(verifier, flight)
        result = None if flight.pending is None else verifier.finish(flight.pending)
        if result is not None:
            self.opens.tell_refused(flight.trees, result)
            self._times.learn(self._flights)
            if not flight.jobs:
                # Nothing computed: older sessions hold the slots, until a batch changes that.
                self._may_prefill = result.tokens > 0
        for key, epoch in flight.late:
            self.opens.close(verifier, key, epoch)
        flight.ends(result)
        self._unanswered = self._flights.popleft()

    def _answer(self, verifier: Verifier) -> None:
        """Tells the jobs of the step that was finished last."""
        flight, self._unanswered = self._unanswered, None
        assert flight is not None
        self._note(verifier)
        flight.answer()
        verifier.learn()
        if (step := flight.result) is None:
            return
        self.counts.note(
            step.step_ns, step.forward_ns, rows=step.tokens, sessions=step.sessions, is_prefill=not flight.jobs
        )
        if flight.jobs:
            self._holdups.note(step.step_ns, rows=step.tokens, sessions=step.sessions)

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
        flight = Flight()
        self._flights.append(flight)
        self.watch.begins(None)
        flight.pending = verifier.begin_prefill()
        self._expect(verifier, flight)

    def _expect(self, verifier: Verifier, flight: Flight) -> None:
        """Says how long a step that has begun should take."""
        self.watch.begins(self._times.expected_s(flight, may_compile=verifier.may_compile))

    def _note(self, verifier: Verifier) -> None:
        self._gauges = Load(
            sessions=verifier.session_count,
            slots_used=verifier.slots_used,
            slots_cached=verifier.slots_cached,
            slots_total=verifier.slots_total,
            steps=verifier.steps,
        )
