"""The requests of benchmarks/sources.py, and how its figures are made up; no service is started."""

from collections import Counter

import pytest
from benchmarks.source_bench import command
from benchmarks.source_bench.driving import PassFigures, options_of
from benchmarks.source_bench.readings import Readings, in_between, line, log_lines, samples, told
from benchmarks.source_bench.services import MIXTURES
from benchmarks.source_bench.workloads import NAMES, edit_request, quote_request, workload
from prometheus_client import generate_latest

from outrider.coordinator.metrics import families as metrics
from outrider.coordinator.sessions.totals import Totals
from outrider.metrics.families import Families, registry_of
from outrider.metrics.worker import StepCounts, WorkerGauges, describe_worker

TEXT = "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result\n"


def test_requests_repeat_what_they_show():
    edited = edit_request(TEXT)
    assert edited.startswith(TEXT)
    assert edited.endswith("# The same with result renamed to new_result:\ndef total(prices):\n    new_result = 0\n")
    quoted = quote_request(TEXT)
    assert TEXT in quoted
    assert quoted.endswith("is about result? This one:\ndef total(prices):\n    result = 0\n")


def test_workloads_are_the_same_every_time():
    for name in NAMES:
        own = workload(name, 50)
        assert len(own.prompts) == 50
        assert len({*own.prompts}) == 50
        assert own == workload(name, 50)
        assert own.passes == (2 if name == "twice" else 1)
    with pytest.raises(ValueError, match="'thrice' given, edits or quotes or twice needed"):
        workload("thrice", 1)


def test_a_mixture_asks_for_its_sources():
    asked = {name: options_of(name, temperature=0.0, max_new_tokens=8, seed=1) for name in MIXTURES}
    assert asked["off"].get("speculation") == "off"
    assert "sources" not in asked["off"]
    assert asked["ngram+eagle"].get("sources") == ["ngram", "eagle"]
    assert asked["model/ngram"].get("sources") == asked["model+ngram"].get("sources") == ["model", "ngram"]
    assert {options.get("speculation") for name, options in asked.items() if name != "off"} == {"async"}


def test_figures_are_compared_with_off_and_with_the_first_pass():
    def figures(seconds: float, accepted: int, *outputs: tuple[int, ...]) -> PassFigures:
        counts = {"ngram": [9, 8, accepted]}
        return PassFigures(
            seconds=seconds, outputs=[*outputs], verify_steps=4, accepted=accepted, tpot_ms=[1.0], sources=counts
        )

    plain = figures(2.0, 0, (1, 2), (3, 4))
    first, second = figures(2.0, 4, (1, 2), (3, 4)), figures(0.5, 12, (1, 2), (3, 5))
    row = command.compared(second, plain, plain, first)
    assert (row["tokens_per_s"], row["to_off"], row["acceptance_length"]) == (8.0, 4.0, 4.0)
    assert (row["to_first_pass"], row["different_outputs"], row["requests"]) == (2.0, 1, 2)
    assert row["sources"] == {"ngram": {"drafted": 9, "submitted": 8, "accepted": 12}}
    key = {"workload": "twice", "temperature": 0.0, "sessions": 1, "mixture": "ngram", "pass": 2}
    assert command.table([key | row]).row_count == 1


def test_a_pass_says_what_its_draft_did_and_what_the_coordinator_made_of_it():
    totals, steps = Totals(), StepCounts()

    def of_coordinator(families: Families) -> None:
        metrics._describe_speculation(families, totals, positions=2)
        metrics._describe_rounds(families, totals)

    def of_draft(families: Families) -> None:
        gauges = WorkerGauges(sessions=1, slots_used=0, slots_cached=0, slots_total=9, waiting=0, step_age_s=0.0)
        describe_worker(families, steps, gauges, role="draft", model_name="m")

    def read(log: str = "") -> Readings:
        pages = {"coordinator": of_coordinator, "draft-worker": of_draft}
        found = {role: samples(generate_latest(registry_of(page)).decode()) for role, page in pages.items()}
        return found | {"draft-worker": found["draft-worker"] + log_lines(log)}

    steps.note(9_000_000, 9_000_000, rows=9, sessions=1)
    before = read("a step took 900 ms; prepared while serving: graph\n")
    for _ in range(4):
        steps.note(5_000_000, 4_000_000, rows=16, sessions=2)
    totals.verify_steps, totals.demand.rounds, totals.serving.bare_drafted = 20, 16, 5
    totals.demand.missed_rounds, totals.demand.starved_rounds = 4, 8
    totals.serving.grown_nodes, totals.dropped_nodes = 100, 75
    after = read("prepared while serving: graph\nprepared while serving: graph\nsession 3 waits for slots: 2 free\n")
    said = told(in_between(before, after), seconds=2.0)
    assert (said["draft_steps_per_s"], said["draft_rows_a_step"]) == (2.0, 16.0)
    assert (said["draft_step_ms"], said["draft_forward_ms"]) == pytest.approx((5.0, 4.0))
    assert (said["nodes_a_round"], said["nodes_dropped"], said["without_nodes"]) == (5.0, 0.75, 0.25)
    assert (said["covered"], said["missed"], said["starved"]) == (0.25, 0.25, 0.5)
    assert (said["lines_prepared_while_serving"], said["lines_waits_for_slots"]) == (1, 1)
    shown = line(said)
    assert "draft 2 steps/s, of 5.00 ms, 5.0 nodes a round, 75% of them dropped, 50% of the rounds starved" in shown
    # Plain decoding: no draft, no nodes, no rounds of either.
    plain = told({"coordinator": Counter({"process_cpu_seconds_total": 1.0})}, seconds=2.0)
    assert (plain["draft_step_ms"], plain["nodes_a_round"], plain["starved"]) == (None, None, None)
    assert line(plain).endswith("cores in use: coordinator 0.50")
