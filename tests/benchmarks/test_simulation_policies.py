"""The simulator on virtual time: exact, and what it holds the scheduler to."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from benchmarks.simulation import virtual_time
from benchmarks.simulation.comparison import LEARNED, OFF, Case, broken_promises, compare, run, verdicts
from benchmarks.simulation.fixed_policies import fixed_way
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualFigures, VirtualSimulation, simulate

from outrider.coordinator import clock
from outrider.coordinator.ahead import Lead
from outrider.coordinator.lane import TargetLane
from outrider.coordinator.messages import SpeculationMode
from outrider.coordinator.rounds import Way
from outrider.coordinator.verify_loop import VerifyLoop

NEAR: dict[str, Any] = {
    "target_step_ms": 4.0,
    "target_rtt_ms": 0.3,
    "draft_rtt_ms": 0.3,
    "draft_width": 12,
    "warmup_s": 0.2,
    "duration_s": 0.5,
}


ASYNC, OFF_MODE = SpeculationMode.ASYNC, SpeculationMode.OFF


def near(**changes: Any) -> Settings:
    return Settings(**NEAR | changes)


class RecordingLoop(VerifyLoop):
    """Remembers every batch: (time, time held, sessions)."""

    made: ClassVar[list["RecordingLoop"]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches: list[tuple[int, int, list[int]]] = []
        self.ages: list[int] = []
        """Of the latest result, as each batch leaves."""
        type(self).made.append(self)

    def choose(self, sessions):
        now_ns = clock.now_ns()
        ids = [session.session_id for session in sessions]
        in_flight = {session.session_id for flight in self.lane.flights for session in flight.sessions}
        assert in_flight.isdisjoint(ids)
        self.ages.append(now_ns - self.lane.applied_result_ns)
        self.batches.append((now_ns, now_ns - (self._free_since_ns or now_ns), ids))
        return super().choose(sessions)


def recording(way: Way | None = None) -> type[RecordingLoop]:
    """A loop of its own class, so that its records are its own; `way` fixes how its rounds are timed."""

    class Loop(RecordingLoop):
        made: ClassVar[list[RecordingLoop]] = []

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if way is not None:
                self.lane.way.current = way
                self.lane.way.observe = lambda **_: None

    return Loop


def test_time_jumps_and_nothing_waits():
    async def main() -> list[float]:
        began = clock.now_ns()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
        return [began, clock.now_ns()]

    assert virtual_time.run(main()) == [0, 3600 * 10**9]
    assert clock.now_ns() != 3600 * 10**9


def test_what_waits_for_nothing_is_told():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="for nothing that will happen"):
        virtual_time.run(main())


def test_a_run_is_the_same_every_time():
    settings = near(sessions=2, duration_s=0.2)
    first, second = simulate(settings), simulate(settings)
    assert first == second
    assert first.wrong_tokens == 0
    assert first.acceptance_length > 2
    assert simulate(near(sessions=2, duration_s=0.2, seed=1)) != first


def test_the_learned_policy_keeps_its_promises_at_a_setting():
    cases = [
        Case(setting="far", sessions=4, policy=policy, scale=0.3) for policy in (LEARNED, OFF, "4 at once", "8 waits")
    ]
    figures = compare(cases)
    assert broken_promises(figures) == []
    (verdict,) = verdicts(figures)
    assert verdict.learned > 1.4 * verdict.off


def test_broken_promises_are_named():
    rates = {LEARNED: 90.0, OFF: 95.0, "1 at once": 100.0}
    figures = {
        Case(setting="near", sessions=4, policy=policy): VirtualFigures(
            tokens_per_s=rate,
            acceptance_length=1.0,
            target_busy=1.0,
            rows_per_step=1.0,
            slowest_session=1.0,
            wrong_tokens=0,
            dropped_nodes=0,
        )
        for policy, rate in rates.items()
    }
    told = broken_promises(figures)
    assert any("90.0% of '1 at once'" in line for line in told)
    assert any("94.7% of what plain decoding gives" in line for line in told)
    assert sum("on the mean" in line for line in told) == 2


def test_the_command_line_prints_a_row_a_setting(capsys):
    options = ("--settings", "far", "--sessions", "1", "--policies", "off", "--seconds-scale", "0.1", "--jobs", "1")
    assert run(options) == 0
    assert "far" in capsys.readouterr().out


def test_a_large_batch_sheds_its_trees_and_is_not_slower_than_without():
    dear = {"target_step_ms": 2.0, "target_row_us": 200.0, "duration_s": 0.6}
    few = simulate(near(sessions=2, **dear))
    many, off = (simulate(near(sessions=24, mode=mode, **dear)) for mode in (ASYNC, OFF_MODE))
    assert many.tokens_per_s > 0.97 * off.tokens_per_s
    assert few.rows_per_step / 2 - 1 > 2 * (many.rows_per_step / 24 - 1)


def test_a_frozen_draft_delays_no_step_beyond_the_cap():
    loop_type = recording(Way.WAIT)

    async def main() -> int:
        settings = near(sessions=3, wait_cap_ms=2.0, draft_step_ms=1.5)
        simulation = VirtualSimulation(settings, loop_type)
        readers = [asyncio.ensure_future(simulation.read(key, simulation.submit(key, tokens=400))) for key in (1, 2, 3)]
        await asyncio.sleep(0.2)
        simulation.drafts[0].is_frozen = True
        frozen_ns = clock.now_ns()
        await asyncio.gather(*readers)
        assert all(simulation._wrong_tokens(key) == 0 for key in (1, 2, 3))
        return frozen_ns

    frozen_ns = virtual_time.run(main())
    (loop,) = loop_type.made
    held = [held_ns for _, held_ns, _ in loop.batches]
    assert max(held) <= 2_000_000
    assert max(held[: len(held) // 10]) > 0, "the draft was never waited for"
    # Without it, rounds soon follow each other as if there were no draft at all.
    frozen = [at for at, _, _ in loop.batches if at > frozen_ns]
    gaps = sorted(after - before for before, after in pairwise(frozen))
    assert len(gaps) > 100
    assert gaps[len(gaps) // 2] < 4.6e6


def test_two_groups_keep_a_distant_target_busy_and_share_it_evenly():
    far = near(sessions=6, target_rtt_ms=3.0)
    one, two = recording(Way.WAIT), recording(Way.TWO_GROUPS)
    alone, together = simulate(far, one), simulate(far, two)
    assert together.target_busy > 0.97
    assert alone.target_busy < 0.7
    assert together.wrong_tokens == 0
    (loop,) = two.made
    # A batch arrives a tenth of a step before the one that runs is over, and not sooner: it would lack growth. A result
    # has travelled for 1.5 ms, as has the step that runs, and the batch will for as long: of 4 ms 0.6 to 1 are left.
    ages = sorted(loop.ages[10:])
    assert 0.4e6 < ages[len(ages) // 4] <= ages[-1] < 1.6e6
    batches = [set(ids) for _, _, ids in loop.batches[4:-1]]
    for before, after in pairwise(batches):
        assert len(after) == 3
        assert before.isdisjoint(after)
    # Those that waited longest come first: nobody is left out of two batches in a row.
    assert all(before | after == set().union(*batches) for before, after in pairwise(batches))


def test_two_groups_are_found_where_they_pay_and_left_where_they_do_not():
    """Rows dear and a target far away: half a batch takes 3 ms, a whole one 5, and 3 more to travel."""
    dear = {"sessions": 16, "mode": OFF_MODE, "target_step_ms": 1.0, "target_row_us": 250.0, "ahead": False}
    far_loop, near_loop = recording(), recording()
    far = simulate(near(**dear, target_rtt_ms=3.0, duration_s=3.0), far_loop)
    close = simulate(near(**dear, target_rtt_ms=0.1, duration_s=1.0), near_loop)
    assert far.tokens_per_s > 1.15 * 16 / 0.008
    assert close.tokens_per_s > 0.95 * 16 / 0.0051
    (far_made,), (near_made,) = far_loop.made, near_loop.made
    assert sum(len(ids) == 8 for _, _, ids in far_made.batches) > 0.6 * len(far_made.batches)
    assert sum(len(ids) == 8 for _, _, ids in near_made.batches) < 0.1 * len(near_made.batches)


@pytest.mark.parametrize("sessions", [16, 64])
def test_pauses_do_not_end_for_good_what_hides_the_way_to_a_target(sessions):
    """Every tenth batch is late, and the draft too slow to help: plain decoding is no faster."""
    slow = near(
        sessions=sessions,
        target_session_us=55.0,
        target_rtt_ms=0.35 + 0.03 * sessions,
        draft_step_ms=28.0,
        wait_cap_ms=3.0,
        pause_ms=8.0,
        pause_share=0.1,
        warmup_s=1.0,
        duration_s=1.5,
    )
    drafted, off = (simulate(replace(slow, mode=mode)) for mode in (ASYNC, OFF_MODE))
    assert drafted.tokens_per_s > 0.97 * off.tokens_per_s


def test_prompts_are_no_reason_to_go_ahead_no_more():
    """Ways are tried while prompts are computed, the first when nobody emits yet; its rate then is not its own."""
    slow = near(
        sessions=16,
        target_rtt_ms=0.8,
        draft_step_ms=28.0,
        wait_cap_ms=3.0,
        prompt_steps=6,
        warmup_s=1.5,
        duration_s=1.0,
    )
    drafted, off = (simulate(replace(slow, mode=mode)) for mode in (ASYNC, OFF_MODE))
    assert drafted.tokens_per_s > 0.97 * off.tokens_per_s
    assert drafted.wrong_tokens == 0


def test_a_target_goes_on_at_once_where_batches_are_sent_ahead():
    """Near or 3 ms away, with a draft and without: the step's end is the next one's beginning."""
    for mode, rtt_ms in ((OFF_MODE, 0.3), (OFF_MODE, 3.0), (ASYNC, 3.0)):
        settings = near(sessions=6, mode=mode, target_rtt_ms=rtt_ms, duration_s=0.6)
        ahead, waits = simulate(settings, fixed_way(Way.AHEAD)), simulate(settings, fixed_way(Way.WAIT))
        assert ahead.target_busy > 0.97
        assert ahead.tokens_per_s > waits.tokens_per_s
        assert ahead.wrong_tokens == 0


@pytest.mark.parametrize("leaves_at_once", [False, True])
@pytest.mark.parametrize("rtt_ms", [0.0, 0.3, 3.0])
def test_growth_is_sent_behind_batches_that_were_sent_ahead(rtt_ms, leaves_at_once, monkeypatch):
    """Both ends find the same trees with it, or the target would be lost; sent at once, they gain by it."""
    totals: list[Any] = []
    counts = VirtualSimulation._counts
    monkeypatch.setattr(VirtualSimulation, "_counts", lambda run: totals.append(run.scheduler.totals) or counts(run))
    if leaves_at_once:
        monkeypatch.setattr(Lead, "ns", lambda _lead, **_: 1e12)
    settings = near(sessions=4, workers=2, mode=ASYNC, target_rtt_ms=rtt_ms, rounds="ahead")
    with_growth = simulate(settings)
    sent = totals[0].serving
    assert sent.ahead_additions - sent.ahead_additions_late > 30
    assert with_growth.wrong_tokens == 0
    if leaves_at_once:
        monkeypatch.setattr(TargetLane, "extend_ahead", lambda _lane: None)
        without = simulate(settings)
        assert with_growth.acceptance_length > 1.03 * without.acceptance_length
