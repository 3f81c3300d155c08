"""Log of steps that were held up."""

import logging
from types import SimpleNamespace

import pytest

from outrider.roles import slow_steps
from outrider.roles.slow_steps import LONG_STEP_NS, SlowStepLog, listen_to_triton, note_preparation

MS = 1_000_000


class Clock:
    """Stands still."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> SlowStepLog:
    caplog.set_level(logging.WARNING)
    found = SlowStepLog(logging.getLogger("outrider.test"), "growth", now=clock)
    found.begin()
    return found


def test_steps_that_nothing_holds_up_are_not_told_of(
    log: SlowStepLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log.note(LONG_STEP_NS - 1, rows=64, sessions=2)
        clock.now_s += 5
    assert not caplog.records


def test_a_long_step_is_told_with_its_shape_and_that_nothing_was_prepared(
    log: SlowStepLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.note(612 * MS, rows=384, sessions=16)
    assert [record.getMessage() for record in caplog.records] == [
        "growth: a step of 384 rows of 16 sessions took 612 ms; nothing was compiled or captured in it"
    ]


def test_what_was_prepared_while_serving_is_the_cause_and_is_told_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    note_preparation("kernel compiled: of the warm-up", 1.0)
    log = SlowStepLog(logging.getLogger("outrider.test"), "growth", now=clock)
    log.begin()
    log.note(2 * MS, rows=8, sessions=1)
    note_preparation("kernel compiled: attend", 4.5)
    note_preparation("graph captured: 384 rows", 0.1)
    for _ in range(2):
        # However short the step: somebody else may have prepared it.
        log.note(2 * MS, rows=8, sessions=1)
        clock.now_s += 5
    assert [record.getMessage() for record in caplog.records] == [
        "growth: a step of 8 rows of 1 sessions took 2 ms; prepared while serving: kernel compiled: attend 4500 ms, "
        "graph captured: 384 rows 100 ms"
    ]


def test_there_is_one_line_a_second_at_most_and_the_next_names_what_was_left_out(
    log: SlowStepLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log.note(600 * MS, rows=8, sessions=1)
    note_preparation("kernel compiled: late", 0.25)
    for _ in range(5):
        # All but the first are like any other, and only come before the next line may.
        log.note(2 * MS, rows=16, sessions=1)
    assert len(caplog.records) == 1
    clock.now_s += 1.5
    # The next step tells of it, although nothing held it up itself.
    log.note(2 * MS, rows=32, sessions=1)
    assert caplog.records[-1].getMessage() == (
        "growth: a step of 32 rows of 1 sessions took 2 ms; prepared while serving: kernel compiled: late 250 ms "
        "(3 more such steps since the last line)"
    )
    clock.now_s += 1.5
    log.note(2 * MS, rows=32, sessions=1)
    assert len(caplog.records) == 2


def test_kernels_of_triton_are_noted_and_another_listener_still_hears(
    log: SlowStepLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    knobs = pytest.importorskip("triton").knobs
    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **found: heard.append(found["src"].name))
    monkeypatch.setattr(slow_steps, "_is_listening", slow_steps.threading.Event())
    listen_to_triton()
    listen_to_triton()
    for name, is_read in (("scan", False), ("walk", True)):
        knobs.compilation.listener(
            src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=SimpleNamespace(total=30_000),
            cache_hit=is_read,
        )  # fmt: skip
    log.note(2 * MS, rows=8, sessions=1)
    assert caplog.records[-1].getMessage().endswith("kernel compiled: scan 30 ms, kernel read: walk 30 ms")
    assert heard == ["scan", "walk"]
