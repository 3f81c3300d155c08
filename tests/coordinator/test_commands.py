"""`generate` and `status` against a scripted server, through the command line's own entry."""

import contextlib
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.outrider.scripted_server import Request, Response, ScriptedServicer, serving_in_thread

from outrider import cli
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, WorkerRefused, WorkerUnavailable
from outrider.v1 import common_pb2, generation_pb2, registry_pb2
from outrider.wire import floats_to_bytes

ROUND = generation_pb2.Round(
    step=4,
    length=9,
    result_ns=200,
    step_ns=60,
    forward_ns=50,
    selected=2,
    accepted=1,
    emitted_token_ids=[5, 8],
    growth=[generation_pb2.GrowthArrival(worker_id="d", arrived_ns=150, as_of=9, nodes=2)],
)
WEIGHTS = common_pb2.Weights(version="abc", path="/new", reloads=2)
INFO = generation_pb2.ServerInfo(
    version="1.2.3",
    weights=WEIGHTS,
    uptime_s=61.5,
    running_sessions=2,
    waiting_requests=1,
    requests_total=9,
    emitted_tokens_total=1000,
    steps_total=400,
    dropped_nodes_total=17,
    speculation=generation_pb2.SpeculationStats(
        verify_steps=300,
        spec_draft_tokens=2000,
        spec_accepted_tokens=600,
        acceptance_length=3.0,
        sources=[
            generation_pb2.SourceStats(
                source=common_pb2.GROWTH_SOURCE_EAGLE, drafted_tokens=30, submitted_tokens=20, accepted_tokens=10
            )
        ],
    ),
    workers=[
        generation_pb2.WorkerStatus(
            introduction=registry_pb2.WorkerIntroduction(
                worker_id="target-1",
                role=registry_pb2.WORKER_ROLE_TARGET,
                address="127.0.0.1:7",
                model=common_pb2.ModelInfo(name="tiny", dtype="float32", weights=WEIGHTS),
            ),
            load=common_pb2.WorkerLoad(
                sessions=2, slots_used=50, slots_cached=30, slots_total=100, steps=400, busy=0.5
            ),
            state="serving",
            lease_age_ms=12.0,
        )
    ],
)
DRAFT = generation_pb2.WorkerStatus(
    introduction=registry_pb2.WorkerIntroduction(
        worker_id="draft-1", role=registry_pb2.WORKER_ROLE_DRAFT, model=common_pb2.ModelInfo(name="small")
    ),
    load=common_pb2.WorkerLoad(
        calibration=common_pb2.CalibrationReport(
            edges=floats_to_bytes([0.1, 0.5]),
            rules=[
                common_pb2.RuleReliability(
                    rule="coupled", children=[60, 0, 40], predicted=floats_to_bytes([0.05, 0, 0.75]), hits=[6, 0, 20]
                ),
                common_pb2.RuleReliability(
                    rule="coupled",
                    source=common_pb2.GROWTH_SOURCE_NGRAM,
                    children=[4, 0, 0],
                    predicted=floats_to_bytes([0.05, 0, 0]),
                    hits=[1, 0, 0],
                ),
            ],
        )
    ),
)


class Servicer(ScriptedServicer):
    """One answer, which may end in an error."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.error: OutriderError | None = None
        self.error_after_text: OutriderError | None = None

    async def _answer(self, request: Request, _attempt: int) -> AsyncIterator[Response]:
        if self.error is not None:
            raise self.error
        yield generation_pb2.GenerateResponse(started=generation_pb2.Started(request_id="r", seed=11, prompt_tokens=3))
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(token_ids=[5, 8], text="né"))
        if request.trace:
            yield generation_pb2.GenerateResponse(round=ROUND)
        if self.error_after_text is not None:
            raise self.error_after_text
        yield generation_pb2.GenerateResponse(
            delta=generation_pb2.Delta(token_ids=[9], text="w", offset=2, text_offset=3)
        )
        yield generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                choices=[generation_pb2.Choice(finish_reason=generation_pb2.FINISH_REASON_LENGTH, completion_tokens=3)],
                usage=generation_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2),
                speculation=generation_pb2.SpeculationStats(
                    verify_steps=2,
                    spec_draft_tokens=6,
                    spec_accepted_tokens=1,
                    acceptance_length=1.5,
                    sources=[
                        generation_pb2.SourceStats(
                            source=common_pb2.GROWTH_SOURCE_MODEL,
                            drafted_tokens=7,
                            submitted_tokens=6,
                            accepted_tokens=1,
                        )
                    ],
                ),
                timings=generation_pb2.Timings(queue_ms=0.5, ttft_ms=4, tpot_ms=2, total_ms=8),
            )
        )

    async def GetServerInfo(self, request: Any, context: Any) -> generation_pb2.ServerInfo:  # noqa: N802
        return INFO

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.ServerInfo]:  # noqa: N802
        yield INFO


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servicer]:
    """A server in a thread; the command line finds it through its environment variable."""
    servicer = Servicer()
    with serving_in_thread(servicer) as endpoint:
        monkeypatch.setenv("OUTRIDER_ENDPOINT", endpoint)
        yield servicer


def test_text_on_stdout_statistics_on_stderr(server: Servicer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "néw\n"
    assert err.count("\n") == 1
    assert "3 tokens in 8 ms" in err
    assert "acceptance length 1.50" in err
    assert server.requests[0].text == "hi"
    assert server.requests[0].sampling_params == generation_pb2.SamplingParams()


def test_json_is_exactly_one_object(server: Servicer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "hi", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "request_id": "r",
        "seed": 11,
        "text": "néw",
        "token_ids": [5, 8, 9],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2},
        "speculation": {
            "verify_steps": 2,
            "drafted_tokens": 6,
            "accepted_tokens": 1,
            "acceptance_length": 1.5,
            "sources": {"model": {"drafted_tokens": 7, "submitted_tokens": 6, "accepted_tokens": 1}},
        },
        "timings": {"ttft_ms": 4, "tpot_ms": 2, "total_ms": 8},
    }
    assert err == ""


def test_every_option_reaches_the_request(server: Servicer) -> None:
    line = (
        "--max-new-tokens 9 --min-new-tokens 2 --temperature 0.5 --top-p 0.75 --top-k 7 --min-p 0.25 "
        "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 --seed 3 --stop a --stop b "
        "--ignore-eos --speculation sync --max-nodes 5 --max-depth 4 --json "
        "--verification target_only --threshold-single 0.25 --threshold-acc 0.5 --synthetic-rate 0.5 --synthetic-rate 1"
        " --sources eagle,model --sources eagle"
    )
    assert cli.run(["generate", "hi", *line.split()]) == 0
    server.requests[0].ClearField("request_id")
    assert server.requests[0] == generation_pb2.GenerateRequest(
        text="hi",
        sampling_params=generation_pb2.SamplingParams(
            max_new_tokens=9,
            min_new_tokens=2,
            temperature=0.5,
            top_p=0.75,
            top_k=7,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            seed=3,
            stop=["a", "b"],
            ignore_eos=True,
        ),
        speculation=generation_pb2.SpeculationParams(
            mode=common_pb2.SPECULATION_MODE_SYNC,
            max_nodes=5,
            max_depth=4,
            verification=common_pb2.VERIFICATION_RULE_TARGET_ONLY,
            threshold_single=0.25,
            threshold_acc=0.5,
            synthetic_rates=[0.5, 1.0],
            sources=[common_pb2.GROWTH_SOURCE_EAGLE, common_pb2.GROWTH_SOURCE_MODEL],
        ),
    )


def test_a_source_that_there_is_not(server: Servicer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "hi", "--sources", "model,trie"]) == 2
    assert "'trie' given, model, ngram, eagle needed" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert server.requests == []


def test_trace_file_has_one_line_a_round(server: Servicer, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    assert cli.run(["generate", "hi", "--trace", str(file)]) == 0
    assert server.requests[0].trace
    lines = file.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "index": 0,
            "step": 4,
            "length": 9,
            "result_ns": 200,
            "step_ns": 60,
            "forward_ns": 50,
            "selected": 2,
            "accepted": 1,
            "emitted_token_ids": [5, 8],
            "growth": [{"worker_id": "d", "arrived_ns": 150, "as_of": 9, "nodes": 2}],
        }
    ]


def test_trace_is_kept_when_the_stream_fails(
    server: Servicer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error_after_text = WorkerRefused("lost its way")
    file = tmp_path / "trace.jsonl"
    assert cli.run(["generate", "hi", "--trace", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == "né"
    assert err == "error: lost its way\n"
    assert len(file.read_text().splitlines()) == 1


def test_prompt_from_stdin(server: Servicer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("zwölf\n".encode())))
    assert cli.run(["generate", "-", "--json"]) == 0
    assert server.requests[0].text == "zwölf\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert cli.run(["generate", "-", "--json"]) == 2


def test_local_starts_a_service_of_its_own(server: Servicer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, started = os.environ["OUTRIDER_ENDPOINT"], []

    @contextlib.contextmanager
    def fake_local(drafts: int) -> Iterator[str]:
        started.append(drafts)
        yield endpoint
        started.append("ended")

    monkeypatch.delenv("OUTRIDER_ENDPOINT")
    monkeypatch.setattr(cli, "local_endpoint", fake_local)
    assert cli.run(["generate", "hi", "--local", "--drafts", "3", "--json"]) == 0
    assert started == [3, "ended"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest([FieldViolation("sampling_params.top_p", "1.5 given"), FieldViolation("text", "empty")]), 2),
        (WorkerUnavailable("no target worker is registered"), 1),
    ],
)
def test_errors_are_one_line(
    server: Servicer, capsys: pytest.CaptureFixture[str], error: OutriderError, code: int
) -> None:
    server.error = error
    assert cli.run(["generate", "hi"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {error}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "Missing argument"),
        (["generate", "x", "--temperature", "hot"], "temperature"),
        (["generate", "x", "--speculation", "fast"], "speculation"),
        (["generate", "x", "--verification", "lenient"], "verification"),
        (["generate", "x", "--endpoint", "nowhere"], "HOST:PORT needed"),
        (["generate", "x", "--max-new-tokens", "-4"], "max_new_tokens"),
        (["generate", "x", "--nonsense"], "nonsense"),
        (["generat"], "generat"),
        (["status", "--endpoint", ":"], "HOST:PORT needed"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["generate", "hi"], ["status"]):
        assert cli.run([*arguments, "--endpoint", "127.0.0.1:1"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_trace_file_that_cannot_be_written(server: Servicer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "hi", "--trace", "/nonexistent/trace.jsonl"]) == 1
    assert "/nonexistent/trace.jsonl" in capsys.readouterr().err
    assert server.requests == []


def test_status_as_json(server: Servicer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["version"], status["running_sessions"], status["waiting_requests"]) == ("1.2.3", 2, 1)
    assert status["weights"] == {"version": "abc", "path": "/new", "reloads": 2}
    assert status["speculation"]["acceptance_length"] == 3.0
    assert status["speculation"]["sources"] == {
        "eagle": {"drafted_tokens": 30, "submitted_tokens": 20, "accepted_tokens": 10}
    }
    assert status["workers"] == [
        {
            "worker_id": "target-1",
            "role": "target",
            "address": "127.0.0.1:7",
            "state": "serving",
            "lease_age_ms": 12.0,
            "model": "tiny",
            "dtype": "float32",
            "weights": {"version": "abc", "path": "/new", "reloads": 2},
            "sources": [],
            "sessions": 2,
            "slots_used": 50,
            "slots_cached": 30,
            "slots_total": 100,
            "steps": 400,
            "busy": 0.5,
            "calibration": {},
        }
    ]


@pytest.fixture
def with_draft() -> Iterator[None]:
    INFO.workers.append(DRAFT)
    yield
    INFO.workers.pop()


@pytest.mark.usefixtures("server", "with_draft")
def test_status_says_how_estimates_came_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--json"]) == 0
    worker = json.loads(capsys.readouterr().out)["workers"][1]
    assert worker["sources"] == ["model"]
    # A source that is no model has a diagram of its own.
    assert worker["calibration"].pop("coupled, ngram")["children"] == 4
    rule = worker["calibration"].pop("coupled")
    assert worker["calibration"] == {}
    assert (rule["children"], rule["accepted"]) == (100, 26)
    assert rule["calibration_error"] == pytest.approx(0.6 * 0.05 + 0.4 * 0.25)
    assert [(part["above"], part["to"]) for part in rule["bins"]] == [(0, 0.1), (0.1, 0.5), (0.5, 1)]
    assert [part["observed"] for part in rule["bins"]] == [0.1, None, 0.5]
    assert rule["bins"][2] | {"children": 40, "accepted": 20, "predicted": 0.75} == rule["bins"][2]


@pytest.mark.usefixtures("server", "with_draft")
def test_the_reliability_diagram(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.run(["status", "--calibration"]) == 0
    out = capsys.readouterr().out
    assert "small at draft-1, coupled: calibration error 0.130" in out
    # Half of the bin came true; the mark stands where three quarters end.
    assert any("0.50 to 1.00" in line and "##########     |" in line for line in out.splitlines())
    assert "0.10 to 0.50" not in out


@pytest.mark.usefixtures("server")
def test_the_reliability_diagram_without_observations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "--calibration"]) == 0
    assert "no draft worker has observed" in capsys.readouterr().out


def test_status_as_a_table(
    server: Servicer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["status"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Outrider 1.2.3",
        "2 running, 1 waiting",
        "3.00 over 300",
        "target-1",
        "tiny float32",
        "50%",
        "serving",
    ):
        assert words in out
