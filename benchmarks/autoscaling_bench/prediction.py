"""What the autoscaler's model promises of more and fewer drafts, and what they bring: on virtual time, with the real
scheduler, loops, mirrors and counters."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from benchmarks.simulation import virtual_time
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation
from rich.table import Table

from outrider.coordinator.messages import SpeculationMode
from outrider.deploy.autoscaler_model import Sample, speeds, window_of
from outrider.errors import WorkerUnavailable
from outrider.v1 import generation_pb2, registry_pb2

# (sessions, draft step in ms, nodes that it expands)
CASES = (
    (4, 0.75, 8),
    (4, 2.5, 8),
    (16, 0.75, 64),
    (16, 0.75, 8),
    (16, 2.5, 8),
    (16, 2.5, 4),
    (8, 4.0, 8),
    (32, 2.0, 16),
)
MOST = 4
_PLACES = 64
BASE = Settings(target_rtt_ms=0.3, draft_rtt_ms=0.3, wait_cap_ms=3.0, warmup_s=0.7, duration_s=2.0)


def info_of(run: VirtualSimulation) -> generation_pb2.ServerInfo:
    """What the run's coordinator would say of itself."""
    totals = run.scheduler.totals
    sessions, undrafted = run.scheduler.speculating_sessions()
    info = generation_pb2.ServerInfo(incarnation=1, steps_total=totals.steps)
    info.draft_demand.CopyFrom(totals.demand.message(sessions=sessions, undrafted_sessions=undrafted))
    for number in range(len(run.drafts)):
        who = registry_pb2.WorkerIntroduction(worker_id=f"draft-{number}", role=registry_pb2.WORKER_ROLE_DRAFT)
        who.limits.max_sessions = _PLACES
        info.workers.add(introduction=who, state="serving")
    return info


def play(settings: Settings, most: int = MOST) -> tuple[float, list[float]]:
    """Tokens a second, and what the model makes of the counters: the speed of 0 to `most` drafts, by plain decoding."""

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


def table() -> Table:
    """A line a case: speeds of 1 to `MOST` drafts as measured, and as promised by the counters of fewer or more."""
    shown = Table(title="tokens a second by plain decoding, with 1 to 4 drafts")
    for heading in ("sessions", "step ms", "nodes", "measured", "promised with 1", "with 2", "with 4"):
        shown.add_column(heading, justify="right")
    for sessions, step_ms, width in CASES:
        settings = replace(BASE, sessions=sessions, draft_step_ms=step_ms, draft_width=width)
        plain, _ = play(replace(settings, mode=SpeculationMode.OFF))
        played = [play(replace(settings, workers=workers)) for workers in range(1, MOST + 1)]
        promised = [played[drafts - 1][1][1:] for drafts in (1, 2, 4)]
        cells = [[rate / plain for rate, _ in played], *promised]
        shown.add_row(
            str(sessions), f"{step_ms:g}", str(width), *(" ".join(f"{value:.2f}" for value in cell) for cell in cells)
        )
    return shown
