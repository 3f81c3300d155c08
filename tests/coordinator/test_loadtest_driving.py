"""Records of a client process about requests that nobody answers."""

import asyncio
import math
import time
from datetime import UTC, datetime

import pytest

from outrider.coordinator.loadtest import metrics
from outrider.coordinator.loadtest.driving import COUNTERS, Driver, Job
from outrider.coordinator.loadtest.options import LoadtestConfig, Point
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.running import figures_of
from outrider.coordinator.loadtest.senders import Ask
from outrider.coordinator.loadtest.workloads import FromFile, Prompt, PythonPrompts, Turn

PATIENCE_S = 0.2


class Silent:
    """A service that takes requests, and gives the first one's single token."""

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> Prompt:
        record.sent_s = time.monotonic() - begin_s
        if record.index:
            await asyncio.sleep(PATIENCE_S)
            record.error = "TimeoutError"
        else:
            record.chunk_s, record.output_tokens = [time.monotonic() - begin_s], 1
        return ""

    async def close(self) -> None:
        """Nothing is open."""


async def test_requests_that_fail_late_were_under_way_and_take_their_part_of_the_run():
    job = Job(
        config=LoadtestConfig(endpoint="nowhere:1", num_prompts=3),
        point=Point(request_rate=math.inf, max_concurrency=None, speculation="async"),
        workload=PythonPrompts(max_new_tokens=1, seed=0),
    )
    driven = await Driver(job, Silent(), begin_s=time.monotonic(), counters=[0] * COUNTERS).run()
    assert metrics.peak_concurrency(driven.records) >= 2
    figures = figures_of(job, [driven], datetime.now(UTC))
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert figures["duration"] >= PATIENCE_S
    # One in the whole run, not one in the moment that it took.
    assert figures["request_throughput"] <= 1 / PATIENCE_S


@pytest.mark.parametrize(("num_prompts", "expected"), [(None, 3), (4, 3), (2, 2)])
def test_of_a_trace_nothing_is_begun_after_the_duration(tmp_path, num_prompts, expected):
    times = [0.0, 0.5, 0.9, 1.0, 2.0]
    turns = (Turn(prompt="a", max_new_tokens=1),)
    config = LoadtestConfig(
        endpoint="nowhere:1", dataset_name="trace", dataset_path=tmp_path, duration=1.0, num_prompts=num_prompts
    )
    workload = FromFile(entries=[turns] * len(times), arrivals_s=times, seed=0)
    job = Job(config=config, point=config.points()[0], workload=workload)
    assert list(job.arrivals()) == list(enumerate(times[:expected]))
