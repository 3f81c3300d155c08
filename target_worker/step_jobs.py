"""What the step thread is asked, what it answers, and what of it is under way."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from outrider.target_worker.asked_trees import node_counts
from outrider.target_worker.sessions import OpenRequest, SessionFault, SessionKey, TreeRequest, TreeResult
from outrider.target_worker.succession import StreamSteps, Successor
from outrider.target_worker.verifier import PendingStep, StepResult

Faults = Sequence[tuple[SessionKey, int, SessionFault]]
"""Of opens, with their (session, epoch)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One message of one coordinator.

    Attributes:
        opens: sessions to open.
        closes: (session, epoch) to close after the step.
        trees: to verify; none where the message only opens and closes, or is a successor.
        successor: whose trees are known once the step that it follows is finished.
        step: number of the step on its stream; 0: nothing can follow it.
        stream: that it came over; None where nothing on it follows anything.
    """

    opens: Sequence[OpenRequest] = ()
    closes: Sequence[tuple[SessionKey, int]] = ()
    trees: Sequence[TreeRequest] = ()
    successor: Successor | None = None
    step: int = 0
    stream: StreamSteps | None = None

    @cached_property
    def verifies(self) -> frozenset[SessionKey]:
        """Sessions whose trees it has."""
        if self.successor is not None:
            return frozenset(self.successor.keys)
        return frozenset([tree.key for tree in self.trees])

    @cached_property
    def keys(self) -> frozenset[SessionKey]:
        """Sessions that it opens or verifies."""
        return self.verifies.union([request.key for request in self.opens])

    @property
    def waits(self) -> bool:
        """Whether it is a successor, and the step that it follows is not finished."""
        return self.successor is not None and self.stream is not None and not self.stream.has_ended(self.successor)


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """A batch's part of a step.

    Attributes:
        results: of its trees, in their order.
        faults: of its opens, with their (session, epoch).
        step: the whole step, over all coordinators; None where the batch had no trees.
        verified: of a successor, how many nodes of each session were asked for in the end.
        ahead_ns: and how long before the end of the step that it follows it came; negative: after it.
        additions: that its own successor has got, if that has come.
    """

    results: Sequence[TreeResult]
    faults: Faults
    step: StepResult | None
    verified: Sequence[int] = ()
    ahead_ns: int = 0
    additions: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """A batch that waits for its results.

    Attributes:
        batch: as it came.
        done: its results.
        arrived_ns: when it came, by `time.perf_counter_ns`.
        trees: of the batch; a successor's are there once its step begins.
        ahead_ns: as in `BatchResult`.
    """

    batch: Batch
    done: "Future[BatchResult]" = field(default_factory=Future)
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    trees: Sequence[TreeRequest] = ()
    ahead_ns: int = 0

    def resolve(self) -> None:
        """Makes out its trees; the step that it follows is finished."""
        batch = self.batch
        self.trees = batch.trees
        if batch.successor is not None:
            assert batch.stream is not None
            self.ahead_ns = batch.stream.ended_ns - self.arrived_ns
            self.trees = batch.stream.trees_of(batch.successor)

    def prepare(self, running: "Sequence[Job]") -> None:
        """Makes out what of its trees can be known while the step of these jobs runs, if it follows one of theirs."""
        successor, stream = self.batch.successor, self.batch.stream
        if successor is None or stream is None:
            return
        for job in running:
            if job.batch.stream is stream:
                stream.prepare(successor, job.batch.step, job.trees)

    def answer(self, results: Sequence[TreeResult], faults: Faults, step: StepResult | None) -> None:
        """Tells who waits."""
        batch = self.batch
        verified = [] if batch.successor is None else node_counts(self.trees)
        additions = batch.stream.answers(batch.step) if batch.stream is not None and batch.step else 0
        self.done.set_result(
            BatchResult(
                results=results,
                faults=faults,
                step=step if results else None,
                verified=verified,
                ahead_ns=self.ahead_ns,
                additions=additions,
            )
        )


@dataclass(kw_only=True, eq=False, slots=True)
class Flight:
    """Jobs whose step has begun.

    Attributes:
        jobs: whose step it is; none where the thread prefills by itself.
        keys: sessions that the jobs open or verify.
        faults: of each job's opens.
        late: what to close when the step is finished.
        pending: the step; None where the jobs have no trees.
        begin_s: when it began.
        result: of the step, once it is finished.
    """

    jobs: Sequence[Job] = ()
    keys: frozenset[SessionKey] = frozenset()
    faults: Sequence[Faults] = ()
    late: list[tuple[SessionKey, int]] = field(default_factory=list)
    pending: PendingStep | None = None
    begin_s: float = field(default_factory=time.perf_counter)
    result: StepResult | None = None

    @property
    def trees(self) -> Sequence[TreeRequest]:
        """Of its jobs, in the order of the step."""
        if len(self.jobs) == 1:
            return self.jobs[0].trees
        return [tree for job in self.jobs for tree in job.trees]

    @property
    def may_overlap(self) -> bool:
        """Whether another step may be begun beside it."""
        return self.pending is None or self.pending.forward.may_overlap

    @property
    def size(self) -> int:
        """Steps of one size take about as long."""
        return 0 if self.pending is None else self.pending.forward.tokens.bit_length()

    def ends(self, result: StepResult | None) -> None:
        """Its step is finished: what follows it can be made out."""
        self.result = result
        for job, results in zip(self.jobs, self._shares(), strict=True):
            if job.batch.stream is not None and job.batch.step:
                job.batch.stream.ends(job.batch.step, job.trees, results)

    def answer(self) -> None:
        """Tells its jobs."""
        for job, faults, results in zip(self.jobs, self.faults, self._shares(), strict=True):
            job.answer(results, faults, self.result)

    def _shares(self) -> Iterator[Sequence[TreeResult]]:
        """Each job's part of the results."""
        results = () if self.result is None else self.result.results
        first = 0
        for job in self.jobs:
            yield results[first : first + len(job.trees)]
            first += len(job.trees)
