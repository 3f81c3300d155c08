"""Whether the model of drafts' worth says what the simulated service does."""

import asyncio
from dataclasses import replace

import pytest
from benchmarks.simulation import virtual_time
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation

from outrider.coordinator.messages import SpeculationMode
from outrider.deploy.autoscaler_model import Sample, speeds, window_of
from outrider.errors import WorkerUnavailable
from outrider.v1 import generation_pb2, registry_pb2

SETTINGS = Settings(
    sessions=16,
    draft_step_ms=2.5,
    draft_width=8,
    target_rtt_ms=0.3,
    draft_rtt_ms=0.3,
    warmup_s=0.5,
    duration_s=0.8,
    wait_cap_ms=3.0,
)


def info_of(run: VirtualSimulation) -> generation_pb2.ServerInfo:
    totals = run.scheduler.totals
    sessions, undrafted = run.scheduler.speculating_sessions()
    info = generation_pb2.ServerInfo(incarnation=1, steps_total=totals.steps)
    info.draft_demand.CopyFrom(totals.demand.message(sessions=sessions, undrafted_sessions=undrafted))
    for number in range(len(run.drafts)):
        who = registry_pb2.WorkerIntroduction(worker_id=f"draft-{number}", role=registry_pb2.WORKER_ROLE_DRAFT)
        who.limits.max_sessions = 64
        info.workers.add(introduction=who, state="serving")
    return info


def play(settings: Settings, most: int) -> tuple[float, list[float]]:
    """Tokens a second, and what the model says of 0, 1, ... drafts; of `off` nothing."""

    async def main() -> tuple[float, list[float]]:
        run = VirtualSimulation(settings)
        readers = [asyncio.create_task(run.read(key, run.submit(key))) for key in range(1, settings.sessions + 1)]
        await asyncio.sleep(settings.warmup_s)
        before, tokens = Sample.of([info_of(run)], 0.0), run.scheduler.totals.emitted_tokens
        await asyncio.sleep(settings.duration_s)
        after = Sample.of([info_of(run)], settings.duration_s)
        rate = (run.scheduler.totals.emitted_tokens - tokens) / settings.duration_s
        await run.scheduler.stop(WorkerUnavailable("seen enough"))
        await asyncio.gather(*readers, return_exceptions=True)
        return rate, speeds(window_of([before, after]), most) if run.drafts else []

    return virtual_time.run(main())


def test_the_model_knows_the_speed_that_is_there_and_roughly_that_of_one_draft_more_or_less():
    plain, _ = play(replace(SETTINGS, mode=SpeculationMode.OFF), 0)
    one, from_one = play(SETTINGS, 2)
    two, from_two = play(replace(SETTINGS, workers=2), 2)
    assert from_one[0] == 1
    assert from_one[1] == pytest.approx(one / plain, rel=0.04)
    assert from_two[2] == pytest.approx(two / plain, rel=0.04)
    # 1.2 times as fast with the second one.
    assert two / one > 1.15
    assert from_one[2] == pytest.approx(two / plain, rel=0.15)
    assert from_two[1] == pytest.approx(one / plain, rel=0.15)


def test_a_draft_that_keeps_up_with_its_sessions_is_said_to_be_enough():
    _, speed = play(replace(SETTINGS, sessions=4, draft_step_ms=0.75, draft_width=64), 4)
    assert speed[1] > 2
    assert speed[4] / speed[1] < 1.03
