"""The overload benchmark: its verdicts can fail, and what it sends overloads a service."""

import itertools
import json
from dataclasses import replace

import pytest
from benchmarks.overload_bench.command import run
from benchmarks.overload_bench.figures import Phase, Sample, Spread, spread_ms, verdicts
from benchmarks.overload_bench.load import LoadGenerator

MS = Spread(p50=10.0, p99=20.0, most=30.0)
SLOW = replace(MS, p99=50.0)


def sample(rss_mb: float) -> Sample:
    return Sample(at_s=0.0, rss_mb=rss_mb, waiting=0, running=0, answer_ms=1.0)


NORMAL = Phase(
    name="normal",
    load=1.0,
    seconds=1.0,
    requests=10,
    accepted=10,
    refused=0,
    with_retry_info=0,
    retry_after_s=(0.0, 0.0),
    others={},
    tokens_per_s=100.0,
    refusal=spread_ms([]),
    served_refusal=spread_ms([]),
    ttft=MS,
    tpot=MS,
    latency=MS,
    nodes_per_step=3.0,
    acceptance_length=2.0,
    client_lag=MS,
    stolen_s=0.0,
)
OVERLOAD = replace(NORMAL, refused=5, with_retry_info=5, refusal=MS, nodes_per_step=2.0, samples=[sample(100.0)] * 6)


def missed(**changes) -> list[str]:
    return [line for line in verdicts(NORMAL, replace(OVERLOAD, **changes)) if line.startswith("MISSED")]


def test_all_holds_where_all_is_well():
    assert missed() == []
    assert missed(ttft=replace(MS, p99=40.0)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refusal": replace(MS, p99=51.0)}, "5 refused"),
        ({"refused": 0, "with_retry_info": 0, "refusal": spread_ms([])}, "0 refused"),
        ({"with_retry_info": 4}, "4 of 5 refusals"),
        ({"others": {"UNAVAILABLE": 1}}, "UNAVAILABLE"),
        ({"samples": [sample(100.0 + number) for number in range(12)]}, "memory"),
        ({"samples": []}, "memory"),
        ({"ttft": SLOW}, "ttft"),
        ({"tpot": SLOW}, "tpot"),
        ({"latency": SLOW}, "latency"),
        ({"latency": spread_ms([])}, "latency"),
        ({"nodes_per_step": 3.5}, "speculation"),
    ],
)
def test_every_miss_is_told(changes, words):
    (line,) = missed(**changes)
    assert words in line


def test_a_tiny_overload_is_refused_in_part_and_every_request_is_accounted_for(capsys):
    options = "--places 2 --max-queue 2 --max-new-tokens 8 --capacity-s 1 --normal-s 1 --overload-s 3 --overload 12"
    run(["--json", *options.split()])
    told = json.loads(capsys.readouterr().out)
    assert [phase["name"] for phase in told["phases"]] == ["capacity", "normal", "overload", "after"]
    overload = told["phases"][2]
    assert overload["requests"] == overload["accepted"] + overload["refused"]
    assert overload["refused"] == overload["with_retry_info"] > 0 < overload["accepted"]
    assert overload["others"] == {}


async def test_what_nobody_answers_is_neither_served_nor_refused():
    async with LoadGenerator("127.0.0.1:1", itertools.repeat([1]), max_new_tokens=1, seed=1) as load:
        requests = [*await load.closed_loop(2, 0.05), *await load.open_loop(100.0, 0.05)]
    assert len(requests) > 2
    assert {request.status for request in requests} == {"UNAVAILABLE"}
    assert not any(request.is_accepted or request.is_refused for request in requests)
