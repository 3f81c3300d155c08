"""Outputs of a generation as the client returns them: deltas, the whole, statistics (no transport)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar

from google.protobuf.message import Message

from outrider.drafting.growth_source import GrowthSource
from outrider.v1 import generation_pb2, target_pb2
from outrider.wire import floats_from_bytes


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities of m tokens: the chosen ones' `[m]`, and the k best as (token id, log probability) `[m][k]`."""

    token_logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of one choice. `offset` tokens and `text_offset` UTF-8 bytes of text went before."""

    index: int
    token_ids: Sequence[int]
    text: str
    offset: int
    text_offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceOutput:
    """One choice. `finish_reason` is None while it is unfinished; `stop_reason` is the stop token id or string."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a generation, over all its choices.

    Of the prompt's, `cached_tokens` had to be computed for none of them: the target's prefix cache had their KV.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SourceSpeculation:
    """Draft tokens of one source: drafted, submitted to verification, accepted.

    What several sources have grown counts for each.
    """

    drafted_tokens: int
    submitted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculation statistics over all choices (after a resume: since then)."""

    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float
    sources: Mapping[str, SourceSpeculation] = field(default_factory=dict)
    """By "model", "ngram" and "eagle": those that have grown anything."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Times measured by the server, in milliseconds (after a resume: since then)."""

    queue_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A whole generation.

    Attributes:
        seed: with the same request it gives the same tokens again.
        rounds: one entry a verification, if the request asked for a trace.
        resumes: how often the stream broke and was resumed.
        weights: version of those that the tokens were chosen with; empty where the service does not know.
    """

    request_id: str
    seed: int
    choices: Sequence[ChoiceOutput]
    usage: Usage
    speculation: Speculation
    timings: Timings
    rounds: Sequence[generation_pb2.Round] = field(default=(), repr=False)
    resumes: int = 0
    weights: str = ""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> TokenLogprobs | None:
        """Log probabilities of the first choice, if asked for."""
        return self.choices[0].logprobs


_Output = TypeVar("_Output", Usage, Timings, SourceSpeculation)


def copied(kind: type[_Output], message: Message) -> _Output:
    """Return an output of a message's fields of the same names."""
    return kind(**{own.name: getattr(message, own.name) for own in fields(kind)})


def source_speculation(stats: generation_pb2.SpeculationStats) -> dict[str, SourceSpeculation]:
    """Statistics by source."""
    return {
        GrowthSource(own.source).word: copied(SourceSpeculation, own)
        for own in stats.sources
        if own.source in set(GrowthSource)
    }


def token_logprobs(logprobs: target_pb2.Logprobs, skip: int) -> TokenLogprobs:
    """Return a delta's log probabilities without its first `skip` tokens."""
    chosen = floats_from_bytes(logprobs.token_logprobs).tolist()
    best, count = floats_from_bytes(logprobs.top_logprobs).tolist(), logprobs.top_count
    pairs = list(zip(logprobs.top_token_ids, best, strict=True))
    top = [tuple(pairs[row * count : (row + 1) * count]) for row in range(len(chosen))]
    return TokenLogprobs(token_logprobs=tuple(chosen[skip:]), top=tuple(top[skip:]))
