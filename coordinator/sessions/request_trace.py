"""One request's spans in the coordinator: the whole, queue, prefill and decode; its rounds are events of the last.

The stages are put together when the request ends, from the times that are kept of it anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import OutriderError, Superseded
from outrider.tracing import Tracing, named

if TYPE_CHECKING:
    from outrider.coordinator.sessions.generation import Generation
    from outrider.coordinator.sessions.messages import Outcome, RoundResults

# The first rounds are told one by one, then every so many, up to the most that a span keeps.
_FIRST_ROUNDS, _EVERY, _MOST_EVENTS = 32, 16, 120


class RequestTrace:
    """The spans of one request.

    Attributes:
        traceparent: of this request, for the workers.
    """

    def __init__(self, tracing: Tracing, request_id: str, *, parent: str) -> None:
        self._tracing = tracing
        self._span = tracing.span("outrider.request", parent=parent, role="coordinator", request_id=request_id)
        self.traceparent = tracing.traceparent(self._span)
        self._rounds: list[tuple[int, dict[str, int | float]]] = []
        self._seen = 0

    def note_round(self, choice: int, outcome: Outcome, results: RoundResults, *, since_ns: int, now_ns: int) -> None:
        """Note a round that has given a choice tokens; it last got some at `since_ns`."""
        self._seen += 1
        if self._seen > _FIRST_ROUNDS and (self._seen % _EVERY or len(self._rounds) >= _MOST_EVENTS):
            return
        told = {
            "choice": choice,
            "step": results.number,
            "nodes": outcome.selected,
            "accepted": outcome.accepted,
            "tokens": len(outcome.token_ids),
            "step_ms": results.report.step_ns / 1e6,
            "round_ms": (now_ns - since_ns) / 1e6,
        }
        self._rounds.append((now_ns, told))

    def refuse(self, error: OutriderError) -> None:
        """The request never began."""
        self._fail(error)
        self._span.end()

    def end(self, generation: Generation) -> None:
        """Note the end of the request, however it came."""
        times = generation.times
        self._stage("outrider.queue", times.arrived_ns, times.admitted_ns)
        self._stage("outrider.prefill", times.admitted_ns, times.first_token_ns)
        last_ns = times.finished_ns or max((at_ns for at_ns, _ in self._rounds), default=0)
        self._stage("outrider.decode", times.first_token_ns, last_ns, with_rounds=True)
        counts = {
            "prompt_tokens": len(generation.request.prompt_token_ids),
            "output_tokens": sum(session.output_length for session in generation.sessions),
            "rounds": self._seen,
            "accepted_tokens": sum(session.accepted_tokens for session in generation.sessions),
        }
        self._span.set_attributes(named(counts))
        error = generation.error
        if error is not None and not isinstance(error, Superseded):
            self._fail(error)
        self._span.end()

    def _stage(self, name: str, began_ns: int, ended_ns: int, *, with_rounds: bool = False) -> None:
        if not began_ns or not ended_ns:
            return
        span = self._tracing.span(name, parent=self._span, start_ns=began_ns, role="coordinator")
        if with_rounds:
            for at_ns, told in self._rounds:
                span.add_event("round", named(told), timestamp=self._tracing.at(at_ns))
        span.end(end_time=self._tracing.at(max(began_ns, ended_ns)))

    def _fail(self, error: OutriderError) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
