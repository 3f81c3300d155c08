"""Interface of senders: send a request and record the response, whatever the protocol."""

from dataclasses import dataclass
from typing import Protocol

from outrider.coordinator.loadtest.options import Mode
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.workloads import Prompt


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request as it is sent.

    Attributes:
        prompt: whole.
        keeps_output: whether the answer is needed as the beginning of a further turn.
        sources: what may draft; none are all.
    """

    prompt: Prompt
    max_new_tokens: int
    seed: int
    temperature: float
    ignore_eos: bool
    speculation: Mode
    is_traced: bool
    keeps_output: bool
    timeout_s: float
    sources: tuple[str, ...] = ()


class Sender(Protocol):
    """Sends requests over connections of its own."""

    async def send(self, ask: Ask, record: RequestRecord, *, begin_s: float) -> Prompt:
        """One request, to its end.

        What comes is written into `record`, times in seconds after `begin_s` of `time.monotonic`; so is an error.

        Returns:
            the output, of the prompt's kind, if it is kept; else an empty one.
        """
        ...

    async def close(self) -> None:
        """End the connections."""
        ...
