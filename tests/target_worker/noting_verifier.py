"""A verifier for the step thread that only notes what it is asked."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import Code, OpenRequest, Outcome, SessionFault, TreeRequest, TreeResult
from outrider.target_worker.verifier import StepResult


class NotingVerifier:
    """Holds its first step until told to go on, so that batches pile up meanwhile.

    With `overlaps` steps run by themselves, as on a device: `begin` returns at once, `finish` waits.
    """

    overlaps = goes_on_alone = False
    may_compile = wants_capture = False
    prefill_due_s = 0.0

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.go_on, self.entered = threading.Event(), threading.Event()
        self.session_count = self.slots_used = self.slots_cached = self.slots_total = self.steps = 0
        self.prefill_due_s = 0.0
        self.pending_rows = [0]
        self.free_rows = 9
        self.fails = self.fails_to_begin = False
        self.in_flight: set[tuple[int, int]] = set()

    @property
    def has_pending_prefill(self) -> bool:
        return len(self.pending_rows) > 1

    def begin_prefill(self) -> Any:
        self.log.append(("prefill", None))
        return self.pending([], tokens=self.pending_rows.pop())

    def is_in_flight(self, key: tuple[int, int]) -> bool:
        return key in self.in_flight

    def learn(self) -> None:
        """It knows all there is."""

    def capture(self) -> None:
        self.log.append(("capture", None))
        self.wants_capture = False

    def pending(self, trees: Sequence[TreeRequest], *, tokens: int) -> Any:
        return SimpleNamespace(trees=trees, forward=FakeForward(self, tokens))

    def open(self, request: OpenRequest) -> None:
        self.log.append(("open", request.key[1]))
        if request.key[1] == 13:
            raise SessionFault(Code.RESOURCE_EXHAUSTED, "no room")

    def close(self, key: tuple[int, int], _epoch: int) -> None:
        self.log.append(("close", key[1]))
        self.free_rows += 1

    def begin(self, trees: Sequence[TreeRequest]) -> Any:
        self.log.append(("step" if not self.overlaps else "begin", [tree.key[1] for tree in trees]))
        self.in_flight |= {tree.key for tree in trees}
        self.entered.set()
        if self.fails_to_begin:
            raise RuntimeError("the device is gone")
        if not self.overlaps:
            assert self.go_on.wait(30)
        return self.pending(trees, tokens=len(trees))

    def finish(self, pending: Any) -> StepResult:
        trees = pending.trees
        if self.overlaps and trees:
            assert self.go_on.wait(30)
            self.log.append(("finish", [tree.key[1] for tree in trees]))
        self.in_flight -= {tree.key for tree in trees}
        if self.fails:
            raise RuntimeError("the device is gone")
        results = [
            TreeResult(outcome=Outcome.ERROR, fault=SessionFault(Code.NOT_FOUND, "not open")) if tree.key[1] == 13
            else TreeResult(outcome=Outcome.ACCEPTED, token_ids=[tree.key[1]])
            for tree in trees
        ]  # fmt: skip
        tokens = pending.forward.tokens
        return StepResult(results=results, step_ns=1, forward_ns=1, tokens=tokens, sessions=len(trees))


class FakeForward:
    def __init__(self, verifier: NotingVerifier, tokens: int) -> None:
        self.may_overlap, self.tokens, self._verifier = verifier.overlaps, tokens, verifier

    @property
    def is_done(self) -> bool:
        return self._verifier.go_on.is_set()


def tree(number: int) -> TreeRequest:
    return TreeRequest(key=(1, number), epoch=1, length=1, tokens=(), parents=())


def opening(number: int) -> OpenRequest:
    return OpenRequest(key=(1, number), epoch=1, prompt=[1], output=[], sampling=SamplingSpec())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
