"""What a verifier is asked, what it answers, and what it keeps of a session (no proto, no grpc)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution
from outrider.engine.kv_slots import SlotTable
from outrider.grammar.matcher import SessionGrammar
from outrider.sampling import SamplingSpec
from outrider.target_worker.resident_growth import DraftLimits, GrownNodes, GrownTree
from outrider.target_worker.synthetic import SyntheticCoins

SessionKey = tuple[int, int]
"""(coordinator incarnation, session id)."""


class Code(IntEnum):
    """The google.rpc.Code values that faults carry."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13


class SessionFault(Exception):
    """What is wrong with one session; others go on."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(message)


class SpeculationMode(Enum):
    """When a session's trees are verified."""

    ASYNC = "async"
    """Whatever has been grown by the next round."""
    SYNC = "sync"
    """Whole trees, one a round."""
    OFF = "off"
    """Never: every round is a plain step."""


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """Opens a session, or reopens it under a higher epoch with other committed tokens.

    `draft` is what a resident draft may grow for it; None: nothing.
    `weights` is the version that its tokens are chosen with; empty: any.
    `sync_wait_ms` is how long it waits for a tree in sync mode.
    """

    key: SessionKey
    epoch: int
    prompt: Sequence[int]
    output: Sequence[int]
    sampling: SamplingSpec
    weights: str = ""
    draft: DraftLimits | None = None
    mode: SpeculationMode = SpeculationMode.ASYNC
    sync_wait_ms: int = 0


@dataclass(kw_only=True, slots=True)
class TreeRequest:
    """A tree to verify; its root is the token at index `length - 1` and stands for node 0.

    One is made for each session of a step while the device may wait for it: frozen, it would take thrice the time.

    Attributes:
        key: whose tree.
        epoch: under which open.
        length: committed tokens the sender holds.
        tokens: [n] of nodes 1 to n.
        parents: [n] node numbers; a parent stands before its children.
        distributions: [n] the q each token was drawn from, under the rejection rule; otherwise empty, or None each.
        resident: to verify what the worker has drafted itself; no nodes are sent.
        settled: its result, where there is nothing to verify any more (`outrider.target_worker.succession`).
    """

    key: SessionKey
    epoch: int
    length: int
    tokens: Sequence[int]
    parents: Sequence[int]
    distributions: Sequence[DraftDistribution | None] = ()
    resident: bool = False
    settled: "TreeResult | None" = None


class Outcome(Enum):
    """What became of a tree."""

    ACCEPTED = 1
    DEFERRED = 2
    ERROR = 3
    ENDED = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Raw log probabilities of m emitted tokens and their k best alternatives.

    Attributes:
        token_logprobs: [m] float32.
        top_token_ids: [m, k] int64, best first.
        top_logprobs: [m, k] float32.
    """

    token_logprobs: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(kw_only=True, eq=False, slots=True)
class TreeResult:
    """One tree's outcome; not frozen, as a `TreeRequest` is not.

    Attributes:
        outcome: accepted, deferred or error; ended, where the step before it was the session's last.
        accepted_nodes: node numbers on the accepted path, root to leaf.
        token_ids: emitted tokens: those of the accepted nodes and the final one, unless the walk ended before it.
        logprobs: of the emitted tokens, where the session asked for them.
        cached_tokens: of the session's prompt, tokens whose KV it found in the cache, where tokens were emitted.
        drafted: nodes that the worker had drafted itself and verified.
        ended: whether no token can follow: the last is a stop token, or the session is as long as it may be.
        growth: what the worker has drafted below the last of the tokens; None where it did not draft.
        fault: what is wrong, where the outcome is an error.
    """

    outcome: Outcome
    accepted_nodes: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    drafted: int = 0
    ended: bool = False
    growth: GrownNodes | None = None
    fault: SessionFault | None = None


DEFERRED = TreeResult(outcome=Outcome.DEFERRED)


@dataclass(kw_only=True, eq=False)
class Session:
    """A session as the verifier holds it. Between steps its row has KV for at most all tokens but the last.

    Attributes:
        key: (incarnation, session id).
        epoch: of its latest open.
        order: place in the order of opens; the highest is the youngest.
        row: of the slot table.
        tokens: prompt and committed output.
        prompt_len: tokens of the prompt.
        sampling: how tokens are chosen.
        limit: most tokens (prompt and output) it may reach.
        in_flight: a step of it has begun and is not finished.
        closing: to be closed when that step is finished.
        starved: at its last plan it found no slots.
        cached_tokens: tokens of the prompt whose KV came from the cache.
        reached: most tokens that ever had KV.
        seen_version: of the prefix cache, when the session last looked for its tokens there.
        coins: that decide what it accepts, under the synthetic rule alone.
        grammar: that its output has to match; None where it may be anything.
        draft: what a resident draft may grow for it; None: nothing.
        drafted: what that has grown below its last token.
        next_node_id: of what that grows.
        unused_trees: of what that grew last, trees in a row of which no node was sent for verification; many of them,
            and each step without a tree counts as well.
        drafted_at: tokens that it had when the candidates that the device holds for its row were drafted; 0: none are.
        only_chooses: nothing but the coupled rule's choice is asked for: all that most one-graph rounds need to know.
    """

    key: SessionKey
    epoch: int
    order: int
    row: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingSpec
    limit: int
    in_flight: bool = field(default=False, init=False)
    closing: bool = field(default=False, init=False)
    starved: bool = field(default=False, init=False)
    cached_tokens: int = 0
    reached: int = 0
    seen_version: int | None = field(default=None, init=False)
    grammar: SessionGrammar | None = None
    draft: DraftLimits | None = None
    drafted: GrownTree | None = field(default=None, init=False, repr=False)
    next_node_id: int = field(default=1, init=False)
    unused_trees: int = field(default=0, init=False)
    drafted_at: int = field(default=0, init=False)
    only_chooses: bool = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    coins: SyntheticCoins | None = field(init=False, repr=False)
    _counts: "TokenCounts | None" = field(default=None, init=False, repr=False)
    _ids: npt.NDArray[np.int32] = field(init=False, repr=False)
    _ids_count: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        self.only_chooses = not (self.sampling.reads_logits or self.sampling.is_synthetic)
        self.coins = None
        if self.sampling.is_synthetic:
            self.coins = SyntheticCoins(self.sampling)
            # Here rather than in a step.
            self.coins.coin(len(self.tokens))
        self._ids = np.empty(max(self.limit, len(self.tokens)), dtype=np.int32)

    @property
    def root_index(self) -> int:
        """Index of the last committed token, whose KV the next verification writes."""
        return len(self.tokens) - 1

    @property
    def output(self) -> list[int]:
        """What is committed after the prompt."""
        return self.tokens[self.prompt_len :]

    def pending(self, slots: SlotTable) -> int:
        """Tokens before the root that have no KV yet."""
        return self.root_index - slots.length(self.row)

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        del self.tokens[length:]
        self.drafted_at = 0
        self.drafted = None
        self._ids_count = min(self._ids_count, length)
        self._counts = None

    def token_ids(self) -> npt.NDArray[np.int32]:
        """[number of tokens] all of them; kept along, for making an array of a long prompt is not free."""
        count = len(self.tokens)
        if count > len(self._ids):
            self._ids = np.resize(self._ids, count)
        if count > self._ids_count:
            self._ids[self._ids_count : count] = self.tokens[self._ids_count :]
            self._ids_count = count
        return self._ids[:count]

    def set_token_ids(self, ids: npt.NDArray[np.int64]) -> None:
        """`ids` are the session's tokens, as an array that is there already."""
        self._ids[: len(ids)] = ids
        self._ids_count = len(ids)

    def note_reached(self, length: int) -> None:
        """So many tokens have KV."""
        self.reached = max(self.reached, length)

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ascending distinct tokens, and how often each occurs in the output (0: in the prompt alone)."""
        if self._counts is None:
            self._counts = TokenCounts(self.tokens[: self.prompt_len], self.tokens[self.prompt_len :])
        self._counts.follow(self.tokens)
        return self._counts.token_ids, self._counts.output


class TokenCounts:
    """Distinct tokens of a growing sequence, counted over its output; kept, for sorting long prompts is not free."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.token_ids: npt.NDArray[np.int64] = np.unique(np.array([*prompt, *output], dtype=np.int64))
        self.output: npt.NDArray[np.int64] = np.zeros(len(self.token_ids), dtype=np.int64)
        np.add.at(self.output, np.searchsorted(self.token_ids, np.array(output, dtype=np.int64)), 1)
        self._length = len(prompt) + len(output)

    def follow(self, tokens: Sequence[int]) -> None:
        """Counts the tokens appended since the last call."""
        for token in tokens[self._length :]:
            place = int(np.searchsorted(self.token_ids, token))
            if place == len(self.token_ids) or self.token_ids[place] != token:
                self.token_ids = np.insert(self.token_ids, place, token)
                self.output = np.insert(self.output, place, 0)
            self.output[place] += 1
        self._length = len(tokens)
