"""When a request passed which point of its life, by the monotonic clock."""

from dataclasses import dataclass, field

from outrider.coordinator.sessions import clock


@dataclass(kw_only=True, slots=True)
class RequestTimes:
    """Nanoseconds; 0 is not yet.

    Attributes:
        arrived_ns: it was accepted.
        admitted_ns: its first choice left the queue.
        first_token_ns: its first token was ready for the client.
        finished_ns: its last one was.
    """

    arrived_ns: int = field(default_factory=clock.now_ns)
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
