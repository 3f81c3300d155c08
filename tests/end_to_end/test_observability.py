"""Observability of a service at work: metrics, the dashboard that asks for them, traces, logs.

All roles run in this process, with the embedded models: once for all tests here.
"""

import asyncio
import json
import logging
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from tests.end_to_end import prometheus

from outrider import tracing
from outrider.client import AsyncClient
from outrider.coordinator.server import CoordinatorServer
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.draft_worker import server as draft_server
from outrider.errors import InvalidRequest
from outrider.roles.log_output import JsonFormatter
from outrider.target_worker import server as target_server

trace_export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="the extra tracing is not installed")
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

ROOT = Path(__file__).parents[2]
ROLES = ("coordinator", "target", "draft")
TOKENS = 24
FOREIGN_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@dataclass
class Observed:
    """Everything that was seen of one service."""

    scrapes: dict[str, str] = field(default_factory=dict)
    by_http: str = ""
    negotiated: dict[tuple[str, str], str] = field(default_factory=dict)
    answers: Mapping[str, list[Any]] = field(default_factory=dict)
    spans: list = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    verify_steps: int = 0

    def families(self, role: str) -> dict[str, Metric]:
        """By the name that Prometheus stores, less the suffixes of histograms."""
        return {family.name: family for family in text_string_to_metric_families(self.scrapes[role])}

    def value(self, role: str, name: str, /, **labels: str) -> float:
        samples = [
            sample
            for family in self.families(role).values()
            for sample in family.samples
            if sample.name == f"outrider_{name}" and labels.items() <= sample.labels.items()
        ]
        assert samples, f"{role} exports no {name} {labels}"
        return sum(sample.value for sample in samples)


class Lines(logging.Handler):
    """JSON lines, as the roles write them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("all"))
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def read(url: str, accept: str = "*/*") -> str:
    request = urllib.request.Request(url, headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def complete(url: str) -> None:
    """A request at the HTTP door, of a client that traces."""
    body = {"model": "target", "prompt": "import os", "max_tokens": 2, "temperature": 0}
    headers = {"content-type": "application/json", "traceparent": f"00-{FOREIGN_TRACE}-00f067aa0ba902b7-01"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


async def run(observed: Observed, folder: Path) -> None:
    server = CoordinatorServer(CoordinatorConfig(port=0, metrics_port=0, http_port=0, sync_wait_cap_ms=60_000))
    await server.start()
    stop, workers = asyncio.Event(), []
    try:
        for module, make in (
            (target_server, target_server.TargetWorkerConfig),
            (draft_server, partial(draft_server.DraftWorkerConfig, source="model+ngram")),
        ):
            config = make(coordinators=(server.worker_address,), metrics_port=0, drain_s=0)
            ready = asyncio.Event()
            worker = asyncio.create_task(module.serve(config, stop=stop, ready=lambda _, ready=ready: ready.set()))
            workers.append(worker)
            # One after the other: transformers does not load two models at a time in one process.
            await asyncio.wait([worker, told := asyncio.create_task(ready.wait())], return_when="FIRST_COMPLETED")
            told.cancel()
        async with asyncio.timeout(90):
            while [worker.state for worker in server.registry.workers.values()] != ["serving", "serving"]:
                assert not any(worker.done() for worker in workers)
                await asyncio.sleep(0.05)
        async with AsyncClient(server.address) as client:
            # Every round waits for its tree: what is counted does not depend on who is the quicker one.
            result = await client.generate(
                "def fibonacci(n):", max_new_tokens=TOKENS, request_id="seen", ignore_eos=True, speculation="sync"
            )
            observed.verify_steps = result.speculation.verify_steps
            with pytest.raises(InvalidRequest):
                await client.generate("import os", temperature=-1)
        assert server.metrics_endpoint is not None
        urls = [
            match.group(1)
            for line in observed.lines
            if (match := re.search(r"metrics on (http://\S+)", json.loads(line)["message"]))
        ]
        for text in [await asyncio.to_thread(read, url) for url in urls]:
            kinds = {"target_model_steps": "target", "draft_model_steps": "draft", "requests_refused": "coordinator"}
            observed.scrapes[next(role for mark, role in kinds.items() if f"outrider_{mark}" in text)] = text
        await asyncio.to_thread(complete, f"http://{server.http_address}/v1/completions")
        door = f"http://{server.http_address}/metrics"
        observed.by_http = await asyncio.to_thread(read, door)
        for url in [door, *urls]:
            for version, accept in (prometheus.ACCEPTS | {"text": "*/*"}).items():
                observed.negotiated[url, version] = await asyncio.to_thread(read, url, accept)
        if prometheus.PROGRAM:
            addresses = [url.removeprefix("http://").partition("/")[0] for url in urls]
            queries = [for_prometheus(query) for panel, query in dashboard_queries() if panel != "instance"]
            observed.answers = await prometheus.ask(folder, addresses, queries)
    finally:
        stop.set()
        await asyncio.gather(*workers)
        await server.stop()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    observed, exporter, provider = Observed(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(trace_export.SimpleSpanProcessor(exporter))
    handler, logger = Lines(observed.lines), logging.getLogger("outrider")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        with tracing.using(provider):
            asyncio.run(run(observed, tmp_path_factory.mktemp("prometheus")))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        provider.shutdown()
    observed.spans = list(exporter.get_finished_spans())
    yield observed


# ------------------------------------------------------------------------------------------------------------- metrics


def test_every_role_is_read_and_the_coordinator_at_its_http_door_as_well(observed):
    assert set(observed.scrapes) == set(ROLES)
    names = {line.split()[2] for line in observed.by_http.splitlines() if line.startswith("# TYPE")}
    assert names == {
        line.split()[2] for line in observed.scrapes["coordinator"].splitlines() if line.startswith("# TYPE")
    }


def test_what_was_done_is_what_is_counted(observed):
    value = observed.value
    assert value("coordinator", "requests_total") == 1
    assert value("coordinator", "generation_tokens_total") == TOKENS
    assert value("coordinator", "request_success_total", finished_reason="length") == 1
    assert value("coordinator", "request_success_total", finished_reason="abort") == 0
    assert value("coordinator", "requests_refused_total", reason="invalid") == 1
    assert value("coordinator", "requests_refused_total") == 1
    rounds = value("coordinator", "verify_rounds_total")
    assert rounds == observed.verify_steps
    drafts = value("coordinator", "spec_decode_num_drafts_total")
    # The round of the last token has no use for a tree.
    assert rounds - 1 <= drafts + value("coordinator", "spec_decode_rounds_without_draft_total") <= rounds
    accepted = value("coordinator", "spec_decode_num_accepted_tokens_total")
    assert value("coordinator", "spec_decode_num_accepted_tokens_per_pos_total") == accepted > 0
    assert rounds + accepted == TOKENS
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value("coordinator", f"{name}_count") == 1
        assert value("coordinator", f"{name}_bucket", le="+Inf") == 1
    assert value("coordinator", "inter_token_latency_seconds_count") == rounds - 1
    first, whole = (
        value("coordinator", f"{name}_sum") for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    )
    assert 0 < first <= whole
    for role in ("draft", "target"):
        assert value("coordinator", "workers", role=role, state="serving") == 1
        assert value("coordinator", "workers", role=role) == 1
        assert value(role, f"{role}_model_steps_total") > 0
        assert value(role, f"{role}_model_step_seconds_count") == value(role, f"{role}_model_steps_total")
    assert value("target", "target_model_sessions_total") >= rounds


# ----------------------------------------------------------------------------------------------- dashboard and the docs


def exported(observed: Observed) -> dict[str, set[str]]:
    """Every series of every role, with its labels."""
    series: dict[str, set[str]] = {}
    for role in ROLES:
        for family in observed.families(role).values():
            for sample in family.samples:
                series.setdefault(sample.name, set()).update(sample.labels)
    return series


def autoscaler_series() -> dict[str, set[str]]:
    """Ray exports its own metrics, with `ray_` before their names: the objects themselves are asked for them."""
    metrics = pytest.importorskip("outrider.deploy.demand").AutoscalerMetrics("test")
    described = [gauge.info for gauge in metrics._gauges.values()] + [metrics._changes.info]
    names = {f"ray_{metric['name']}": set(metric["tag_keys"]) for metric in described}
    return names | {f"{name}_total": labels for name, labels in names.items()}


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, query) of the whole dashboard, its variables included."""
    dashboard = json.loads((ROOT / "deploy/grafana/outrider.json").read_text())
    queries = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [
        (each["name"], each["query"]["query"]) for each in dashboard["templating"]["list"] if each["type"] == "query"
    ]
    return queries + variables


METRIC = re.compile(r"\b((?:ray_)?outrider_[a-z0-9_]+|process_[a-z_]+)(?:\{([^}]*)\})?")


def test_the_dashboard_asks_for_nothing_that_no_role_exports(observed):
    series = exported(observed) | autoscaler_series()
    queries = dashboard_queries()
    assert len(queries) > 20
    asked = 0
    for panel, query in queries:
        found = METRIC.findall(query)
        assert found, f"{panel}: no metric in {query}"
        labels: set[str] = set()
        for name, matchers in found:
            asked += 1
            assert name in series, f"{panel} asks for {name}"
            labels |= series[name]
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in series[name] | {"instance", "job"}, f"{panel}: {name} has no label {label}"
        for label in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", query):
            for each in filter(None, re.split(r"[\s,]+", label)):
                assert each in labels | {"instance", "job"}, f"{panel}: nothing in {query} has the label {each}"
    assert asked >= len(queries)


def for_prometheus(query: str) -> str:
    """A query of the dashboard, with what Grafana puts into it."""
    return query.replace("$instance", ".*").replace("$__rate_interval", "30s")


@pytest.mark.skipif(not prometheus.PROGRAM, reason="prometheus is not installed")
def test_prometheus_answers_every_query_of_the_dashboard(observed):
    without = {query for query, series in observed.answers.items() if not series}
    # The autoscaler's come from Ray, which does not run here.
    assert {query for query in without if "ray_outrider" not in query} == set()
    assert len(observed.answers) > 40


def test_every_format_can_be_read_and_names_the_same_series(observed):
    found: dict[str, set[frozenset[str]]] = {}
    for (url, version), text in observed.negotiated.items():
        families = text_string_to_metric_families(text) if version == "text" else read_open_metrics(text)
        names = {sample.name for family in families for sample in family.samples}
        found.setdefault(url, set()).add(frozenset(name for name in names if not name.endswith("_created")))
    assert len(found) == 4
    assert all(len(kinds) == 1 for kinds in found.values())


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name to (type, labels) in the tables of docs/metrics.md."""
    rows = re.findall(
        r"^\| `([a-z0-9_]+)` \| (counter|gauge|histogram) \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_every_exported_metric_is_described_and_nothing_else(observed):
    described = documented()
    found: dict[str, tuple[str, set[str]]] = {}
    for role in ROLES:
        for family in observed.families(role).values():
            name = family.name + ("_total" if family.type == "counter" and not family.name.endswith("_total") else "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels | found.get(name, ("", set()))[1])
    assert described.keys() - {name for name in described if name.startswith("ray_")} == found.keys()
    for name, (kind, labels) in found.items():
        assert described[name] == (kind, labels), name


# -------------------------------------------------------------------------------------------------------------- traces


def by_name(observed: Observed) -> dict[str, list]:
    """Those of the client's own requests; another one's came by HTTP."""
    spans: dict[str, list] = {}
    for span in observed.spans:
        if f"{span.context.trace_id:032x}" != FOREIGN_TRACE:
            spans.setdefault(span.name, []).append(span)
    return spans


def test_a_trace_that_began_elsewhere_goes_on_through_the_http_door(observed):
    names = {span.name for span in observed.spans if f"{span.context.trace_id:032x}" == FOREIGN_TRACE}
    assert {"outrider.request", "outrider.decode", "outrider.target.session"} <= names


def test_one_trace_from_the_client_to_draft_and_target(observed):
    spans = by_name(observed)
    request = next(span for span in spans["outrider.request"] if span.attributes["outrider.request_id"] == "seen")
    client = next(span for span in spans["outrider.generate"] if span.context.span_id == request.parent.span_id)
    assert client.parent is None
    for name in ("queue", "prefill", "decode", "target.session", "draft.session"):
        (span,) = [each for each in spans[f"outrider.{name}"] if each.parent.span_id == request.context.span_id]
        assert span.context.trace_id == request.context.trace_id == client.context.trace_id
    roles = {
        span.attributes["outrider.role"] for span in observed.spans if span.context.trace_id == client.context.trace_id
    }
    assert roles == {"client", "coordinator", "draft", "target"}


def test_stages_follow_each_other_and_hold_the_rounds(observed):
    spans = by_name(observed)
    (queue,), (prefill,), (decode,) = (spans[f"outrider.{name}"] for name in ("queue", "prefill", "decode"))
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert len(decode.events) == min(observed.verify_steps, 32)
    assert sum(event.attributes["outrider.tokens"] for event in decode.events) <= TOKENS


def test_steps_are_linked_to_the_sessions_in_them_and_belong_to_the_coordinators_stream(observed):
    spans = by_name(observed)
    streams = {span.attributes["outrider.peer"]: span for span in spans["outrider.stream"]}
    for role in ("draft", "target"):
        (session,) = spans[f"outrider.{role}.session"]
        own = session.context.span_id
        steps = [
            step for step in spans[f"outrider.{role}.step"] if own in {link.context.span_id for link in step.links}
        ]
        assert 0 < len(steps) <= 8
        for step in steps:
            assert [link.context.span_id for link in step.links] == [own]
            assert step.context.trace_id == streams[role].context.trace_id != session.context.trace_id
        assert session.attributes["outrider.steps"] >= len(session.events) > 0


def test_a_refused_request_is_a_span_with_an_error(observed):
    (refused,) = [
        span for span in by_name(observed)["outrider.request"] if span.attributes["outrider.request_id"] != "seen"
    ]
    assert not refused.status.is_ok
    assert "InvalidRequest" in refused.status.description


# ---------------------------------------------------------------------------------------------------------------- logs


def test_the_lines_of_a_requests_life_hold_its_id_and_lead_to_the_workers_lines(observed):
    lines = [json.loads(line) for line in observed.lines]
    own = [line for line in lines if line.get("request_id") == "seen"]
    assert [line["message"] for line in own if "session_id" not in line] == [
        "request seen begins",
        "request seen has ended",
    ]
    (session_id,) = {line["session_id"] for line in own if "session_id" in line}
    loggers = {line["logger"] for line in lines if line.get("session_id") == session_id}
    assert {"outrider.draft_worker.service", "outrider.target_worker.sessions.unpacking"} <= loggers
    (refused,) = [line for line in lines if "is refused with" in line["message"]]
    assert refused["request_id"] in refused["message"]
    assert "def fibonacci" not in "".join(observed.lines)
