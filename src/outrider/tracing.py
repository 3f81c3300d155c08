"""Traces of requests over all processes, in OpenTelemetry: off unless somebody asks, and then an extra (`tracing`).

    client span ── traceparent in the call's metadata ──> coordinator: request, queue, prefill, decode (rounds: events)
                                                             └── traceparent in SessionOpen ──> draft, target: session

A worker's step serves many requests, so it belongs to the trace of the coordinator's stream, with links to the sessions
in it. Of rounds and steps a bounded number is told, however long a request goes on.

While it is off, `active` is None, and that is all that is asked on the way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.errors import MissingPackage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

HEADER = "traceparent"
# Of one session at a worker: steps that are told as events, and steps that get a span of their own.
_TOLD_STEPS, _OWN_STEPS = 64, 8
# A collector that is not there may hold up the end of a process so long.
_EXPORT_TIMEOUT_S = 3
Metadata = tuple[tuple[str, str], ...]


class Tracing:
    """Makes spans.

    Args:
        provider: takes them; whoever made it shuts it down.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("outrider", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # What the project measures is by the monotonic clock, what spans want is by the calendar's.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def span(
        self,
        name: str,
        *,
        parent: str | Span | None = None,
        start_ns: int | None = None,
        links: Iterable[Span] = (),
        **attributes: str | int | float | bool,
    ) -> Span:
        """Return a started span.

        Args:
            parent: traceparent of another process, or a span of this one; default what goes on in this thread or task.
            start_ns: when it began, by the monotonic clock; default now.
            links: spans of other traces that it is about.
            attributes: `outrider.NAME` in the span.
        """
        from opentelemetry import trace

        if isinstance(parent, str):
            context = self._propagator.extract({HEADER: parent})
        else:
            context = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(
            name,
            context=context,
            links=[trace.Link(link.get_span_context()) for link in links],
            start_time=None if start_ns is None else self.at(start_ns),
            attributes=named(attributes),
        )

    def at(self, monotonic_ns: int) -> int:
        """A time of the monotonic clock as spans have it."""
        return self._epoch_ns + monotonic_ns

    def traceparent(self, span: Span) -> str:
        """Return the W3C traceparent of a span."""
        from opentelemetry import trace

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=trace.set_span_in_context(span))
        return carrier.get(HEADER, "")


active: Tracing | None = None
"""Tracing of this process; None while nobody traces."""


def named(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes under this project's names."""
    return {f"outrider.{name}": value for name, value in attributes.items()}


def received(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The traceparent in a call's metadata; empty where there is none."""
    return next((value for key, value in metadata or () if key == HEADER and isinstance(value, str)), "")


@contextlib.contextmanager
def using(provider: TracerProvider) -> Iterator[Tracing]:
    """Trace with somebody's own provider, while the block lasts."""
    global active  # noqa: PLW0603 - one a process is the point: what is off must cost one look
    before, active = active, Tracing(provider)
    try:
        yield active
    finally:
        active = before


@contextlib.contextmanager
def exporting(role: str, endpoint: str | None) -> Iterator[None]:
    """Send this process's spans to an OpenTelemetry collector, while the block lasts; without one, do nothing.

    Args:
        role: client, coordinator, draft or target; `service.name` is outrider-ROLE.
        endpoint: of the collector, OTLP over gRPC: http://HOST:4317, or https://.

    Raises:
        MissingPackage: the extra `tracing` is not installed.
    """
    if endpoint is None:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingPackage(f"traces need more packages: pip install 'outrider[tracing]' ({error})") from error
    resource = Resource.create({"service.name": f"outrider-{role}", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1000 * _EXPORT_TIMEOUT_S))
    try:
        with using(provider):
            yield
    finally:
        provider.shutdown()


@contextlib.contextmanager
def client_call() -> Iterator[Metadata | None]:
    """A span of a client's whole generation, breaks and resumptions included; gives the metadata that name it."""
    if active is None:
        yield None
        return
    from opentelemetry.trace import StatusCode

    tracing = active
    span = tracing.span("outrider.generate", role="client")
    try:
        yield ((HEADER, tracing.traceparent(span)),)
    except Exception as error:
        span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        raise
    finally:
        span.end()


def stream_metadata(role: str, address: str) -> Metadata | None:
    """Return the tracing metadata of the coordinator's stream to a worker; None with tracing off."""
    if active is None:
        return None
    span = active.span("outrider.stream", role="coordinator", peer=role, address=address)
    span.end()
    return ((HEADER, active.traceparent(span)),)


@dataclass(slots=True)
class _TracedSession:
    """A session at a worker, while it is open."""

    span: Span
    epoch: int
    steps: int = 0


class SessionTraces:
    """The spans of the sessions that came over one stream to a worker."""

    def __init__(self, tracing: Tracing, role: str, metadata: Iterable[tuple[str, Any]] | None) -> None:
        self._tracing = tracing
        self._role = role
        self._stream = received(metadata)
        self._open: dict[int, _TracedSession] = {}

    def opened(self, session_id: int, epoch: int, traceparent: str) -> None:
        """Note an opened session; without a traceparent nobody traces its request."""
        if not traceparent:
            return
        self.closed(session_id, epoch)
        span = self._tracing.span(
            f"outrider.{self._role}.session", parent=traceparent, role=self._role, session_id=session_id, epoch=epoch
        )
        self._open[session_id] = _TracedSession(span, epoch)

    def stepped(self, session_ids: Sequence[int], *, step_ns: int, forward_ns: int, rows: int) -> None:
        """A step has ended that these sessions were in; any thread may call this."""
        sessions = [found for session_id in session_ids if (found := self._open.get(session_id)) is not None]
        if not sessions:
            return
        cost = {"step_ms": step_ns / 1e6, "forward_ms": forward_ns / 1e6, "rows": rows}
        if any(session.steps < _OWN_STEPS for session in sessions):
            began_ns = time.monotonic_ns() - step_ns
            links = [session.span for session in sessions]
            name = f"outrider.{self._role}.step"
            self._tracing.span(name, parent=self._stream, start_ns=began_ns, links=links, role=self._role, **cost).end()
        for session in sessions:
            session.steps += 1
            if session.steps <= _TOLD_STEPS and session.span.is_recording():
                session.span.add_event("step", named(cost))

    def closed(self, session_id: int, epoch: int) -> None:
        """Note a closed session, if it is of this epoch or an older one."""
        session = self._open.get(session_id)
        if session is not None and session.epoch <= epoch:
            del self._open[session_id]
            _end(session)

    def end(self) -> None:
        """Note the end of the stream, and with it of all its sessions."""
        while self._open:
            _end(self._open.popitem()[1])


def _end(session: _TracedSession) -> None:
    session.span.set_attribute("outrider.steps", session.steps)
    session.span.end()


def session_traces(role: str, metadata: Iterable[tuple[str, Any]] | None) -> SessionTraces | None:
    """The spans of a stream to a worker; None while nobody traces."""
    return None if active is None else SessionTraces(active, role, metadata)
