"""The one thread that runs the target model: merges what waits into one step, and prefills while nothing waits.

Several coordinators may stream to one target. What has arrived when a step ends becomes the next step, whoever sent
it, as long as no session would stand in it twice.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from outrider.errors import WorkerUnavailable
from outrider.target_worker.sessions import (
    OpenRequest,
    Outcome,
    SessionFault,
    SessionKey,
    TreeRequest,
    TreeResult,
)
from outrider.target_worker.verifier import StepResult, Verifier
from outrider.worker import share_interpreter

logger = logging.getLogger(__name__)


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
    """How full the target is; `busy` is the share of the time since the last report that steps took."""

    sessions: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    steps: int = 0
    busy: float = 0.0


@dataclass(eq=False, slots=True)
class _Job:
    batch: Batch
    done: "Future[BatchResult]" = field(default_factory=Future)


class StepThread:
    """Runs a verifier on a thread of its own.

    Args:
        make_verifier: called on that thread, so that everything of torch happens on one.
    """

    def __init__(self, make_verifier: Callable[[], Verifier]) -> None:
        self._make_verifier = make_verifier
        self._arrived = threading.Condition()
        self._jobs: list[_Job] = []
        self._stopping = False
        # Why opens failed, told with the session's first tree: an open without trees is not answered.
        self._refused: dict[tuple[SessionKey, int], SessionFault] = {}
        self._thread = threading.Thread(target=self._run, name="target-steps", daemon=True)
        self._busy_ns = 0
        self._reported = (time.perf_counter_ns(), 0)
        self._gauges = Load()
        self._busy = 0.0
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
        return self.load

    def _run(self) -> None:
        share_interpreter()
        error: BaseException | None = None
        try:
            verifier = self._make_verifier()
            self._note(verifier)
            self.ready.set_result(verifier)
            self._serve(verifier)
        except BaseException as failure:  # noqa: BLE001 - handed on through `stopped`, where the server ends
            error = failure
        with self._arrived:
            self._stopping = True
            waiting, self._jobs = self._jobs, []
        reason = "the target worker is stopping" if error is None else f"the target worker failed: {error}"
        for job in waiting:
            job.done.set_exception(WorkerUnavailable(reason))
        if error is None:
            self.stopped.set_result(None)
            return
        if not self.ready.done():
            self.ready.set_exception(error)
        self.stopped.set_exception(error)

    def _serve(self, verifier: Verifier) -> None:
        may_prefill = True
        while True:
            with self._arrived:
                while not (self._stopping or self._jobs):
                    # A batch that is on its way takes prefill along for less than it costs alone.
                    due_s = verifier.prefill_due_s if may_prefill and verifier.has_pending_prefill else None
                    if due_s == 0.0:
                        break
                    self._arrived.wait(due_s)
                if self._stopping:
                    return
                jobs = self._take_jobs()
            begin = time.perf_counter_ns()
            if jobs:
                self._step(verifier, jobs)
                may_prefill = True
            else:
                # Nothing computed: older sessions hold the slots, until a batch changes that.
                may_prefill = verifier.prefill() > 0
            self._busy_ns += time.perf_counter_ns() - begin
            self._note(verifier)

    def _take_jobs(self) -> list[_Job]:
        """The longest run of waiting jobs that asks for no session twice."""
        seen: set[SessionKey] = set()
        count = 0
        for job in self._jobs:
            keys = {tree.key for tree in job.batch.trees}
            if count and not seen.isdisjoint(keys | {request.key for request in job.batch.opens}):
                break
            seen |= keys
            count += 1
        jobs, self._jobs = self._jobs[:count], self._jobs[count:]
        return jobs

    def _step(self, verifier: Verifier, jobs: Sequence[_Job]) -> None:
        try:
            done = self._merged(verifier, [job.batch for job in jobs])
        except BaseException as error:
            for job in jobs:
                job.done.set_exception(WorkerUnavailable(f"the target worker failed: {error}"))
            raise
        self._note(verifier)
        for job, result in zip(jobs, done, strict=True):
            job.done.set_result(result)

    def _merged(self, verifier: Verifier, batches: Sequence[Batch]) -> list[BatchResult]:
        in_step = {tree.key for batch in batches for tree in batch.trees}
        in_step |= {request.key for batch in batches for request in batch.opens}
        late: list[tuple[SessionKey, int]] = []
        # What this step does not touch is freed before it, so that its opens find the room.
        for key, epoch in (close for batch in batches for close in batch.closes):
            if key in in_step:
                late.append((key, epoch))
            else:
                self._close(verifier, key, epoch)
        faults = [self._open(verifier, batch.opens) for batch in batches]
        step = self._verify(verifier, batches)
        for key, epoch in late:
            self._close(verifier, key, epoch)
        results = iter(step.results if step is not None else ())
        return [
            BatchResult(
                results=[next(results) for _ in batch.trees], faults=batch_faults, step=step if batch.trees else None
            )
            for batch, batch_faults in zip(batches, faults, strict=True)
        ]

    def _open(self, verifier: Verifier, opens: Sequence[OpenRequest]) -> list[tuple[SessionKey, int, SessionFault]]:
        faults = []
        for request in opens:
            try:
                verifier.open(request)
            except SessionFault as fault:
                self._refused[request.key, request.epoch] = fault
                faults.append((request.key, request.epoch, fault))
        return faults

    def _close(self, verifier: Verifier, key: SessionKey, epoch: int) -> None:
        self._refused.pop((key, epoch), None)
        verifier.close(key, epoch)

    def _verify(self, verifier: Verifier, batches: Sequence[Batch]) -> StepResult | None:
        trees = [tree for batch in batches for tree in batch.trees]
        if not trees:
            return None
        step = verifier.step(trees)
        for place, tree in enumerate(trees):
            refused = self._refused.pop((tree.key, tree.epoch), None)
            if refused is not None and step.results[place].outcome is Outcome.ERROR:
                step.results[place] = TreeResult(outcome=Outcome.ERROR, fault=refused)
        return step

    def _note(self, verifier: Verifier) -> None:
        self._gauges = Load(
            sessions=verifier.session_count,
            slots_used=verifier.slots_used,
            slots_cached=verifier.slots_cached,
            slots_total=verifier.slots_total,
            steps=verifier.steps,
        )
