"""The thread of the rounds: commands in, results to their owners, and how it ends."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.polling import wait_until
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.ahead import AheadProgram
from tests.target_worker.rounds.driving import PROMPT, make_runner, open_request, rounds_of

from outrider.errors import WorkerUnavailable
from outrider.front.inbox import Inbox
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.commands import (
    BoundsCommand,
    Command,
    LeaveCommand,
    OpenCommand,
    RoundCost,
)
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.program import RoundProgram
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.rounds.thread import RoundThread
from outrider.target_worker.sessions.requests import Code

SPEC = SamplingSpec(max_new_tokens=20)


class StoppingProgram(RoundProgram):
    """Rounds that wait for a word before they begin, and may fail then."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.may_run, self.fault = threading.Event(), ""
        self.may_run.set()

    def launch(self, *arguments: Any, **options: Any) -> None:
        self.may_run.wait()
        if self.fault:
            raise RuntimeError(self.fault)
        super().launch(*arguments, **options)


@dataclass(eq=False)
class Owner:
    """Notes what it is told."""

    results: list[SessionResult] = field(default_factory=list)
    rounds: list[tuple[Sequence[SessionResult], RoundCost | None]] = field(default_factory=list)

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost | None) -> None:
        self.rounds.append((results, cost))
        self.results += results

    def tokens(self, number: int) -> list[int]:
        return [token for result in self.results if result.key[1] == number for token in result.tokens]

    def has_ended(self, *numbers: int) -> bool:
        return {result.key[1] for result in self.results if result.has_ended} >= set(numbers)


class Served:
    """A thread and its program."""

    def __init__(self, checkpoint: Any, kind: type[RoundProgram], inbox: Inbox[Command]) -> None:
        self._checkpoint, self._kind = checkpoint, kind
        self.program: Any = None
        self.thread = RoundThread(self._make, inbox)

    def _make(self) -> RoundLoop:
        loop, self.program = rounds_of(make_runner(self._checkpoint), kind=self._kind, chunk=16)
        return loop


@pytest.fixture
def inbox() -> Iterator[Inbox[Command]]:
    with closing(Inbox[Command]()) as opened:
        yield opened


@pytest.fixture(params=[StoppingProgram, AheadProgram], ids=["one by one", "ahead"])
def served(request, checkpoint, inbox) -> Iterator[Served]:
    served = Served(checkpoint, request.param, inbox)
    served.thread.start()
    served.thread.ready.result(60)
    yield served
    if hasattr(served.program, "may_run"):
        served.program.may_run.set()
    served.thread.stop()
    if not getattr(served.program, "fault", ""):
        served.thread.stopped.result(60)


def test_results_come_to_their_owners_one_round_at_a_time(served, reference_model):
    thread, owners = served.thread, [Owner(), Owner()]
    for number in range(4):
        request = open_request(number, replace(SPEC, max_new_tokens=8 + number))
        thread.submit([OpenCommand(owners[number % 2], request)])
    wait_until(lambda: owners[0].has_ended(0, 2) and owners[1].has_ended(1, 3))
    plain = plain_decode(reference_model, PROMPT, SPEC).tokens
    for number in range(4):
        assert owners[number % 2].tokens(number) == plain[: 8 + number]
    for results, cost in (entry for owner in owners for entry in owner.rounds):
        assert len({result.key for result in results}) == len(results)
        assert len({result.round for result in results}) == 1
        assert cost is None or (cost.rows >= len(results) and cost.step_ns >= cost.forward_ns > 0)
    assert not {result.key for result in owners[0].results} & {result.key for result in owners[1].results}
    wait_until(lambda: not thread.load.sessions and not thread.load.slots_used)
    wait_until(lambda: not thread.watch.age_s)
    assert thread.load.slots_total == 512
    assert thread.load.steps == thread.counts.verify_steps + thread.counts.prefill_steps > 8
    assert thread.counts.rows > 4 * len(PROMPT)
    wait_until(lambda: thread.report().busy)
    assert thread.report().busy <= 1


def test_a_session_whose_columns_hang_on_their_way_to_the_device_is_noticed(served, monkeypatch):
    thread, owner, may_go_on = served.thread, Owner(), threading.Event()
    describe = served.program.describe_row

    def hang(*arguments: Any) -> None:
        may_go_on.wait(60)
        describe(*arguments)

    monkeypatch.setattr(served.program, "describe_row", hang)
    wait_until(lambda: not thread.watch.age_s)
    thread.submit([OpenCommand(owner, open_request(1, SPEC))])
    wait_until(lambda: thread.watch.age_s)
    assert not thread.watch.is_preparing
    may_go_on.set()
    wait_until(lambda: owner.has_ended(1))
    wait_until(lambda: not thread.watch.age_s)


def test_only_the_owner_that_leaves_loses_its_sessions(served):
    thread, owners = served.thread, [Owner(), Owner()]
    # The second has the session from its reopening on.
    thread.submit([OpenCommand(owners[0], open_request(1, SPEC)), BoundsCommand((7, 1), 1, 0, False)])
    thread.submit([OpenCommand(owners[0], open_request(2, SPEC)), BoundsCommand((7, 2), 1, 0, False)])
    thread.submit([OpenCommand(owners[1], open_request(1, SPEC, epoch=2)), BoundsCommand((7, 1), 2, 0, False)])
    thread.submit([OpenCommand(owners[0], open_request(1, SPEC, epoch=1))])
    wait_until(lambda: owners[0].has_ended(1))
    fault = owners[0].results[-1].fault
    assert fault is not None
    assert (fault.code, owners[0].results[-1].epoch) == (Code.FAILED_PRECONDITION, 1)
    thread.submit([LeaveCommand(owners[0])])
    wait_until(lambda: thread.load.sessions == 1)
    thread.submit([BoundsCommand((7, 1), 2, 1000, False)])
    wait_until(lambda: owners[1].has_ended(1))
    assert len(owners[1].tokens(1)) == SPEC.max_new_tokens
    wait_until(lambda: not thread.load.slots_used)


@pytest.mark.parametrize("served", [StoppingProgram], indirect=True)
def test_the_watch_sees_a_round_that_does_not_come_back(served):
    thread, owner = served.thread, Owner()
    thread.submit([OpenCommand(owner, open_request(1, SPEC))])
    wait_until(lambda: owner.has_ended(1))
    wait_until(lambda: not thread.watch.age_s)
    served.program.may_run.clear()
    thread.submit([OpenCommand(owner, open_request(2, SPEC))])
    wait_until(lambda: thread.report().step_age_s > 0.01)
    assert not thread.watch.is_preparing, "rounds of this size have run"
    served.program.may_run.set()
    wait_until(lambda: owner.has_ended(2))
    wait_until(lambda: not thread.watch.age_s)


@pytest.mark.parametrize("served", [StoppingProgram], indirect=True)
def test_what_ends_the_thread_is_told(served):
    thread, owner = served.thread, Owner()
    served.program.may_run.clear()
    thread.submit([OpenCommand(owner, open_request(1, SPEC))])
    wait_until(lambda: thread.watch.age_s)
    alone = thread.run_alone(lambda loop: None)
    served.program.fault = "out of order"
    served.program.may_run.set()
    with pytest.raises(RuntimeError, match="out of order"):
        thread.stopped.result(60)
    with pytest.raises(WorkerUnavailable, match="out of order"):
        alone.result(60)
    with pytest.raises(WorkerUnavailable):
        thread.run_alone(lambda loop: None).result(60)


def test_a_model_that_cannot_be_loaded_is_told_by_ready(inbox):
    def fail() -> RoundLoop:
        raise ValueError("no such model")

    thread = RoundThread(fail, inbox)
    thread.start()
    with pytest.raises(ValueError, match="no such model"):
        thread.ready.result(60)
    with pytest.raises(ValueError, match="no such model"):
        thread.stopped.result(60)


def test_a_thread_that_runs_no_rounds_is_not_busy(served):
    thread, owner = served.thread, Owner()
    wait_until(lambda: not thread.report().busy)
    thread.submit([OpenCommand(owner, open_request(1, SPEC))])
    wait_until(lambda: thread.report().busy)
    wait_until(lambda: owner.has_ended(1))
    assert thread.report().busy <= 1
    wait_until(lambda: not thread.report().busy)
