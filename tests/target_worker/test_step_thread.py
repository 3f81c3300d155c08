"""The step thread with a verifier that only notes what it is asked."""

import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tests.target_worker.noting_verifier import NotingVerifier, opening, tree, until

from outrider.errors import WorkerUnavailable
from outrider.succession import addition_from_proto, succession_from_proto
from outrider.target_worker import step_thread
from outrider.target_worker.sessions import DEFERRED, Outcome, TreeRequest
from outrider.target_worker.step_jobs import Batch
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.succession import StreamSteps, Successor
from outrider.target_worker.verifier import Verifier
from outrider.v1 import target_pb2
from outrider.wire import floats_to_bytes


@pytest.fixture
def fake() -> NotingVerifier:
    return NotingVerifier()


@pytest.fixture
def steps(fake: NotingVerifier):
    thread = StepThread(lambda: cast(Verifier, fake))
    thread.start()
    yield thread
    fake.go_on.set()
    thread.stop()
    with pytest.raises(RuntimeError) if fake.fails or fake.fails_to_begin else pytest.MonkeyPatch().context():
        thread.stopped.result(30)


def test_what_waits_becomes_one_step_each_with_its_own_results(steps: StepThread, fake: NotingVerifier) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    assert fake.entered.wait(30)
    waiting = [steps.submit(Batch(opens=[opening(n)], trees=[tree(n), tree(n + 1)])) for n in (2, 4)]
    closing = steps.submit(Batch(closes=[((1, 1), 1), ((1, 2), 1)]))
    fake.go_on.set()
    assert [list(result.token_ids) for done in waiting for result in done.result(30).results] == [[2], [3], [4], [5]]
    assert first.result(30).step is not waiting[0].result(30).step
    assert waiting[0].result(30).step is waiting[1].result(30).step
    assert closing.result(30).step is None
    # 1 is not in the step and makes room before it; 2 is, and is closed after it.
    assert fake.log[1:] == [("close", 1), ("open", 2), ("open", 4), ("step", [2, 3, 4, 5]), ("close", 2)]


def test_a_session_stands_in_a_step_once(steps: StepThread, fake: NotingVerifier) -> None:
    steps.submit(Batch(trees=[tree(1)]))
    assert fake.entered.wait(30)
    waiting = [steps.submit(Batch(trees=[tree(n)])) for n in (2, 3, 2)]
    fake.go_on.set()
    for done in waiting:
        done.result(30)
    assert [entry for entry in fake.log if entry[0] == "step"] == [("step", [1]), ("step", [2, 3]), ("step", [2])]


def test_what_came_behind_a_close_finds_the_session_closed(steps: StepThread, fake: NotingVerifier) -> None:
    steps.submit(Batch(trees=[tree(1)]))
    assert fake.entered.wait(30)
    closing = steps.submit(Batch(trees=[tree(2)], closes=[((1, 5), 1)]))
    behind = steps.submit(Batch(trees=[tree(5)]))
    fake.go_on.set()
    for done in (closing, behind):
        done.result(30)
    assert fake.log[1:] == [("close", 5), ("step", [2]), ("step", [5])]


def test_why_an_open_failed_is_told_with_the_first_tree(steps: StepThread, fake: NotingVerifier) -> None:
    fake.go_on.set()
    assert steps.submit(Batch(opens=[opening(13)])).result(30).faults[0][2].message == "no room"
    faults = [steps.submit(Batch(trees=[tree(13)])).result(30).results[0].fault for _ in range(2)]
    assert [fault.message for fault in faults if fault is not None] == ["no room", "not open"]


def test_prefills_while_nothing_waits_and_rests_when_it_cannot(steps: StepThread, fake: NotingVerifier) -> None:
    fake.go_on.set()
    fake.pending_rows = [0, 0, 0, 5, 5]
    steps.submit(Batch(trees=[tree(1)])).result(30)
    steps.submit(Batch(trees=[tree(2)])).result(30)
    # After each batch it goes on until a prefill computes no row.
    steps.stop()
    steps.stopped.result(30)
    assert fake.log.count(("prefill", None)) <= 4
    assert DEFERRED.outcome is Outcome.DEFERRED


def test_prefill_waits_for_the_batch_that_is_due(steps: StepThread, fake: NotingVerifier) -> None:
    fake.go_on.set()
    fake.pending_rows, fake.prefill_due_s = [0, 5], 60.0
    steps.submit(Batch(trees=[tree(1)])).result(30)
    steps.submit(Batch(trees=[tree(2)])).result(30)
    assert ("prefill", None) not in fake.log
    fake.prefill_due_s = 0.0
    steps.submit(Batch()).result(30)
    steps.submit(Batch()).result(30)
    steps.stop()
    steps.stopped.result(30)
    assert ("prefill", None) in fake.log


def test_a_failure_ends_the_thread_and_everyone_hears_of_it(steps: StepThread, fake: NotingVerifier) -> None:
    fake.fails = True
    first = steps.submit(Batch(trees=[tree(1)]))
    assert fake.entered.wait(30)
    second = steps.submit(Batch(trees=[tree(2)]))
    fake.go_on.set()
    for done in (first, second):
        with pytest.raises(WorkerUnavailable, match="the device is gone"):
            done.result(30)
    with pytest.raises(RuntimeError, match="the device is gone"):
        steps.stopped.result(30)
    with pytest.raises(WorkerUnavailable, match="stopping"):
        steps.submit(Batch(trees=[tree(3)])).result(30)


def test_a_model_that_cannot_be_loaded_is_told_by_ready() -> None:
    def fail() -> Verifier:
        raise ValueError("no such model")

    thread = StepThread(fail)
    thread.start()
    with pytest.raises(ValueError, match="no such model"):
        thread.ready.result(30)


def test_who_asks_right_after_another_hears_the_same(
    steps: StepThread, fake: NotingVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.ready.result(30)
    monkeypatch.setattr(step_thread, "_SHORTEST_WINDOW_NS", 0)
    steps.report()
    fake.go_on.set()
    steps.submit(Batch(trees=[tree(1)])).result(30)
    steps.submit(Batch()).result(30)
    busy = steps.report().busy
    assert busy > 0
    monkeypatch.setattr(step_thread, "_SHORTEST_WINDOW_NS", 3600 * 10**9)
    assert steps.report().busy == busy


def test_busy_is_the_share_since_the_last_report(
    steps: StepThread, fake: NotingVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_thread, "_SHORTEST_WINDOW_NS", 0)
    steps.ready.result(30)
    steps.report()
    began_s = time.perf_counter()
    assert steps.report().busy == 0.0
    reported_s = time.perf_counter()
    time.sleep(0.02)
    submitted_s = time.perf_counter()
    done = steps.submit(Batch(trees=[tree(1)]))
    assert fake.entered.wait(30)
    entered_s = time.perf_counter()
    time.sleep(0.02)
    held_s = time.perf_counter() - entered_s
    fake.go_on.set()
    done.result(30)
    steps.submit(Batch()).result(30)
    busy = steps.report().busy
    # However long this machine takes over all of it: as much as the step was held, and nothing before it was asked for.
    whole_s = time.perf_counter() - began_s
    assert held_s / whole_s <= busy <= 1 - (submitted_s - reported_s) / whole_s


@pytest.fixture
def device(fake: NotingVerifier, steps: StepThread) -> NotingVerifier:
    """The verifier as on a device, its first step of session 1 running for long."""
    steps.ready.result(30)
    fake.overlaps = fake.goes_on_alone = True
    steps._times.usual_s[1] = 60.0
    return fake


def wait_for(fake: NotingVerifier, entry: tuple[str, Any]) -> None:
    until(lambda: entry in fake.log)


def test_the_next_step_begins_while_one_runs_and_no_third(steps: StepThread, device: NotingVerifier) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    others = []
    for number in (2, 3, 4):
        others.append(steps.submit(Batch(opens=[opening(number)], trees=[tree(number)])))
        wait_for(device, ("begin", [2]))
    assert not first.done()
    device.go_on.set()
    assert [list(done.result(30).results[0].token_ids) for done in (first, *others)] == [[1], [2], [3], [4]]
    assert device.log == [
        ("begin", [1]), ("open", 2), ("begin", [2]), ("finish", [1]), ("open", 3), ("open", 4), ("begin", [3, 4]),
        ("finish", [2]), ("finish", [3, 4]),
    ]  # fmt: skip


def test_what_is_in_flight_is_not_reopened_stepped_or_closed(steps: StepThread, device: NotingVerifier) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    closing = steps.submit(Batch(closes=[((1, 1), 1), ((1, 9), 1)], trees=[tree(2)]))
    wait_for(device, ("begin", [2]))
    reopening = steps.submit(Batch(opens=[opening(1)], trees=[tree(1)]))
    behind = steps.submit(Batch(trees=[tree(3)]))
    device.go_on.set()
    for done in (first, closing, reopening, behind):
        done.result(30)
    # 9 makes room at once; 1 is closed when its step is finished, and opened again after that.
    assert device.log == [
        ("begin", [1]), ("close", 9), ("begin", [2]), ("finish", [1]), ("close", 1), ("open", 1), ("begin", [1, 3]),
        ("finish", [2]), ("finish", [1, 3]),
    ]  # fmt: skip


def test_what_asks_for_a_session_in_flight_waits_and_so_does_what_came_behind(
    steps: StepThread, device: NotingVerifier
) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    again = steps.submit(Batch(opens=[opening(1)], trees=[tree(1)]))
    behind = steps.submit(Batch(trees=[tree(2)]))
    assert not behind.done() and len(device.log) == 1
    device.go_on.set()
    for done in (first, again, behind):
        done.result(30)
    assert device.log == [("begin", [1]), ("finish", [1]), ("open", 1), ("begin", [1, 2]), ("finish", [1, 2])]


def test_an_open_waits_for_the_row_of_a_session_that_is_closed_in_flight(
    steps: StepThread, device: NotingVerifier
) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    device.free_rows = 0
    replacing = steps.submit(Batch(closes=[((1, 1), 1)], opens=[opening(2)], trees=[tree(2)]))
    closing = steps.submit(Batch(closes=[((1, 9), 1)]))
    device.go_on.set()
    for done in (first, replacing, closing):
        done.result(30)
    assert device.log[:2] == [("begin", [1]), ("finish", [1])]
    assert device.log.index(("close", 1)) < device.log.index(("open", 2))


def test_a_session_whose_prefill_is_in_flight_waits_for_it(steps: StepThread, device: NotingVerifier) -> None:
    steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    device.in_flight.add((1, 7))  # in the same step, though in no batch
    waiting = steps.submit(Batch(trees=[tree(7)]))
    device.go_on.set()
    waiting.result(30)
    assert device.log[-2:] == [("begin", [7]), ("finish", [7])]


def test_a_batch_without_trees_is_answered_in_its_turn(steps: StepThread, device: NotingVerifier) -> None:
    first = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    opened = steps.submit(Batch(opens=[opening(5)]))
    wait_for(device, ("open", 5))
    assert not opened.done()
    device.go_on.set()
    assert opened.result(30).step is None
    assert first.done()


def ahead(stream: StreamSteps, number: int, *, follows: int, nodes: Sequence[int] = ()) -> Batch:
    """The batch behind a step, of one session; nodes: tokens below the root of that step's tree."""
    sent = succession_from_proto(
        target_pb2.TreeBatch(
            session_ids=[number],
            node_counts=[len(nodes)],
            tokens=nodes,
            parents=[0] * len(nodes),
            values=floats_to_bytes([1.0] * len(nodes)),
            max_nodes=[4],
            max_depths=[4],
            max_total_nodes=4,
        )
    )
    successor = Successor(follows=follows, keys=[(1, number)], epochs=[1], lengths=[1], trees=sent)
    return Batch(successor=successor, step=follows + 1, stream=stream)


@pytest.mark.parametrize("goes_on_alone", [True, False])
def test_a_successor_begins_when_its_step_ends_and_on_a_device_before_that_is_answered(
    steps: StepThread, device: NotingVerifier, goes_on_alone: bool
) -> None:
    device.goes_on_alone = goes_on_alone
    stream = StreamSteps()
    first = steps.submit(Batch(trees=[tree(1)], step=1, stream=stream))
    wait_for(device, ("begin", [1]))
    # Of another session, so that nothing but its step holds it; and another's batch behind it.
    second = steps.submit(ahead(stream, 2, follows=1))
    behind = steps.submit(Batch(trees=[tree(3)]))
    told: list[bool] = []
    begin = device.begin

    def noting(trees: Sequence[TreeRequest]) -> Any:
        told.append(first.done())
        return begin(trees)

    device.begin = noting  # type: ignore[method-assign]
    device.go_on.set()
    assert [done.result(30).results[0].token_ids[0] for done in (first, second, behind)] == [1, 2, 3]
    assert device.log == [("begin", [1]), ("finish", [1]), ("begin", [2, 3]), ("finish", [2, 3])]
    assert told == [not goes_on_alone]
    assert second.result().ahead_ns > 0


@pytest.mark.parametrize("goes_on_alone", [True, False])
@pytest.mark.parametrize("comes", ["before its step begins", "while its step runs"])
def test_a_successor_runs_with_what_was_added_until_its_step_ended(
    steps: StepThread, device: NotingVerifier, goes_on_alone: bool, comes: str
) -> None:
    """Whichever is first, its own beginning or the answer to that step, which says how much that was."""
    device.goes_on_alone = goes_on_alone
    stream, begun = StreamSteps(), []
    begin = device.begin

    def noting(trees: Sequence[TreeRequest]) -> Any:
        begun.append([list(tree.tokens) for tree in trees])
        if len(begun) == 2:
            # The step has ended, and may not have been answered.
            stream.add(addition)
        return begin(trees)

    device.begin = noting  # type: ignore[method-assign]
    first = Batch(trees=[tree(1)], step=1, stream=stream)
    if comes == "while its step runs":
        answers = [steps.submit(first)]
        wait_for(device, ("begin", [1]))
    # Its root is what the step emits, and one below it is added each time.
    second = ahead(stream, 1, follows=1, nodes=[1])
    stream.expect(second.successor)
    if comes == "before its step begins":
        answers = [steps.submit(first)]
    answers.append(steps.submit(second))
    for token in (7, 8):
        addition = addition_from_proto(
            target_pb2.TreeAddition(node_counts=[1], tokens=[token], parents=[1], values=floats_to_bytes([0.5]))
        )
        stream.add(addition)
    device.go_on.set()
    one, two = (answer.result(30) for answer in answers)
    assert begun == [[[]], [[7, 8]]]
    assert (one.additions, list(two.verified), two.additions) == (2, [2], 0)


def test_what_is_added_after_the_answer_is_in_no_step(steps: StepThread, fake: NotingVerifier) -> None:
    fake.go_on.set()
    stream = StreamSteps()
    first = steps.submit(Batch(trees=[tree(1)], step=1, stream=stream)).result(30)
    second = ahead(stream, 1, follows=1, nodes=[1])
    stream.expect(second.successor)
    more = target_pb2.TreeAddition(node_counts=[1], tokens=[7], parents=[1], values=floats_to_bytes([0.5]))
    stream.add(addition_from_proto(more))
    assert (first.additions, list(steps.submit(second).result(30).verified)) == (0, [0])


def test_a_successor_that_comes_late_begins_at_once(steps: StepThread, fake: NotingVerifier) -> None:
    fake.go_on.set()
    stream = StreamSteps()
    steps.submit(Batch(trees=[tree(1)], step=1, stream=stream)).result(30)
    assert steps.submit(ahead(stream, 1, follows=1)).result(30).ahead_ns < 0
    assert fake.log == [("step", [1]), ("step", [1])]


def test_what_has_to_run_alone_goes_before_a_waiting_successor(steps: StepThread, device: NotingVerifier) -> None:
    stream = StreamSteps()
    first = steps.submit(Batch(trees=[tree(1)], step=1, stream=stream))
    wait_for(device, ("begin", [1]))
    second = steps.submit(ahead(stream, 1, follows=1))
    steps.run_alone(lambda _verifier: device.log.append(("alone", None)))
    device.go_on.set()
    for done in (first, second):
        done.result(30)
    assert device.log == [("begin", [1]), ("finish", [1]), ("alone", None), ("begin", [1]), ("finish", [1])]


def test_a_step_is_answered_where_its_successor_cannot_begin(steps: StepThread, device: NotingVerifier) -> None:
    stream = StreamSteps()
    first = steps.submit(Batch(trees=[tree(1)], step=1, stream=stream))
    wait_for(device, ("begin", [1]))
    second = steps.submit(ahead(stream, 1, follows=1))
    device.fails_to_begin = True
    device.go_on.set()
    assert list(first.result(30).results[0].token_ids) == [1]
    with pytest.raises(WorkerUnavailable, match="the device is gone"):
        second.result(30)


@pytest.mark.parametrize("fails", ["fails", "fails_to_begin"])
def test_a_failure_is_told_to_all_that_are_in_flight(steps: StepThread, device: NotingVerifier, fails: str) -> None:
    jobs = [steps.submit(Batch(trees=[tree(1)]))]
    wait_for(device, ("begin", [1]))
    setattr(device, fails, True)
    jobs += [steps.submit(Batch(trees=[tree(2)]))]
    wait_for(device, ("begin", [2]))
    device.go_on.set()
    for done in jobs:
        with pytest.raises(WorkerUnavailable, match="the device is gone"):
            done.result(30)
    with pytest.raises(RuntimeError, match="the device is gone"):
        steps.stopped.result(30)


def test_stopping_finishes_what_is_in_flight(steps: StepThread, device: NotingVerifier) -> None:
    jobs = []
    for number in (1, 2):
        jobs.append(steps.submit(Batch(trees=[tree(number)])))
        wait_for(device, ("begin", [number]))
    late = steps.submit(Batch(trees=[tree(3)]))
    steps.stop()
    device.go_on.set()
    assert [list(done.result(30).results[0].token_ids) for done in jobs] == [[1], [2]]
    with pytest.raises(WorkerUnavailable, match="stopping"):
        late.result(30)
    steps.stopped.result(30)


def test_graphs_are_captured_while_nothing_is_in_flight(steps: StepThread, device: NotingVerifier) -> None:
    steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    device.wants_capture = True
    second = steps.submit(Batch(trees=[tree(2)]))
    device.go_on.set()
    second.result(30)
    assert device.log == [("begin", [1]), ("finish", [1]), ("capture", None), ("begin", [2]), ("finish", [2])]


@pytest.mark.parametrize("overlaps", [False, True])
def test_it_says_how_long_its_step_has_run_and_whether_it_may_be_compiling(fake, overlaps):
    fake.overlaps = overlaps
    thread = StepThread(lambda: cast("Verifier", fake))
    thread.start()
    thread.ready.result(30)
    reports = []
    for _ in range(2):
        fake.entered.clear()
        fake.go_on.clear()
        done = thread.submit(Batch(trees=[tree(1), tree(2)]))
        assert fake.entered.wait(30)
        until(lambda: thread.report().step_age_s >= 0.01)
        reports.append(thread.report())
        fake.go_on.set()
        done.result(30)
    until(lambda: not thread.report().step_age_s)
    assert [report.is_preparing for report in reports] == [True, False]
    assert not thread.load.is_preparing
    thread.stop()
    thread.stopped.result(30)


def hold_next(fake: NotingVerifier) -> None:
    """The next step waits where its work is done."""
    fake.go_on.clear()
    fake.entered.clear()
    fake.log.clear()


def test_a_step_of_a_known_size_is_timed_and_any_other_may_be_preparing(
    steps: StepThread, fake: NotingVerifier
) -> None:
    fake.go_on.set()
    steps.submit(Batch(trees=[tree(1)])).result(30)
    until(lambda: not steps.watch.age_s)
    for batch, is_known in ((Batch(trees=[tree(1)]), True), (Batch(opens=[opening(2)], trees=[tree(1)]), False)):
        hold_next(fake)
        done = steps.submit(batch)
        assert fake.entered.wait(30)
        assert steps.watch.is_preparing is not is_known
        until(lambda: steps.report().step_age_s > 0.01)
        fake.go_on.set()
        done.result(30)
        until(lambda: not steps.watch.age_s)


def test_what_the_device_does_by_itself_is_timed_and_launches_are_not(
    steps: StepThread, device: NotingVerifier
) -> None:
    device.may_compile = True
    device.go_on.set()
    steps.submit(Batch(trees=[tree(1)])).result(30)
    prepared: list[bool] = []
    begin = device.begin

    def noting(trees: Sequence[TreeRequest]) -> Any:
        prepared.append(steps.watch.is_preparing)
        return begin(trees)

    device.begin = noting  # type: ignore[method-assign]
    hold_next(device)
    done = steps.submit(Batch(trees=[tree(1)]))
    wait_for(device, ("begin", [1]))
    until(lambda: not steps.watch.is_preparing)
    assert steps.watch.age_s > 0
    assert prepared == [True]
    device.go_on.set()
    done.result(30)
