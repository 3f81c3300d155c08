"""Workers come, go, refuse and forget while requests of all kinds run: outputs are right, nothing is left."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from outrider.coordinator.sessions.messages import FaultKind, GenerationRequest, SessionFault
from outrider.coordinator.sessions.poison import DOUBT_S
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.errors import PoisonRequest, WorkerUnavailable
from outrider.sampling import SamplingSpec, SpeculationMode

_REQUESTS = 24
_MODES = [SpeculationMode.ASYNC] * 3 + [SpeculationMode.SYNC, SpeculationMode.OFF]
_SOURCES = [ALL_SOURCES] * 3 + [frozenset({GrowthSource.NGRAM}), frozenset({GrowthSource.EAGLE})]


class Disorder:
    """A bench whose workers do as chance will."""

    def __init__(self, bench: Any, chance: random.Random) -> None:
        self.bench, self.chance = bench, chance
        self.targets: dict[str, Any] = {}
        self.drafts: dict[str, Any] = {}
        self.gone: set[str] = set()
        for _ in range(2):
            self.add_target()
            self.add_draft()

    def add_target(self) -> None:
        name = f"target {len(self.targets)}"
        self.targets[name] = self.bench.add_target(name, step_s=self.chance.choice([0.0005, 0.002]))

    def add_draft(self) -> None:
        name, sources = f"draft {len(self.drafts)}", self.chance.choice([[1], [2], [1, 2]])
        self.drafts[name] = self.bench.add_draft(
            name, accuracy=self.chance.random(), delay_s=self.chance.choice([0.0, 0.01]), sources=sources
        )

    def happen(self) -> None:
        """One thing of many."""
        scheduler = self.bench.scheduler
        name = self.chance.choice(list(self.targets))
        target, draft = self.targets[name], self.chance.choice(list(self.drafts))
        what = self.chance.randrange(8)
        if what == 0:
            scheduler.remove_target(name, "gone")
            self.gone.add(name)
        elif what == 1:
            scheduler.drain_worker(name, on_empty=lambda: None)
        elif what == 2:
            target.fault_kind = self.chance.choice([FaultKind.LOST, FaultKind.NO_ROOM])
            target.fail_sessions |= set(list(target.sessions)[:2])
        elif what == 3:
            target.loses_growth = not target.loses_growth
        elif what == 4:
            scheduler.drafts.remove(draft)
            self.gone.add(draft)
        elif what == 5:
            for session_id, session in list(self.drafts[draft].sessions.items())[:1]:
                del self.drafts[draft].sessions[session_id]
                fault = SessionFault(kind=self.chance.choice([FaultKind.NO_ROOM, FaultKind.REFUSED]), message="no")
                scheduler.drafts.take_fault(draft, session_id, session.epoch, fault)
        elif what == 6 and len(scheduler.drafts.peers) < 4:
            self.add_draft()
        if what == 7 or not scheduler.has_target:
            self.add_target()


def make_request(number: int, chance: random.Random) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=(number, 2, 3),
        sampling=SamplingSpec(
            max_new_tokens=chance.choice([1, 2, 30, 60]),
            temperature=chance.choice([0.0, 1.0]),
            stop_token_ids=tuple(chance.sample(range(50), chance.choice([0, 2]))),
        ),
        mode=chance.choice(_MODES),
        sources=chance.choice(_SOURCES),
        n=chance.choice([1, 1, 3]),
        trace=chance.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(1, 9))
async def test_outputs_are_right_and_nothing_is_left_behind(
    make_bench: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    chance = random.Random(seed)
    bench = make_bench(drafts_per_session=1 + seed % 2, sync_wait_cap_ms=20.0, target_wait_s=1e6, max_queue=1000)
    disorder = Disorder(bench, chance)

    async def run(request: GenerationRequest, begin_s: float, cancel_after_s: float | None) -> None:
        await asyncio.sleep(begin_s)
        # Whoever was with several targets as they went may be taken for the reason.
        with contextlib.suppress(TimeoutError, PoisonRequest):
            async with asyncio.timeout(cancel_after_s):
                result = await bench.generate(request)
            assert all(own.accepted_tokens <= own.drafted_tokens for own in result.speculation.sources)

    tasks = [
        asyncio.create_task(run(make_request(number, chance), 0.1 * chance.random(), chance.choice([None, None, 0.05])))
        for number in range(1, _REQUESTS + 1)
    ]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.02 * chance.random())
        disorder.happen()
    await asyncio.gather(*tasks)
    # A session in doubt is looked at once more.
    await asyncio.sleep(2 * DOUBT_S)
    bench.check_workers()
    assert not bench.scheduler.sessions
    assert bench.scheduler.running_sessions == bench.scheduler.waiting_requests == 0
    # Who is gone is told nothing any more.
    workers = disorder.targets | disorder.drafts
    assert not any(workers[name].sessions for name in workers.keys() - disorder.gone)
    assert bench.scheduler.totals.drafted_tokens > 0
    assert not [record for record in caplog.records if record.exc_info]
    bench.scheduler.stop(WorkerUnavailable("the end"))
