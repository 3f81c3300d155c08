"""benchmarks/against_other_tools.py: what is read of a tool's report, and how turns become ratios."""

import argparse
from pathlib import Path

from benchmarks import against_other_tools as bench


def turn(ttft_ms: float, tpot_ms: float) -> bench.Turn:
    return bench.Turn(completed=5, ttft_ms=ttft_ms, tpot_ms=tpot_ms, mean_ttft_ms=ttft_ms, mean_tpot_ms=tpot_ms)


def test_figures_are_medians_over_the_turns():
    turns = {"ours": [turn(10, 1), turn(30, 2), turn(20, 3)], "guidellm": [turn(20, 4), turn(21, 4), turn(19, 4)]}
    figures = bench.summary(turns)
    assert figures["ttft_ms"] == (20, 20)
    assert figures["tpot_ms"] == (2, 4)


def test_a_report_of_guidellm_is_read():
    def spread(median: float) -> dict:
        return {"successful": {"count": 7, "median": median, "mean": median + 1}}

    metrics = {"time_to_first_token_ms": spread(40.0), "inter_token_latency_ms": spread(5.0)}
    found = bench.guidellm_turn({"benchmarks": [{"metrics": metrics}]})
    assert found == bench.Turn(completed=7, ttft_ms=40.0, tpot_ms=5.0, mean_ttft_ms=41.0, mean_tpot_ms=6.0)


def test_both_tools_are_asked_for_the_same():
    options = argparse.Namespace(rate=2.0, requests=9, output_len=33)
    spec = bench.guidellm_scenario("127.0.0.1:1", Path("prompts"), options, Path("out"))["spec"]
    assert spec["profile"] == {"kind": "constant", "rate": [2.0]}
    assert spec["constraints"] == [{"kind": "max_requests", "count": 9}]
    assert spec["backend"]["max_tokens"] == 33
    assert spec["backend"]["extras"]["body"]["temperature"] == 0.0


def test_turns_send_the_same_texts_after_another_line():
    options = argparse.Namespace(requests=3, texts=2, output_len=8)
    first, second = bench.prompts_of(0, options), bench.prompts_of(1, options)
    lines = {line["prompt"].partition("\n")[0] for line in (*first, *second)}
    assert len(lines) == 6
    assert [line["prompt"].partition("\n")[2] for line in first] == [
        line["prompt"].partition("\n")[2] for line in second
    ]
    assert first[0]["max_tokens"] == 8
