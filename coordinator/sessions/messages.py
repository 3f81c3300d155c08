"""Messages between the coordinator's parts.

service ── GenerationRequest ──> scheduler
service <── TokenDelta, Round, GenerationResult ── scheduler <── RoundResults ── target
                                                   scheduler <── GrowthBatch ── draft

What nobody here has to change stays in the protobuf message that it comes or leaves in. Columns of `GrowthBatch` may be
containers of the message that brought them: `[:]` makes lists of them.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self

import grpc
import numpy as np
import numpy.typing as npt

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.growth_source import ALL_SOURCES, NUM_SOURCES, GrowthSource
from outrider.sampling import SamplingSpec, SpeculationMode
from outrider.v1 import common_pb2, generation_pb2, target_pb2
from outrider.wire import floats_from_bytes, split_by_counts

if TYPE_CHECKING:
    from outrider.coordinator.sessions.request_trace import RequestTrace


class FinishReason(StrEnum):
    """Finish reason of a choice."""

    STOP = "stop"
    LENGTH = "length"


# ---------------------------------------------------------------------------------------------- service and scheduler


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A validated request, every default filled in.

    Attributes:
        sampling: the rule for choice 0; choice c uses the same with `choice_index` c.
        max_nodes: most nodes verified for a choice in one step; 0: the target's own bound.
        max_depth: deepest node; likewise.
        received: choice index to the output tokens that the client has already got (a resumed request).
        weights: version of those that `received` is of; empty: any.
        caller: whose it is: ids are its callers' own, and another's request may have the same.
        client: who takes turns with others in the queue: the caller, or a connection where nobody is asked for a name.
        queued_as: the one entry that it has in the queue with other prompts of one request; empty: none has others.
        spans: of its trace; None while nobody traces.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    stop: tuple[str, ...] = ()
    mode: SpeculationMode = SpeculationMode.ASYNC
    max_nodes: int = 24
    max_depth: int = 8
    sources: frozenset[GrowthSource] = ALL_SOURCES
    n: int = 1
    received: Mapping[int, Sequence[int]] = field(default_factory=dict)
    trace: bool = False
    weights: str = ""
    caller: str = ""
    client: str = ""
    queued_as: str = ""
    spans: "RequestTrace | None" = field(default=None, compare=False)

    @property
    def entry(self) -> str:
        """Name of its entry in the queue."""
        return self.queued_as or f"{self.caller} {self.request_id}"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities (raw softmax) of m tokens, with the k best alternatives of each.

    Attributes:
        token_logprobs: [m]
        top_token_ids: [m][k] best first.
        top_logprobs: [m][k]
    """

    token_logprobs: Sequence[float]
    top_token_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]

    def head(self, count: int) -> "TokenLogprobs":
        """Return the log probabilities of the first `count` tokens."""
        return TokenLogprobs(
            token_logprobs=self.token_logprobs[:count],
            top_token_ids=self.top_token_ids[:count],
            top_logprobs=self.top_logprobs[:count],
        )

    @classmethod
    def of(cls, parts: Sequence[Self]) -> Self:
        """Return the log probabilities of several runs of tokens, one behind the other."""
        return cls(
            token_logprobs=[value for part in parts for value in part.token_logprobs],
            top_token_ids=[row for part in parts for row in part.top_token_ids],
            top_logprobs=[row for part in parts for row in part.top_logprobs],
        )


@dataclass(frozen=True, kw_only=True)
class TokenDelta:
    """New tokens of one choice. `offset` tokens and `text_offset` UTF-8 bytes went before.

    Each choice's first has the version of the `weights` that all are of.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    offset: int
    text_offset: int
    logprobs: TokenLogprobs | None = None
    weights: str = ""


@dataclass(frozen=True, kw_only=True)
class ChoiceResult:
    """End of one choice."""

    index: int
    finish_reason: FinishReason
    completion_tokens: int
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationCounts:
    """Verifications and draft tokens of a request, or of a whole server."""

    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sources: Sequence[generation_pb2.SourceStats] = ()

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens a verification, the final one included."""
        return 1.0 + self.accepted_tokens / self.verify_steps if self.verify_steps else 1.0

    def message(self) -> generation_pb2.SpeculationStats:
        """Return the counts as a message."""
        return generation_pb2.SpeculationStats(
            verify_steps=self.verify_steps,
            spec_draft_tokens=self.drafted_tokens,
            spec_accepted_tokens=self.accepted_tokens,
            acceptance_length=self.acceptance_length,
            sources=self.sources,
        )


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The last event of a request; `cached_tokens` of its prompt were computed for none of its choices."""

    choices: Sequence[ChoiceResult]
    speculation: SpeculationCounts
    queue_s: float
    ttft_s: float
    total_s: float
    cached_tokens: int = 0
    weights: str = ""


GenerationEvent = TokenDelta | generation_pb2.Round | GenerationResult


# ------------------------------------------------------------------------------------------------ scheduler and workers


class FaultKind(StrEnum):
    """Reaction that a worker's session fault requires."""

    LOST = "lost"
    """The worker does not have it (any more): open it anew."""
    NO_ROOM = "no room"
    """The worker is full: try again later."""
    REFUSED = "refused"
    """It can never be served."""
    REPLACED = "replaced"
    """It began with weights that the worker does not run with any more."""


_FAULT_KINDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: FaultKind.NO_ROOM,
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: FaultKind.REFUSED,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: FaultKind.REFUSED,
    grpc.StatusCode.ABORTED.value[0]: FaultKind.REPLACED,
}


class SessionFault(NamedTuple):
    """Reason for which a worker closed or refused a session."""

    kind: FaultKind
    message: str

    @classmethod
    def of(cls, error: common_pb2.SessionError) -> Self:
        """Return what a worker's error calls for."""
        return cls(_FAULT_KINDS.get(error.code, FaultKind.LOST), error.message)


_NO_NODES = (0,) * NUM_SOURCES


class Outcome(NamedTuple):
    """Outcome of a round for one session.

    Attributes:
        token_ids: [m] committed.
        accepted: nodes among them.
        selected: nodes that were verified.
        selected_by_source: [3] of these, those that a model, n-grams and a head had proposed; a node may be of several.
        grown_by_source: [3] nodes that drafters in the target have grown since the last result, likewise.
        sources: [accepted] bit set of the sources that had proposed the node, bit 2^source for each.
        cached_tokens: of the prompt, tokens whose KV the target had.
        lost: bit set of the places whose growth was lost.
        tree_end: where the round has left the session's tree; a newer target may tell ends that are unknown here.
    """

    session_id: int
    epoch: int
    token_ids: Sequence[int]
    accepted: int = 0
    selected: int = 0
    selected_by_source: Sequence[int] = _NO_NODES
    grown_by_source: Sequence[int] = _NO_NODES
    sources: Sequence[int] = ()
    is_over: bool = False
    cached_tokens: int = 0
    lost: int = 0
    tree_end: target_pb2.TreeEnd = target_pb2.TREE_END_UNSPECIFIED
    logprobs: TokenLogprobs | None = None


def _by_session(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return counts by source, session by session."""
    return list(zip(*(counts[source::NUM_SOURCES] for source in range(NUM_SOURCES)), strict=True))


class RoundResults:
    """A message of a target about one round, checked.

    Attributes:
        message: its columns, of S sessions and M tokens, A of them accepted nodes; `[:]` makes a list of one.
        number: of the message on its stream, from 1.
    """

    def __init__(self, message: target_pb2.RoundResults, number: int = 0) -> None:
        self.message, self.number, self.report = message, number, message.report

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """The columns by session. Drafts hear what was committed before these are made."""
        message = self.message
        selected = message.selected_counts[:]
        # Empty where all are a model's, and where no drafter in the target has grown any.
        by_source = _by_session(message.selected_by_source[:]) or ((count, *_NO_NODES[1:]) for count in selected)
        grown = _by_session(message.grown_by_source[:]) or itertools.repeat(_NO_NODES, len(selected))
        tokens, sources = message.tokens[:], message.accepted_sources[:]
        logprobs = {entry.row: _logprobs(entry) for entry in message.logprobs}
        # Columns in the order of the fields of `Outcome`, of which there is one a session every few milliseconds.
        columns = zip(
            message.session_ids[:],
            message.epochs[:],
            [tokens[span] for span in split_by_counts(message.token_counts[:])],
            message.accepted_counts[:],
            selected,
            by_source,
            grown,
            [sources[span] for span in split_by_counts(message.accepted_counts[:])],
            map(bool, message.finishes[:]),
            message.cached_tokens[:],
            message.lost[:],
            message.tree_ends[:],
            map(logprobs.get, range(len(selected))),
            strict=True,
        )
        return list(itertools.starmap(Outcome, columns))


def _logprobs(entry: target_pb2.Logprobs) -> TokenLogprobs:
    token_logprobs = floats_from_bytes(entry.token_logprobs).tolist()
    count = len(token_logprobs)
    top = floats_from_bytes(entry.top_logprobs).reshape(count, entry.top_count).tolist()
    ids = list(entry.top_token_ids)
    rows = [ids[start : start + entry.top_count] for start in range(0, count * entry.top_count, entry.top_count or 1)]
    return TokenLogprobs(token_logprobs=token_logprobs, top_token_ids=rows or [[]] * count, top_logprobs=top)


@dataclass(frozen=True, kw_only=True)
class GrowthBatch:
    """One message of growth, in columns: S parts, each new nodes of a session's tree, N in all, from one draft worker.

    Several steps make several parts of a session, in their order.

    Attributes:
        as_of: [S] committed length the draft had applied.
        complete: [S] the round's tree is whole (sync mode).
        forgot: [S] earlier node ids mean nothing any more.
        again: [S] the live tree, sent again.
        node_ids: [N] unique per (worker, source, session, epoch).
        parents: [N] node id, or 0 for the root at length `as_of`.
        acceptance: [N] estimate given that the parent is accepted.
        distributions: [N] the q each token was drawn from, under rejection; empty, or None each, otherwise.
        source: of all nodes.
        steps: steps of the worker in this message.
    """

    session_ids: Sequence[int]
    epochs: Sequence[int]
    as_of: Sequence[int]
    node_counts: Sequence[int]
    complete: Sequence[bool]
    forgot: Sequence[bool]
    again: Sequence[bool]
    node_ids: npt.NDArray[np.uint32]
    parents: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]
    acceptance: npt.NDArray[np.float32]
    distributions: Sequence[DraftDistribution | None] = ()
    source: GrowthSource = GrowthSource.MODEL
    steps: int = 1

    def nodes_of(self, rows: Sequence[int]) -> slice | npt.NDArray[np.bool_]:
        """Return an index that picks the nodes of `rows` (ascending) from a node column.

        A slice for all rows, else a mask [N] bool.
        """
        if len(rows) == len(self.node_counts):
            return slice(None)
        is_picked = np.zeros(len(self.node_counts), np.bool_)
        is_picked[list(rows)] = True
        return np.repeat(is_picked, self.node_counts[:])

    def count_parents(self, rows: Sequence[int]) -> int:
        """Count distinct (row, parent) pairs among the nodes of `rows`."""
        owners = np.repeat(np.arange(len(self.node_counts)) << 32, self.node_counts[:])
        nodes = self.nodes_of(rows)
        parents = np.sort(owners[nodes] | self.parents[nodes])
        return int(np.count_nonzero(np.diff(parents))) + 1 if len(parents) else 0
