"""Record of one request, and the figures derived from it.

    intended      sent         first chunk   chunk   last chunk
    |--client's---|--------------|-------------|-------|
    |   delay     |--TTFT sent---|-----ITL-----|--ITL--|
    |-----------TTFT-------------|-------TPOT * (n - 1)|
    |-------------------E2EL---------------------------|

A latency begins at the time at which the request was to be sent, not when it was: a client that is held up by a slow
server would otherwise leave out exactly the requests that had to wait (coordinated omission). The figures from the
sending on are kept beside it. A chunk holds one token or several: what a verification accepted comes at once. ITL is
the time between two chunks, as in vLLM's `bench serve`, so it is not divided by a chunk's tokens; TPOT is, over all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One verification of a traced request, in nanoseconds; together they are the time from result to result.

    Attributes:
        forward_ns: the target's device.
        host_ns: the rest of the target's step.
        between_ns: from the result before to the round's begin, and from its end to the coordinator.
    """

    forward_ns: int
    host_ns: int
    between_ns: int


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds from the run's beginning.

    Attributes:
        index: of the arrival.
        intended_s: when it was to be sent.
        started_s: when the client got to it; later than intended where the client itself is late.
        chunk_s: when tokens came.
        chunk_tokens: how many; [] where the protocol does not say.
        over_s: when the client was done with it, whether it came to its end or failed; 0 where nobody notes it.
        prompt_tokens: as the server counts them.
        verify_steps: verifications; 0 where the protocol does not say.
        accepted_per_position: verifications that accepted at least 1, 2, ... nodes; [] where nobody says.
        position_steps: of so many.
    """

    index: int
    turn: int = 0
    endpoint: str = ""
    intended_s: float = 0.0
    started_s: float = 0.0
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    over_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    position_steps: int = 0
    rounds: list[RoundTime] = field(default_factory=list)
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """True if the request ended without an error and with a token."""
        return not self.error and bool(self.chunk_s)

    @property
    def ended_s(self) -> float:
        """Time of the last tokens, in seconds."""
        return self.chunk_s[-1] if self.chunk_s else self.sent_s

    @property
    def left_s(self) -> float:
        """End of the request, in seconds; a failed one, as by its timeout, ends after its last tokens."""
        return max(self.over_s, self.ended_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token from the intended time, in seconds."""
        return self.chunk_s[0] - self.intended_s

    @property
    def ttft_from_send_s(self) -> float:
        """Time to first token from sending, in seconds."""
        return self.chunk_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency from the intended time, in seconds."""
        return self.ended_s - self.intended_s

    @property
    def e2el_from_send_s(self) -> float:
        """End-to-end latency from sending, in seconds."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.ended_s - self.chunk_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    @property
    def client_delay_s(self) -> float:
        """Seconds between intended time and sending."""
        return self.sent_s - self.intended_s

    @property
    def start_lag_s(self) -> float:
        """Seconds between intended time and start: the client's own share of the delay."""
        return self.started_s - self.intended_s


def round_times(rounds: Sequence[generation_pb2.Round]) -> list[RoundTime]:
    """From the rounds of one choice, in order."""
    # A request's first round is its prefill: it follows no result.
    return [
        RoundTime(
            forward_ns=own.forward_ns,
            host_ns=max(0, own.step_ns - own.forward_ns),
            between_ns=max(0, own.result_ns - before.result_ns - own.step_ns),
        )
        for before, own in pairwise(rounds)
    ]


def positions(accepted: list[int]) -> list[int]:
    """Return how many verifications accepted at least 1, 2, ... nodes."""
    return [sum(count >= depth for count in accepted) for depth in range(1, max(accepted, default=0) + 1)]
