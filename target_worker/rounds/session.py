"""A session of a target worker, as the host knows it: what the last report that was read has left."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.engine.prefix_cache import common_length
from outrider.grammar.matcher import SessionGrammar
from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.verification.walk import COUNTED_KINDS, Finish
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.rounds.host_part import has_host_stops, needs_host
from outrider.target_worker.sessions.requests import (
    WITHOUT_BOUND,
    Code,
    OpenRequest,
    SessionFault,
    SessionKey,
    TokenLogprobs,
)

# Distributions of nodes that a session under `rejection` keeps: those of a chain, and of what is on its way.
_MOST_DISTRIBUTIONS = 512


class Level(enum.IntEnum):
    """Needs of a session's choices. A round serves the sessions of its own level and of lower ones."""

    PLAIN = 0
    """The logits alone."""
    PROCESSED = 1
    """Processors, or log probabilities."""
    HOSTED = 2
    """A part of the host between forward pass and choices."""


@dataclass(kw_only=True, eq=False)
class Session:
    """A session.

    Attributes:
        key: (incarnation, session id).
        epoch: of its opening.
        order: its age; the highest is the youngest.
        history: [limit or more] int32, prompt and committed output up to `length`.
        length: committed tokens.
        prompt_len: tokens of the prompt.
        sampling: how tokens are chosen.
        limit: most tokens (prompt and output) it may reach.
        allow: the length up to which it may run ahead of its client; 0 holds it.
        mode: when its trees are verified.
        sync_wait_ns: how long it waits for a tree in sync mode.
        max_nodes: most nodes of it in a round.
        max_depth: depth of the deepest of them.
        sources: kinds of drafter that may grow its tree.
        is_unread: whether nobody reads its results.
        is_alone: whether no other session may take part in its rounds.
        is_aside: whether the next round is another's that runs alone, or of all others.
        workers: bit set over the places that a worker has.
        is_waiting: in sync mode, whether its next tree has not been released to a round.
        waits_since_ns: since when it could be verified without; None if it cannot be yet.
        tree_at: the length that its last whole tree was grown for.
        sent_reach: `reach` as it was last sent to the device.
        sent_round: number of the round that it was sent to.
        grammar: that its output has to match; None where it may be anything.
        row: of the pool, and of the slot table; -1 until it is known to no round.
        generation: of the row.
        is_open: whether the device knows the session.
        is_shared: whether others may find the KV of its prompt.
        cached: tokens with KV.
        planned: tokens with KV once the chunks under way have been computed.
        cached_tokens: tokens of the prompt whose KV was found in the prefix cache.
        reached: most tokens that ever had KV.
        distributions: q of the nodes that have come, by node id, under `rejection`.
        lost: bit set over places whose growth has been lost; told with the next result.
        grown: of a forced output, the length up to which its tokens have been put into the pool.
        level: level of the rounds that it takes part in.
        stop_token_ids: tokens that end it.
        has_host_stops: whether the device does not know all of these.
    """

    key: SessionKey
    epoch: int
    order: int
    history: npt.NDArray[np.int32]
    length: int
    prompt_len: int
    sampling: SamplingSpec
    limit: int
    allow: int
    mode: SpeculationMode = SpeculationMode.ASYNC
    sync_wait_ns: int = 0
    max_nodes: int = WITHOUT_BOUND
    max_depth: int = WITHOUT_BOUND
    sources: Collection[GrowthSource] = ALL_SOURCES
    is_unread: bool = False
    is_alone: bool = False
    is_aside: bool = False
    workers: int = 0
    is_waiting: bool = field(init=False)
    waits_since_ns: int | None = None
    tree_at: int = 0
    sent_reach: int = 0
    sent_round: int = 0
    grammar: SessionGrammar | None = None
    row: int = -1
    generation: int = 0
    is_open: bool = False
    is_shared: bool = False
    cached: int = 0
    planned: int = 0
    cached_tokens: int = 0
    reached: int = 0
    distributions: dict[int, DraftDistribution] = field(default_factory=dict)
    lost: int = 0
    grown: int = 0
    level: Level = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    has_host_stops: bool = field(init=False)

    def __post_init__(self) -> None:
        self.level = Level.PROCESSED if self.sampling.reads_logits else Level.PLAIN
        if needs_host(self):
            self.level = Level.HOSTED
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids)
        self.has_host_stops = has_host_stops(self.sampling)
        self.is_waiting = self.is_sync

    @classmethod
    def of_request(
        cls,
        request: OpenRequest,
        ids: npt.NDArray[np.integer],
        *,
        order: int,
        max_model_len: int,
        held: Session | None,
        grammar: SessionGrammar | None,
        is_aside: bool,
    ) -> Session:
        """Return the session of a request that has been checked.

        Args:
            request: see there.
            ids: [n] its prompt and its output so far.
            order: its age, where it replaces no other.
            max_model_len: most tokens that it may reach.
            held: the session that it replaces, which may have had the same tokens.
            grammar: see `Session`.
            is_aside: see `Session`.
        """
        limit = min(len(request.prompt) + request.sampling.max_new_tokens, max_model_len)
        history = np.zeros(max(limit, len(ids)), np.int32)
        history[: len(ids)] = ids
        cached_tokens = reached = 0
        if held is not None:
            order, cached_tokens = held.order, held.cached_tokens
            reached = min(held.reached, common_length(held.history[: held.length], history[: len(ids)]))
        return cls(
            key=request.key,
            epoch=request.epoch,
            order=order,
            history=history,
            length=len(ids),
            prompt_len=len(request.prompt),
            sampling=request.sampling,
            limit=limit,
            allow=request.allow,
            mode=request.mode,
            sync_wait_ns=1_000_000 * request.sync_wait_ms,
            max_nodes=request.max_nodes,
            max_depth=request.max_depth,
            sources=request.sources,
            is_alone=request.is_alone,
            is_aside=is_aside,
            grammar=grammar,
            cached_tokens=cached_tokens,
            reached=reached,
        )

    @property
    def is_sync(self) -> bool:
        """True if it verifies whole trees, one a round."""
        return self.mode is SpeculationMode.SYNC

    @property
    def bars_launch_ahead(self) -> bool:
        """True if no round may be launched ahead while the session is active."""
        return self.is_sync or self.is_alone or self.is_aside

    def is_drafted_by(self, source: GrowthSource) -> bool:
        """True if a resident drafter grows its tree: what it puts out is chosen from ranked logits alone."""
        sampling = self.sampling
        if self.mode is SpeculationMode.OFF or source not in self.sources:
            return False
        return sampling.rule is VerificationRule.COUPLED and not sampling.grammar and not sampling.forced_token_ids

    def may_grow(self, source: GrowthSource) -> bool:
        """True if a resident drafter grows its tree now."""
        return self.is_drafted_by(source) and self.length < min(self.limit, self.reach)

    @property
    def output(self) -> list[int]:
        """Committed tokens behind the prompt."""
        return self.history[self.prompt_len : self.length].tolist()

    @property
    def is_held(self) -> bool:
        """True if it is as far ahead of its client as it may be."""
        return self.is_unread or self.length >= self.allow

    @property
    def is_active(self) -> bool:
        """True if it may go on, or rounds may take it further for all that the device knows."""
        return not self.is_held or self.length < self.sent_reach

    @property
    def reach(self) -> int:
        """The length up to which rounds may take it now; 0 if it takes part in none."""
        return 0 if self.is_unread or self.is_aside or self.is_waiting else self.allow

    @property
    def is_prefilled(self) -> bool:
        """True if all its tokens but the root have KV."""
        return self.is_open and self.cached >= self.length - 1

    @property
    def is_prefilling(self) -> bool:
        """True if a part of its prompt has still to be computed, beyond what rounds under way do."""
        return self.is_open and not self.is_aside and self.planned < self.length - 1

    @property
    def is_entering(self) -> bool:
        """True if rounds under way compute all that is missing of its prompt."""
        return self.is_open and not self.is_prefilled and not self.is_aside and self.planned >= self.length - 1

    @property
    def is_running(self) -> bool:
        """True if the next round may verify it."""
        return self.is_prefilled and self.length < min(self.limit, self.reach)

    @property
    def wants_turn(self) -> bool:
        """True if a round would compute something of it that it is not set aside for."""
        if not self.is_prefilled:
            return self.is_open
        return not self.is_waiting and not self.is_held

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens, all but the last of which have KV now."""
        length = self.length + len(tokens)
        self.history[self.length : length] = tokens
        self.length, self.cached, self.planned = length, length - 1, length - 1
        self.reached = max(self.reached, self.cached)
        self.is_waiting, self.waits_since_ns = self.is_sync, None

    def end_at_stop(self, tokens: list[int], finish: Finish) -> Finish:
        """Cut tokens that are to be committed behind the first stop token, where the device does not know all of them.

        Args:
            tokens: cut.
            finish: as the device has found it.

        Returns:
            Why the session has ended.
        """
        first = self.prompt_len + self.sampling.min_new_tokens - self.length
        for place, token in enumerate(tokens):
            if token in self.stop_token_ids and place >= first:
                del tokens[place + 1 :]
                return Finish.STOP
        return finish

    def fault(self) -> SessionFault:
        """Return why no token can be chosen."""
        if self.grammar is not None and self.grammar.fault is not None:
            return SessionFault(Code.INVALID_ARGUMENT, f"structured_outputs: {self.grammar.fault}")
        return SessionFault(Code.INTERNAL, "the model's scores are not finite: no token can be chosen")

    def takes_growth(self, epoch: int, as_of: int) -> bool:
        """Return True if growth for so many tokens, under an epoch, may be verified: in sync mode for all it has."""
        if epoch != self.epoch or self.mode is SpeculationMode.OFF:
            return False
        return as_of == self.length or not self.is_sync

    def forced_growth(self, most: int) -> Growth | None:
        """Return what is still to be grown of a forced output: a chain that ends `most` tokens below the root.

        Its nodes are called by the committed length that they bring. None: nothing is to be grown.
        """
        start, forced = max(self.grown, self.length), self.sampling.forced_token_ids
        # The last token is a choice, which needs no node.
        tokens = forced[start - self.prompt_len : min(self.length + most, self.limit - 1) - self.prompt_len]
        if not tokens:
            return None
        node_ids = range(start + 1, start + 1 + len(tokens))
        parents = [0 if start == self.length else start, *node_ids[:-1]]
        self.grown = start + len(tokens)
        return Growth.of_session(self.key, self.epoch, 0, self.length, node_ids, parents, tokens, [1.0] * len(tokens))

    def add_distributions(self, node_ids: Iterable[int], distributions: Sequence[DraftDistribution | None]) -> None:
        """Keep the q that nodes were drawn from; the oldest ones are forgotten."""
        known = self.distributions
        known |= {node: q for node, q in zip(node_ids, distributions, strict=True) if q is not None}
        for node in list(known)[: max(len(known) - _MOST_DISTRIBUTIONS, 0)]:
            del known[node]


@dataclass(kw_only=True, eq=False, slots=True)
class SessionResult:
    """Outcome of a round for one session.

    Attributes:
        key, epoch: of the session.
        round: number of the round, from 1; 0 for what no round has brought about.
        tokens: committed by the round, in order.
        accepted: nodes among them.
        selected: nodes that were verified.
        selected_by_kind: [3] of these, those that a drafter of kind 1, 2 and 3 had proposed.
        grown_by_kind: [3] nodes that a resident drafter has grown since the last result, likewise.
        tree_end: where the round has left the session's tree.
        drafters: for each accepted node the bit set of the kinds of drafter that had proposed it.
        finish: why the session has ended; NONE if it goes on.
        logprobs: of the tokens, where the session asked for them.
        cached_tokens: of the session's prompt, tokens whose KV it found in the prefix cache.
        lost: bit set over places whose growth has been lost: they are to send their trees again.
        fault: what is wrong; the session is closed.
    """

    key: SessionKey
    epoch: int
    round: int = 0
    tokens: Sequence[int] = ()
    accepted: int = 0
    selected: int = 0
    selected_by_kind: Sequence[int] = (0,) * COUNTED_KINDS
    grown_by_kind: Sequence[int] = (0,) * COUNTED_KINDS
    tree_end: TreeEnd = TreeEnd.NONE
    drafters: Sequence[int] = ()
    finish: Finish = Finish.NONE
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    lost: int = 0
    fault: SessionFault | None = None

    @property
    def has_ended(self) -> bool:
        """True if the session is closed."""
        return self.finish is not Finish.NONE or self.fault is not None
