"""`outrider loadtest` against a coordinator with fake workers, over both doors."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.byte_tokenizer import byte_tokenizer

from outrider import cli
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.app import create_app
from outrider.coordinator.api.http.server import HttpServer
from outrider.coordinator.api.service import GenerationServicer
from outrider.coordinator.loadtest import command, running
from outrider.coordinator.loadtest.http_connection import server_sent_events
from outrider.coordinator.loadtest.options import LoadtestConfig
from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.drafting.growth_source import GrowthSource
from outrider.errors import InternalError, LoadtestFailed
from outrider.rpc import RoleServer
from outrider.v1 import common_pb2, generation_pb2


class Doors(NamedTuple):
    grpc: str
    http: str


async def serve(make_bench: Callable[..., Any], ready: Future[Doors], stop: asyncio.Event) -> None:
    bench = make_bench(max_queue=1000)
    bench.add_target(step_s=0.001)
    bench.add_draft(delay_s=0.001)
    generations = Generations(
        bench.scheduler,
        model=common_pb2.ModelInfo(name="fake", vocab_size=50, max_model_len=4096),
        tokenizer=TextTokenizer(byte_tokenizer()),
        limits=RequestLimits(),
    )
    servicer = GenerationServicer(generations, server_info=generation_pb2.ServerInfo)
    server = RoleServer(services=[], add_services=servicer.add_to, address="127.0.0.1:0")
    http = HttpServer(create_app(servicer), host="127.0.0.1", port=0)
    await server.start()
    await http.start()
    try:
        ready.set_result(Doors(server.address, http.address))
        await stop.wait()
    finally:
        await http.stop()
        await server.stop(grace_s=0)
        bench.scheduler.stop(InternalError("the test is over"))


@pytest.fixture
def doors(make_bench) -> Iterator[Doors]:
    """A coordinator's two doors, in a thread of its own: the command has an event loop of its own, too."""
    loop, ready = asyncio.new_event_loop(), Future[Doors]()
    stop = asyncio.Event()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve(make_bench, ready, stop))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ready.result(timeout=60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)
        assert not thread.is_alive()


# A round waits for its tree: what is accepted is no question of the machine's pace.
IN_STEP = ("--speculation", "sync")


def run(*arguments: str) -> int:
    return cli.run(["loadtest", "--output-len", "12", *arguments])


def figures_of(path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_over_grpc(doors, tmp_path, capsys):
    json_file, report = tmp_path / "a.json", tmp_path / "a.html"
    # No pictures: they have a test of their own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.report_html, "pictures", lambda runs: {})
        arguments = ["--endpoint", doors.grpc, *IN_STEP, "--num-prompts", "12", "--request-rate", "200"]
        arguments += ["--html", str(report)]
        assert run(*arguments, "--output-json", str(json_file), "--goodput", "ttft:60000", "tpot:60000") == 0
    figures = figures_of(json_file)
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert figures["total_output_tokens"] == 12 * 12
    assert figures["request_goodput"] == figures["request_throughput"] > 0
    assert figures["spec_decode_num_drafts"] > 0
    assert figures["spec_decode_acceptance_length"] > 1
    assert figures["traced_rounds"] > 0
    assert figures["latency_from"] == "intended arrival"
    assert 0 < figures["mean_ttft_ms"] <= figures["mean_e2el_ms"]
    printed = capsys.readouterr().out
    assert "12 completed, 0 failed" in printed
    assert "tpot 60000 ms" in printed
    assert "Load test" in report.read_text(encoding="utf-8")


def test_the_environment_says_where(doors, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    monkeypatch.setenv("OUTRIDER_ENDPOINT", doors.grpc)
    assert run(*IN_STEP, "--num-prompts", "2", "--output-json", str(path)) == 0
    assert figures_of(path)["completed"] == 2


def test_the_openai_door_gives_the_same_figures(doors, tmp_path):
    path = tmp_path / "b.json"
    arguments = ["--protocol", "openai", *IN_STEP, "--num-prompts", "10", "--max-concurrency", "3", "--save-detailed"]
    assert run(*arguments, "--endpoint", f"http://{doors.http}", "--output-json", str(path)) == 0
    figures = figures_of(path)
    assert (figures["completed"], figures["failed"]) == (10, 0)
    assert figures["output_lens"] == [12] * 10
    assert figures["max_concurrent_requests"] <= 3
    # Whoever has a place sends: there is no time at which a request was to be sent.
    assert figures["latency_from"] == "sending"
    assert figures["spec_decode_num_drafts"] > 0
    rates = figures["spec_decode_per_position_acceptance_rates"]
    assert 1 + sum(rates) == pytest.approx(figures["spec_decode_acceptance_length"])


def test_made_up_prompts_have_the_lengths_that_were_asked_for(doors, tmp_path):
    lengths = [
        "--random-input-len",
        "20",
        "--random-output-len",
        "6",
        "--random-prefix-len",
        "10",
        "--num-prompts",
        "4",
    ]
    # Over gRPC the vocabulary is asked for.
    for name, door, expected in (
        ("random", ["--endpoint", doors.grpc], 20),
        ("shared-prefix", ["--endpoint", doors.http, "--protocol", "openai", "--vocab-size", "50"], 30),
    ):
        path = tmp_path / f"{name}.json"
        assert run(*door, *lengths, "--dataset-name", name, "--output-json", str(path), "--save-detailed") == 0
        figures = figures_of(path)
        assert figures["input_lens"] == [expected] * 4
        assert figures["output_lens"] == [6] * 4


def test_turns_follow_each_other_and_prompts_grow(doors, tmp_path):
    for protocol, endpoint in (("grpc", doors.grpc), ("openai", doors.http)):
        path = tmp_path / f"{protocol}.json"
        arguments = ["--dataset-name", "multi-turn", "--turns", "2", "--num-prompts", "3", "--save-detailed"]
        assert run(*arguments, "--protocol", protocol, "--endpoint", endpoint, "--output-json", str(path)) == 0
        figures = figures_of(path)
        assert figures["completed"] == 6
        inputs = figures["input_lens"]
        assert all(later > earlier + 12 for earlier, later in zip(inputs[::2], inputs[1::2], strict=True))


def test_sources_are_asked_for_by_both_doors(doors, monkeypatch, tmp_path):
    asked = []
    whole = GenerationRequest.__init__

    def noted(self, **fields):
        asked.append(fields["sources"])
        whole(self, **fields)

    monkeypatch.setattr(GenerationRequest, "__init__", noted)
    for protocol, endpoint in (("grpc", doors.grpc), ("openai", doors.http)):
        arguments = ["--num-prompts", "2", "--num-warmups", "0", "--sources", "ngram,eagle", "--protocol", protocol]
        assert run(*arguments, "--endpoint", endpoint, "--output-json", str(tmp_path / "s.json")) == 0
    assert len(asked) >= 4
    assert set(asked) == {frozenset({GrowthSource.NGRAM, GrowthSource.EAGLE})}


def test_a_sweep_runs_every_combination(doors, tmp_path, capsys):
    path = tmp_path / "c.json"
    arguments = ["--num-prompts", "4", "--num-warmups", "0", "--output-json", str(path)]
    sweep = ["--request-rate", "100,200", "--speculation", "off,async"]
    assert run("--endpoint", doors.grpc, *arguments, *sweep) == 0
    runs = figures_of(path)["runs"]
    assert [(each["speculation"], each["request_rate"]) for each in runs] == [
        ("off", 100.0),
        ("off", 200.0),
        ("async", 100.0),
        ("async", 200.0),
    ]
    assert all(each["completed"] == 4 for each in runs)
    assert runs[0]["spec_decode_accepted_tokens"] == 0
    assert "All runs" in capsys.readouterr().out
    assert cli.run(["loadtest", "--compare", str(path), str(path)]) == 0
    assert "1.000" in capsys.readouterr().out


def test_a_sweep_that_fails_in_the_middle_leaves_what_it_has_measured(doors, tmp_path, monkeypatch, capsys):
    path, run_point, seen = tmp_path / "sweep.json", running.run_point, []

    async def two_of_three(config, point, *others, **options):
        if len(seen) == 2:
            raise LoadtestFailed("the service has gone")
        seen.append(point.request_rate)
        return await run_point(config, point, *others, **options)

    monkeypatch.setattr(running, "run_point", two_of_three)
    arguments = ["--num-prompts", "2", "--num-warmups", "0", "--output-json", str(path)]
    assert run("--endpoint", doors.grpc, *arguments, "--request-rate", "100,200,300") == cli.FAILED
    assert "the service has gone" in capsys.readouterr().err
    assert [each["request_rate"] for each in figures_of(path)["runs"]] == seen == [100.0, 200.0]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_cap_delays_the_sending_and_the_latency_counts_it(doors, tmp_path):
    path = tmp_path / "d.json"
    arguments = ["--num-prompts", "12", "--request-rate", "100000", "--max-concurrency", "1"]
    assert run("--endpoint", doors.grpc, *arguments, "--output-json", str(path), "--save-detailed") == 0
    figures = figures_of(path)
    assert figures["max_concurrent_requests"] == 1
    assert figures["latency_from"] == "intended arrival"
    # The last one waited for all the others: what it took from its arrival on holds what they took.
    others_s = sum(
        latency - queue for latency, queue in zip(figures["latencies"][:-1], figures["queue_times"], strict=False)
    )
    assert figures["latencies"][-1] >= others_s
    assert figures["mean_ttft_ms"] > figures["mean_ttft_from_send_ms"]


def test_a_trace_is_replayed_by_two_processes(doors, tmp_path):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "e.json"
    lines = [{"timestamp": 5 + 0.05 * number, "prompt": f"line {number}", "max_tokens": 3} for number in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = ["--dataset-name", "trace", "--dataset-path", str(trace), "--client-processes", "2"]
    assert run("--endpoint", doors.grpc, *arguments, "--output-json", str(path), "--save-detailed") == 0
    figures = figures_of(path)
    assert figures["output_lens"] == [3] * 5
    assert figures["intended_times"] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert figures["client_processes"] == 2
    assert (figures["label"], figures["request_rate"]) == ("async, at the trace's times", "trace")


def test_failures_are_counted_with_their_errors(doors, tmp_path, capsys):
    path, prompts = tmp_path / "f.json", tmp_path / "prompts.jsonl"
    # A token that the model does not have.
    prompts.write_text('{"prompt": [1, 2], "max_tokens": 2}\n{"prompt": [4000]}\n', encoding="utf-8")
    arguments = ["--dataset-name", "jsonl", "--dataset-path", str(prompts), "--num-warmups", "0", "--num-prompts", "4"]
    for protocol, endpoint in (("grpc", doors.grpc), ("openai", doors.http)):
        assert run("--endpoint", endpoint, "--protocol", protocol, *arguments, "--output-json", str(path)) == 0
        figures = figures_of(path)
        assert (figures["completed"], figures["failed"]) == (2, 2)
        ((message, count),) = figures["error_counts"].items()
        assert count == 2
        assert "4000" in message
        assert "2 failed" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_service_that_is_not_there_is_told(protocol, capsys):
    assert run("--endpoint", "127.0.0.1:1", "--protocol", protocol, "--num-prompts", "1", "--timeout", "30") == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--request-rate", "0"], "request_rate: '0'"),
        (["--burstiness", "-1"], "burstiness"),
        (["--goodput", "ttft:soon"], "goodput: 'ttft:soon'"),
        (["tpot:50"], "tpot:50"),
        (["--speculation", "async,on"], "speculation: 'on'"),
        (["--sources", "ngram,trie"], "sources: 'trie' given, model, ngram, eagle needed"),
        (["--request-rate", "1,x"], "request_rate: '1,x'"),
        (["--dataset-name", "sharegpt"], "dataset_path"),
        (["--duration", "5"], "duration: 5"),
        (["--num-prompts", "0"], "num_prompts: 0"),
        (["--random-range-ratio", "2", "--dataset-name", "random", "--vocab-size", "9"], "random_range_ratio: 2.0"),
    ],
)
def test_bad_options_are_told_before_anything_is_sent(arguments, what, capsys):
    assert run("--endpoint", "127.0.0.1:1", *arguments) == cli.BAD_ARGUMENTS
    assert what in capsys.readouterr().err


def test_a_closed_loop_ends_with_its_duration(doors, tmp_path):
    path = tmp_path / "g.json"
    arguments = ["--duration", "0.3", "--max-concurrency", "2", "--num-warmups", "0"]
    assert run("--endpoint", doors.grpc, *arguments, "--output-json", str(path), "--save-detailed") == 0
    figures = figures_of(path)
    assert figures["completed"] == len(figures["intended_times"]) > 0
    assert max(figures["intended_times"]) < 0.3


@pytest.mark.parametrize("protocol", ["grpc", "openai"])
def test_a_local_service_is_reached_at_the_door_of_the_protocol(protocol):
    opened: list[tuple[int, list[str]]] = []

    @contextlib.contextmanager
    def open_local(drafts: int, coordinator_args: Sequence[str]) -> Iterator[str]:
        opened.append((drafts, list(coordinator_args)))
        yield "127.0.0.1:7"

    config = LoadtestConfig(local=True, drafts=2, protocol=protocol)
    with command.local_door(config, open_local) as door:
        ((drafts, arguments),) = opened
        assert drafts == 2
        assert "--max-queue" in arguments
        if protocol == "grpc":
            assert door == "127.0.0.1:7"
        else:
            assert door == f"127.0.0.1:{arguments[arguments.index('--http-port') + 1]}"


def test_events_are_put_together_from_any_pieces():
    stream = b'data: {"a": 1}\n\n: comment\r\ndata: [DONE]\r\n\r\n'
    for size in (1, 3, 7, len(stream)):
        events, rest = [], b""
        for place in range(0, len(stream), size):
            found, rest = server_sent_events(stream[place : place + size], rest)
            events += found
        assert events == [b'{"a": 1}', b"[DONE]"]
        assert rest == b""


def test_every_option_has_a_default_that_is_allowed():
    config = LoadtestConfig()
    (point,) = config.points()
    assert config.arrivals_of(point).count == 100
    assert point.label == "async, all at once"


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"request_rate": "4", "max_concurrency": "8"}, "async, 4/s, at most 8 at a time"),
        ({"dataset_name": "trace", "dataset_path": Path("trace.jsonl")}, "async, at the trace's times"),
        ({"ramp_up_strategy": "linear"}, "async, linear ramp"),
    ],
)
def test_a_run_is_labelled_by_what_its_arrivals_follow(changes, label):
    (point,) = LoadtestConfig(**changes).points()
    assert point.label == label
