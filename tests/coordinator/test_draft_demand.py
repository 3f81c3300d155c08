"""What the coordinator counts of the worth of drafts: how rounds end, and what they would take without trees."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.simulation import virtual_time
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation
from tests.coordinator.committing import Commitment, commit_together

from outrider.coordinator.draft_demand import DraftDemand
from outrider.coordinator.forest import Forest
from outrider.coordinator.messages import Growth, GrowthBatch, SpeculationMode
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.v1 import generation_pb2

# A target of 8 ms and a draft too slow for its sixteen sessions.
SLOW = Settings(
    sessions=16,
    draft_step_ms=2.5,
    draft_width=8,
    target_rtt_ms=0.3,
    draft_rtt_ms=0.3,
    warmup_s=0.5,
    duration_s=0.8,
    wait_cap_ms=3.0,
)


def observed(settings: Settings) -> tuple[generation_pb2.DraftDemand, int, int]:
    """What was counted while it was measured: the difference, target rounds and tokens."""

    async def main() -> tuple[generation_pb2.DraftDemand, int, int]:
        run = VirtualSimulation(settings)
        scheduler, totals = run.scheduler, run.scheduler.totals
        readers = [asyncio.create_task(run.read(key, run.submit(key))) for key in range(1, settings.sessions + 1)]
        await asyncio.sleep(settings.warmup_s)
        before = totals.demand.message(sessions=0, undrafted_sessions=0)
        steps, tokens = totals.steps, totals.emitted_tokens
        await asyncio.sleep(settings.duration_s)
        sessions, undrafted = scheduler.speculating_sessions()
        demand = totals.demand.message(sessions=sessions, undrafted_sessions=undrafted)
        for own, value in before.ListFields():
            setattr(demand, own.name, getattr(demand, own.name) - value)
        steps, tokens = totals.steps - steps, totals.emitted_tokens - tokens
        await scheduler.stop(WorkerUnavailable("seen enough"))
        for ended in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(ended, OutriderError)
        return demand, steps, tokens

    return virtual_time.run(main())


def test_the_counters_of_a_run_are_those_of_its_rounds():
    demand, rounds, tokens = observed(SLOW)
    assert (demand.sessions, demand.undrafted_sessions) == (16, 0)
    assert demand.tokens_total == tokens
    assert demand.rounds_total == pytest.approx(16 * rounds, rel=0.05)
    assert demand.target_ns_total / rounds == pytest.approx(8.7e6, rel=0.05)
    # A root and no wait: 8 ms, 10 us a session, and the way there and back.
    assert demand.plain_ns_total / rounds == pytest.approx(8.46e6, rel=0.03)
    assert demand.draft_ns_total / demand.draft_steps_total == pytest.approx(2.5e6, rel=0.01)
    assert demand.draft_steps_total == pytest.approx(0.8 / 2.5e-3, rel=0.02)
    assert demand.expanded_nodes_total / demand.draft_steps_total == pytest.approx(8, rel=0.05)
    # A draft that is right about nine tokens in ten, wherever it has grown on; and often has not.
    assert demand.missed_rounds_total / demand.tokens_total == pytest.approx(0.1, abs=0.03)
    assert 0.2 * demand.rounds_total < demand.bare_rounds_total < demand.rounds_total
    assert demand.starved_rounds_total > 0


def test_sessions_without_a_draft_are_counted_and_their_rounds_are_not():
    demand, rounds, tokens = observed(replace(SLOW, sessions=2, workers=1, mode=SpeculationMode.OFF, duration_s=0.1))
    assert (demand.sessions, demand.rounds_total, demand.draft_steps_total) == (0, 0, 0)
    assert tokens == 2 * rounds
    # Clocks count whole nanoseconds.
    assert demand.plain_ns_total == pytest.approx(demand.target_ns_total, abs=rounds)


def mirror_with(tokens: list[int], nodes: list[tuple[int, int, int]]) -> TreeMirror:
    """Nodes as (id, parent, token)."""
    mirror = TreeMirror(Forest(), tokens)
    ids, parents, grown = zip(*nodes, strict=True)
    growth: Any = Growth(
        session_id=1,
        epoch=1,
        as_of=len(tokens),
        node_ids=ids,
        parents=parents,
        tokens=grown,
        acceptance=[0.5] * len(ids),
    )
    graft("draft", GrowthBatch.of([growth]), [mirror])
    return mirror


@pytest.mark.parametrize(
    ("committed", "drafted", "missed"),
    [
        ([10], True, False),
        ([10, 20], True, False),
        # Its parent has children, and it is none of them.
        ([11], False, True),
        ([10, 21], False, True),
        # The draft has grown nothing there.
        ([10, 20, 30], False, False),
        # Off the tree two tokens ago: what counts is where it was left.
        ([11, 20], False, True),
    ],
)
def test_a_root_was_drafted_or_missed_or_the_draft_was_behind(committed, drafted, missed):
    tokens = [1]
    mirror = mirror_with(tokens, [(1, 0, 10), (2, 1, 20)])
    tokens += committed
    commit_together(Commitment(mirror, committed))
    assert (mirror.root_was_drafted, mirror.root_was_missed) == (drafted, missed)


def test_the_message_has_a_field_for_every_counter():
    demand = DraftDemand(rounds=3, tokens=7)
    demand.note_growth(sessions=4, expanded=5, step_ns=2.6)
    demand.note_target_round(round_ns=9, plain_ns=8)
    message = demand.message(sessions=2, undrafted_sessions=1)
    assert (message.rounds_total, message.tokens_total, message.target_ns_total, message.plain_ns_total) == (3, 7, 9, 8)
    assert (message.draft_steps_total, message.grown_sessions_total, message.expanded_nodes_total) == (1, 4, 5)
    assert (message.draft_ns_total, message.sessions, message.undrafted_sessions) == (2, 2, 1)
