"""The requests of benchmarks/sources.py, and how its figures are made up; no service is started."""

from collections import Counter

import pytest
from benchmarks.source_bench import command
from benchmarks.source_bench.driving import PassFigures, options_of
from benchmarks.source_bench.readings import in_between, line, samples, told
from benchmarks.source_bench.services import MIXTURES
from benchmarks.source_bench.workloads import NAMES, edit_request, quote_request, workload
from prometheus_client import generate_latest

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
    assert asked["ngram"].get("sources") == ["ngram"]
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


def test_a_pass_says_what_its_draft_did_and_what_became_of_it():
    steps = StepCounts()

    def of_draft(families: Families) -> None:
        gauges = WorkerGauges(sessions=1, slots_used=0, slots_cached=0, slots_total=9, waiting=0, step_age_s=0.0)
        describe_worker(families, steps, gauges, role="draft", model_name="m")

    def readings(rounds: int) -> dict[str, Counter[str]]:
        counts = {"verify_rounds": rounds, "draft_nodes_received": 5 * rounds, "draft_nodes_dropped": 4 * rounds}
        page = "".join(f"outrider_{name}_total {value}\n" for name, value in counts.items())
        return {
            "coordinator": samples(page),
            "draft-worker": samples(generate_latest(registry_of(of_draft)).decode()),
        }

    steps.note(9_000_000, 9_000_000, rows=9, sessions=1)
    before = readings(20)
    for _ in range(4):
        steps.note(5_000_000, 4_000_000, rows=16, sessions=2)
    said = told(in_between(before, readings(40)), seconds=2.0)
    assert (said["draft_steps_per_s"], said["draft_rows_a_step"]) == (2.0, 16.0)
    assert said["draft_step_ms"] == pytest.approx(5.0)
    assert (said["nodes_a_round"], said["nodes_dropped"]) == (5.0, 0.8)
    assert line(said).startswith("draft 2 steps/s, of 5.00 ms, 5.0 nodes a round, 80% of them dropped; cores")
    # Plain decoding: no draft, no nodes.
    plain = told({"coordinator": Counter({"process_cpu_seconds_total": 1.0})}, seconds=2.0)
    assert (plain["draft_step_ms"], plain["nodes_a_round"]) == (None, None)
    assert line(plain) == "no draft; cores in use: coordinator 0.50"
