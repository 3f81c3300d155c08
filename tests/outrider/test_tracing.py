"""Traces: off by default, bounded, joined with tokens, and sent where a collector listens."""

import threading
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest

from outrider import tracing
from outrider.security.bearer import authorized
from outrider.tracing import SessionTraces, Tracing

pytest.importorskip("opentelemetry.sdk", reason="the extra tracing is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def test_while_it_is_off_there_is_nothing():
    assert tracing.active is None
    assert tracing.session_traces("draft", ()) is None
    assert tracing.stream_metadata("draft", "127.0.0.1:1") is None
    with tracing.client_call() as metadata, tracing.exporting("client", None):
        assert metadata is None


def test_a_client_whose_call_fails_says_why_and_what_is_on_is_off_again(provider, exporter):
    with tracing.using(provider), pytest.raises(TimeoutError), tracing.client_call() as metadata:
        raise TimeoutError("too slow")
    assert tracing.active is None
    (span,) = exporter.get_finished_spans()
    assert "TimeoutError: too slow" in span.status.description
    assert metadata is not None
    assert f"{span.context.trace_id:032x}" in dict(metadata)["traceparent"]


def test_a_token_and_a_trace_go_with_one_call():
    calls = []
    stub = authorized(SimpleNamespace(Generate=lambda request, **options: calls.append(options)), "secret")
    stub.Generate(None, metadata=(("traceparent", PARENT),), timeout=1)
    stub.Generate(None, metadata=None)
    stub.Generate(None)
    assert calls[0] == {"metadata": (("authorization", "Bearer secret"), ("traceparent", PARENT)), "timeout": 1}
    assert [options["metadata"] for options in calls[1:]] == 2 * [(("authorization", "Bearer secret"),)]


def test_what_a_long_session_tells_is_bounded(provider, exporter):
    traces = SessionTraces(Tracing(provider), "target", [("traceparent", PARENT), ("other", "1")])
    traces.opened(1, 1, PARENT)
    traces.opened(2, 1, "")
    for _ in range(200):
        traces.stepped([1, 2, 3], step_ns=5_000_000, forward_ns=4_000_000, rows=9)
    traces.end()
    (session,) = [span for span in exporter.get_finished_spans() if span.name == "outrider.target.session"]
    steps = [span for span in exporter.get_finished_spans() if span.name == "outrider.target.step"]
    assert session.attributes["outrider.steps"] == 200
    assert len(session.events) == 64
    assert len(steps) == 8
    assert f"{steps[0].context.trace_id:032x}" in PARENT
    assert steps[0].end_time - steps[0].start_time >= 5_000_000


def test_an_old_close_leaves_a_session_that_was_opened_anew(provider, exporter):
    traces = SessionTraces(Tracing(provider), "draft", None)
    traces.opened(1, 1, PARENT)
    traces.opened(1, 3, PARENT)
    traces.closed(1, 2)
    assert [span.attributes["outrider.epoch"] for span in exporter.get_finished_spans()] == [1]
    traces.closed(1, 3)
    assert [span.attributes["outrider.epoch"] for span in exporter.get_finished_spans()] == [1, 3]


def test_spans_reach_a_collector_by_otlp():
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    received, has_come = [], threading.Event()

    def export(request, context):
        received.append(request)
        has_come.set()
        return service.ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=service.ExportTraceServiceRequest.FromString,
        response_serializer=service.ExportTraceServiceResponse.SerializeToString,
    )
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with tracing.exporting("client", f"http://127.0.0.1:{port}"), tracing.client_call():
            pass
        assert has_come.wait(30)
    finally:
        server.stop(None).wait()
    (spans,) = received[0].resource_spans
    assert {"outrider-client"} == {
        each.value.string_value for each in spans.resource.attributes if each.key == "service.name"
    }
    assert [span.name for span in spans.scope_spans[0].spans] == ["outrider.generate"]
