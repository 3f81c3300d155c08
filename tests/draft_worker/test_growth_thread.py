"""What the growth thread does while the device works; the rest is seen through the service (test_service.py)."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_launch import GrowthFlight
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.growth_thread import (
    CommitCommand,
    GrowthThread,
    HoldCommand,
    LeaveCommand,
    Load,
    OpenCommand,
    SessionFailure,
)
from outrider.draft_worker.session import GrowthLimits

Make = Callable[..., Any]
KEY = (7, 1)


class Owner:
    def __init__(self) -> None:
        self.growths: list[SessionGrowth] = []
        self.grown = threading.Event()
        self.failures: list[SessionFailure] = []

    def deliver(self, growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> None:
        self.growths += growths
        self.grown.set()

    def fail(self, failure: SessionFailure) -> None:
        self.failures.append(failure)


class SlowDevice:
    """Makes flights last until they are let go, as a device would that works on its own."""

    def __init__(self, growth: TreeGrowth, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.launched = threading.Event(), threading.Semaphore(0)
        launch = growth._launcher.launch

        def launch_slowly(plan: Any) -> GrowthFlight:
            self.launched.release()
            end = time.perf_counter_ns() + 300_000_000_000
            return dataclasses.replace(launch(plan), is_done=self.done.is_set, expected_end_ns=end)

        monkeypatch.setattr(growth._launcher, "launch", launch_slowly)
        monkeypatch.setattr(growth._launcher, "overlaps", True)


def started(growth: TreeGrowth) -> GrowthThread:
    """A thread that grows it."""
    thread = GrowthThread(lambda: growth)
    thread.start()
    return thread


def test_commits_are_applied_while_a_step_runs_and_growth_leaves_behind_the_next_launch(
    make_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_growth()
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    in_flight: list[bool] = []
    commit = growth.commit

    def commit_and_let_go(*args: Any) -> None:
        in_flight.append(growth.num_begun > 0)
        commit(*args)
        device.done.set()

    monkeypatch.setattr(growth, "commit", commit_and_let_go)
    deliver, next_runs = owner.deliver, list[bool]()

    def deliver_and_note(*args: Any) -> None:
        next_runs.append(growth.num_begun > 0)
        deliver(*args)

    monkeypatch.setattr(owner, "deliver", deliver_and_note)
    thread = started(growth)
    thread.ready.result(30)
    thread.submit([OpenCommand(owner, make_start(owner=owner))])
    assert device.launched.acquire(timeout=30)
    assert not owner.grown.wait(0.05)
    thread.submit([CommitCommand(owner, KEY, 1, 3, [9])])
    # The step that the commit met gave nothing: its root was left behind. The next one begins at the new root.
    assert owner.grown.wait(30)
    assert in_flight == [True]
    assert {record.as_of for record in owner.growths} == {4}
    assert next_runs[0]
    thread.stop()
    thread.stopped.result(30)
    assert not owner.failures


def test_a_second_step_stands_behind_the_one_that_runs_and_growth_leaves_in_their_order(
    make_queued_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, steps = make_queued_growth(max_step_nodes=3)
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    thread = started(growth)
    thread.submit([OpenCommand(owner, make_start(owner=owner))])
    for _ in range(2):
        assert device.launched.acquire(timeout=30)
    # The root's best child, before anybody knew the root's children.
    assert (steps.promised, owner.growths) == (1, [])
    assert not device.launched.acquire(timeout=0.05)
    device.done.set()
    deadline = time.monotonic() + 60
    while sum(len(record.node_ids) for record in owner.growths) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.stop()
    thread.stopped.result(30)
    assert growth.num_begun == 0
    known = {0}
    for record in owner.growths:
        for node_id, parent in zip(record.node_ids, record.parents, strict=True):
            assert parent in known
            known.add(node_id)
    assert len(known) > 60
    assert steps.promised > 3


def test_growth_leaves_before_a_third_step_is_planned(
    make_queued_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_queued_growth(max_step_nodes=3)
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    events: list[str] = []
    launch, deliver = growth._launcher.launch, owner.deliver
    monkeypatch.setattr(growth._launcher, "launch", lambda plan: events.append("launch") or launch(plan))
    monkeypatch.setattr(owner, "deliver", lambda *args: events.append("deliver") or deliver(*args))
    thread = started(growth)
    thread.submit([OpenCommand(owner, make_start(owner=owner))])
    for _ in range(2):
        assert device.launched.acquire(timeout=30)
    device.done.set()
    assert owner.grown.wait(30)
    thread.stop()
    thread.stopped.result(30)
    # The second step keeps the device busy meanwhile.
    assert events[:3] == ["launch", "launch", "deliver"]


def test_a_commit_that_makes_work_has_it_launched_behind_the_step_that_runs(
    make_queued_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_queued_growth()
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    thread = started(growth)
    # The root's children use the credit up, so that nothing can be promised.
    thread.submit([OpenCommand(owner, make_start(owner=owner, limits=GrowthLimits(max_live_nodes=4)))])
    assert device.launched.acquire(timeout=30)
    assert not device.launched.acquire(timeout=0.05)
    thread.submit([CommitCommand(owner, KEY, 1, 3, [9])])
    assert device.launched.acquire(timeout=30)
    assert not owner.growths
    # Both are finished before the thread ends; the first has nothing to give any more.
    thread.stop()
    thread.stopped.result(30)
    assert growth.num_begun == 0
    assert [(record.as_of, len(record.node_ids)) for record in owner.growths] == [(4, 4)]


def test_a_thread_that_is_stopped_while_a_step_runs_ends_after_it(
    make_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_growth()
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    thread = started(growth)
    thread.submit([OpenCommand(owner, make_start(owner=owner))])
    assert device.launched.acquire(timeout=30)
    thread.stop()
    thread.stopped.result(30)
    assert growth.is_done
    assert [record.as_of for record in owner.growths] == [3]


def test_a_forward_leaves_out_sessions_whose_commits_still_wait(
    make_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, runner = make_growth()
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    numbers = range(1, 7)
    begin, left_out = growth.begin, list[set[tuple[int, int]]]()

    def begin_and_note(keys: set[tuple[int, int]]) -> bool:
        left_out.append(keys)
        return begin(keys)

    monkeypatch.setattr(growth, "begin", begin_and_note)
    thread = started(growth)
    thread.submit([OpenCommand(owner, make_start(number, owner=owner)) for number in numbers])
    assert device.launched.acquire(timeout=30)
    # The first half was opened before it, the others while it runs.
    assert [len(batch.rows) for batch in runner.batches] == [3]
    assert left_out[0] == {(7, number) for number in (4, 5, 6)}
    device.done.set()
    assert device.launched.acquire(timeout=30)
    deadline = time.monotonic() + 60
    while {record.session_id for record in owner.growths} != set(numbers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {record.session_id for record in owner.growths} == set(numbers)
    sessions = [growth.session((7, number)) for number in numbers]
    assert all(session is not None and session.tree.size for session in sessions)
    thread.stop()
    thread.stopped.result(30)


def test_it_says_how_long_its_step_has_run_and_whether_it_may_be_compiling(
    make_growth: Make, make_start: Make, monkeypatch: pytest.MonkeyPatch
):
    growth, _ = make_growth()
    device, owner = SlowDevice(growth, monkeypatch), Owner()
    thread = started(growth)
    thread.ready.result(30)
    assert (thread.watch.age_s, thread.watch.is_preparing) == (0, False)
    thread.submit([OpenCommand(owner, make_start(owner=owner))])
    assert device.launched.acquire(timeout=30)
    time.sleep(0.02)
    assert thread.watch.age_s >= 0.01
    assert thread.watch.is_preparing
    device.done.set()
    deadline = time.monotonic() + 60
    while thread.watch.age_s and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (thread.watch.age_s, thread.watch.is_preparing) == (0, False)
    thread.stop()
    thread.stopped.result(30)


def test_sessions_whose_growth_is_not_read_rest_and_the_others_go_on(make_growth: Make, make_start: Make):
    growth, _ = make_growth()
    thread = started(growth)
    thread.ready.result(30)
    unread, other = Owner(), Owner()

    def until_grown(owner: Owner, as_of: int) -> None:
        deadline = time.monotonic() + 30
        while as_of not in {record.as_of for record in owner.growths}:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    thread.submit([HoldCommand(unread, is_held=True), OpenCommand(unread, make_start(owner=unread))])
    thread.submit([OpenCommand(other, make_start(key=(7, 2), owner=other))])
    until_grown(other, 3)
    thread.submit([CommitCommand(unread, KEY, 1, 3, [9]), CommitCommand(other, (7, 2), 1, 3, [9])])
    until_grown(other, 4)
    assert (unread.growths, thread.holds) == ([], 1)
    thread.submit([HoldCommand(unread, is_held=False)])
    until_grown(unread, 4)
    # Nothing of what it knew before.
    assert {record.as_of for record in unread.growths} == {4}
    # Whoever leaves is not held any more when he comes again.
    thread.submit([HoldCommand(unread, is_held=True), LeaveCommand(unread)])
    thread.submit([OpenCommand(unread, make_start(owner=unread, prompt=(1, 2)))])
    until_grown(unread, 2)
    thread.stop()
    thread.stopped.result(30)
