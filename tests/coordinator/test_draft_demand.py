"""Counters of the value of drafts at the coordinator: ends of rounds, and nodes of draft steps."""

import asyncio
from typing import Any

from tests.coordinator.fake_workers import growth_of, make_request

from outrider.coordinator.workers.draft_demand import DraftDemand
from outrider.drafting.growth_source import GrowthSource
from outrider.sampling import SpeculationMode


async def test_the_counters_of_a_run_are_those_of_its_rounds(bench):
    target = bench.add_target(step_s=0.002)
    bench.add_draft(accuracy=0.7, delay_s=0.004)
    results = await bench.generate_all(make_request(number) for number in range(1, 5))
    demand = bench.scheduler.totals.demand.message(sessions=0, undrafted_sessions=0)
    assert demand.tokens_total == 4 * 40
    assert demand.rounds_total == sum(result.speculation.verify_steps for result in results)
    # Of guesses that are right or wrong, and come late.
    assert demand.missed_rounds_total > 0
    assert demand.starved_rounds_total >= 4
    assert demand.missed_rounds_total + demand.starved_rounds_total <= demand.rounds_total
    # The fake target says 1 us of each of its rounds, 0.8 without nodes; the fake draft 1 ms of its steps.
    assert demand.target_ns_total == 1000 * len(target.rounds)
    assert demand.plain_ns_total == 800 * len(target.rounds)
    assert demand.draft_ns_total == demand.draft_steps_total * 1_000_000
    assert demand.grown_sessions_total == demand.draft_steps_total > 0
    # Six levels, each below one node.
    assert demand.expanded_nodes_total == 6 * demand.draft_steps_total


async def test_sessions_without_a_draft_are_counted_and_their_rounds_are_not(bench):
    bench.add_target()
    for mode in (SpeculationMode.OFF, SpeculationMode.ASYNC):
        bench.begin(mode=mode)
    await asyncio.sleep(0.01)
    assert bench.scheduler.drafts.speculating() == (1, 1)
    totals = bench.scheduler.totals
    assert totals.verify_steps > 0
    assert (totals.demand.rounds, totals.demand.draft_steps) == (0, 0)


async def test_nodes_below_one_parent_are_one_expansion(bench):
    bench.add_target(rests=True)
    bench.add_draft(delay_s=1000.0)
    one, two = bench.begin(1), bench.begin(2)
    bench.grow("draft", growth_of(one, [5, 6, 7], parents=[0, 0, 1]), growth_of(two, [5, 6]))
    demand = bench.scheduler.totals.demand
    assert (demand.draft_steps, demand.grown_sessions, demand.expanded_nodes) == (1, 2, 4)
    # A message without a node is no step's.
    bench.grow("draft", growth_of(one, []))
    assert demand.draft_steps == 1
    # Nor is a tree that is sent again, what n-grams grow, or growth of an epoch that has passed.
    for changes in list[dict[str, Any]]([{"again": True}, {"source": GrowthSource.NGRAM}, {"epoch": 0}]):
        bench.grow("draft", growth_of(one, [5], **changes))
    assert (demand.draft_steps, demand.grown_sessions, demand.expanded_nodes) == (1, 2, 4)


def test_the_message_has_a_field_for_every_counter():
    demand = DraftDemand(rounds=3, tokens=7, missed_rounds=1, starved_rounds=2, target_ns=9)
    demand.plain_ns, demand.draft_steps, demand.draft_ns, demand.grown_sessions, demand.expanded_nodes = 8, 1, 2.6, 4, 5
    message = demand.message(sessions=2, undrafted_sessions=1)
    assert (message.rounds_total, message.tokens_total, message.target_ns_total, message.plain_ns_total) == (3, 7, 9, 8)
    assert (message.missed_rounds_total, message.starved_rounds_total) == (1, 2)
    assert (message.draft_steps_total, message.grown_sessions_total, message.expanded_nodes_total) == (1, 4, 5)
    assert (message.draft_ns_total, message.sessions, message.undrafted_sessions) == (2, 2, 1)
