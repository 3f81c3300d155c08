"""Verifies token trees: one forward, one walk a session (no proto, no grpc).

Under the default rule the choice at a node depends on the node's path, the session's parameters and its seed alone, so
whatever tree is submitted the emitted tokens are those of plain decoding; a tree only decides how many come out of a
step. Under the other rules (`outrider.target_worker.rules`) their distribution is that of plain decoding.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.model_runner import ModelCard, ModelRunner
from outrider.errors import OutOfSlots
from outrider.sampling import VerificationRule
from outrider.target_worker.forward_step import ForwardStep, Verdict, start_forward
from outrider.target_worker.logits import token_logprobs
from outrider.target_worker.planning import Planner, Work
from outrider.target_worker.sessions import (
    DEFERRED,
    Code,
    OpenRequest,
    Outcome,
    Session,
    SessionFault,
    SessionKey,
    TokenLogprobs,
    TreeRequest,
    TreeResult,
)
from outrider.target_worker.tree_checks import check_tree
from outrider.target_worker.walk import emit

_PREFILL_PART = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Results in the order of the trees, and what the step cost (see StepReport in common.proto)."""

    results: list[TreeResult]
    step_ns: int
    forward_ns: int
    tokens: int
    sessions: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingStep:
    """A step whose forward has been started.

    Attributes:
        begin_ns: when it began, by `time.perf_counter_ns`.
        results: of its trees, in their order; what the forward decides is still missing.
        places: the places in `results` of the first of `works`.
        works: what the forward computes.
        forward: the forward itself.
    """

    begin_ns: int
    results: list[TreeResult]
    places: Sequence[int]
    works: Sequence[Work]
    forward: ForwardStep


class Verifier:
    """The sessions of one target model. Not thread-safe: one thread calls it.

    Args:
        runner: the target.
        max_step_tokens: most rows of one forward: nodes, roots and prefill tokens.

    Raises:
        ValueError: `max_step_tokens` below 1.
    """

    def __init__(self, runner: ModelRunner, *, max_step_tokens: int) -> None:
        if max_step_tokens < 1:
            raise ValueError(f"max_step_tokens: {max_step_tokens} given, at least 1 needed")
        self._runner = runner
        self._slots = runner.slots
        self._max_step_tokens = max_step_tokens
        self._planner = Planner(runner.slots, max_tree_nodes=runner.config.max_tree_nodes)
        self._sessions: dict[SessionKey, Session] = {}
        self._opens = 0
        self.steps = 0

    @property
    def model(self) -> ModelCard:
        """The target's card."""
        return self._runner.info

    @property
    def session_count(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def slots_used(self) -> int:
        """KV slots that sessions hold."""
        return self._slots.used

    @property
    def slots_total(self) -> int:
        """KV slots of the cache."""
        return self._slots.num_slots

    @property
    def preemptions(self) -> int:
        """How often a session lost its KV to an older one."""
        return self._planner.preemptions

    @property
    def has_pending_prefill(self) -> bool:
        """Whether `prefill` would have something to try."""
        return any(session.pending(self._slots) > 0 for session in self._sessions.values())

    def open(self, request: OpenRequest) -> None:
        """Opens a session, or replaces it where it is open under the same or an older epoch.

        KV of tokens that the old and the new state share from the start on is kept.

        Raises:
            SessionFault: an older epoch, tokens or parameters out of range, no room.
        """
        held = self._sessions.get(request.key)
        if held is not None and request.epoch < held.epoch:
            raise SessionFault(Code.FAILED_PRECONDITION, f"epoch {request.epoch} is over: {held.epoch} is open")
        tokens = [*request.prompt, *request.output]
        self._check_open(request, tokens)
        if held is None:
            row = self._acquire_row()
        else:
            row = held.row
            shared = _shared_prefix(held.tokens, tokens)
            self._slots.truncate(row, min(shared, len(tokens) - 1))
        self._opens += 1
        self._sessions[request.key] = Session(
            key=request.key,
            epoch=request.epoch,
            order=self._opens if held is None else held.order,
            row=row,
            tokens=tokens,
            prompt_len=len(request.prompt),
            sampling=request.sampling,
            limit=min(len(request.prompt) + request.sampling.max_new_tokens, self._runner.info.max_model_len),
        )

    def close(self, key: SessionKey, epoch: int) -> None:
        """Frees a session and its slots; unknown ones and those reopened under a higher epoch stay as they are."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            del self._sessions[key]
            self._slots.release_row(session.row)

    def step(self, trees: Sequence[TreeRequest]) -> StepResult:
        """Verifies a batch of trees in one forward and commits what it accepts.

        Sessions are independent: a fault of one is its own result, and closes it.
        """
        return self.finish(self.begin(trees))

    def begin(self, trees: Sequence[TreeRequest]) -> PendingStep:
        """Plans a step, reserves its slots and starts its forward; `finish` must follow.

        Until then its sessions stand in no other step, and are neither reopened nor closed.
        """
        return self._begin(trees, self._max_step_tokens)

    def finish(self, pending: PendingStep) -> StepResult:
        """Waits for the forward and commits what the walks accept."""
        results = pending.results
        judged = pending.forward.finish()
        for place, work in zip(pending.places, pending.works, strict=False):
            verdict = judged.get(id(work))
            results[place] = DEFERRED if verdict is None else self._commit(work.session, verdict)
        self.steps += 1
        return StepResult(
            results=results,
            step_ns=time.perf_counter_ns() - pending.begin_ns,
            forward_ns=pending.forward.forward_ns,
            tokens=sum(work.rows for work in pending.works),
            sessions=sum(work.rows > 0 for work in pending.works),
        )

    def _begin(self, trees: Sequence[TreeRequest], max_step_tokens: int) -> PendingStep:
        begin_ns = time.perf_counter_ns()
        results: list[TreeResult] = [DEFERRED] * len(trees)
        places: list[int] = []
        asked: list[tuple[Session, TreeRequest]] = []
        count = Counter(tree.key for tree in trees)
        for place, tree in enumerate(trees):
            try:
                asked.append((self._checked(tree, repeated=count[tree.key] > 1), tree))
                places.append(place)
            except SessionFault as fault:
                results[place] = TreeResult(outcome=Outcome.ERROR, fault=fault)
        for place, result in enumerate(results):
            if result.outcome is Outcome.ERROR:
                self.close(trees[place].key, trees[place].epoch)
        works = self._planner.plan(asked, self._sessions.values(), max_step_tokens=max_step_tokens)
        forward = start_forward(self._runner, works)
        return PendingStep(begin_ns=begin_ns, results=results, places=places, works=works, forward=forward)

    def prefill(self) -> int:
        """One forward of pending prefill alone, oldest session first; the rows it computed.

        It takes a part of a step's rows, so that a batch that arrives meanwhile does not wait for long.
        """
        return self.finish(self._begin([], -(-self._max_step_tokens // _PREFILL_PART))).tokens

    def _acquire_row(self) -> int:
        try:
            return self._slots.acquire_row()
        except OutOfSlots as error:
            raise SessionFault(Code.RESOURCE_EXHAUSTED, str(error)) from error

    def _check_open(self, request: OpenRequest, tokens: Sequence[int]) -> None:
        vocab_size, longest = self._runner.vocab_size, self._runner.info.max_model_len
        sampling = request.sampling
        if not request.prompt:
            raise SessionFault(Code.INVALID_ARGUMENT, "prompt: empty, at least one token needed")
        if max(tokens) >= vocab_size or min(tokens) < 0:
            raise SessionFault(Code.INVALID_ARGUMENT, f"prompt, output: token ids from 0 to {vocab_size - 1} needed")
        if len(tokens) > min(longest, self._slots.num_slots):
            raise SessionFault(
                Code.RESOURCE_EXHAUSTED,
                f"{len(tokens)} tokens given; the model takes {longest}, the KV cache {self._slots.num_slots}",
            )
        named = [*sampling.allowed_token_ids, *sampling.stop_token_ids, *sampling.logit_bias]
        if named and (max(named) >= vocab_size or min(named) < 0):
            raise SessionFault(Code.INVALID_ARGUMENT, f"sampling: token ids from 0 to {vocab_size - 1} needed")
        only_stops = set(sampling.allowed_token_ids) <= set(sampling.stop_token_ids)
        if sampling.min_new_tokens and sampling.allowed_token_ids and only_stops:
            raise SessionFault(Code.INVALID_ARGUMENT, "sampling: min_new_tokens leaves no allowed token")
        thresholds = (sampling.threshold_single, sampling.threshold_acc)
        if sampling.rule is VerificationRule.TARGET_ONLY and not all(0 < value <= 1 for value in thresholds):
            raise SessionFault(Code.INVALID_ARGUMENT, f"thresholds: {thresholds} given, above 0 and at most 1 needed")

    def _checked(self, tree: TreeRequest, *, repeated: bool) -> Session:
        session = self._sessions.get(tree.key)
        if session is None or session.epoch < tree.epoch:
            raise SessionFault(Code.NOT_FOUND, "the session is not open here under this epoch: open it again")
        if session.epoch > tree.epoch:
            raise SessionFault(Code.FAILED_PRECONDITION, f"epoch {tree.epoch} is over: {session.epoch} is open")
        if repeated:
            raise SessionFault(Code.INVALID_ARGUMENT, "the session stands in the batch more than once")
        if tree.length > len(session.tokens):
            raise SessionFault(
                Code.FAILED_PRECONDITION,
                f"length {tree.length} given, {len(session.tokens)} tokens are here: open the session again",
            )
        if tree.length < session.prompt_len:
            raise SessionFault(
                Code.INVALID_ARGUMENT, f"length {tree.length} given, the prompt alone has {session.prompt_len} tokens"
            )
        if tree.length >= session.limit:
            raise SessionFault(
                Code.INVALID_ARGUMENT, f"length {tree.length} given, the session ends at {session.limit}"
            )
        if tree.length > self._slots.num_slots:
            raise SessionFault(
                Code.RESOURCE_EXHAUSTED, f"{tree.length} tokens, the KV cache holds {self._slots.num_slots}"
            )
        check_tree(tree, session.sampling.rule, self._runner.vocab_size)
        if tree.length < len(session.tokens):
            session.truncate(tree.length)
            self._slots.truncate(session.row, session.root_index)
        return session

    def _commit(self, session: Session, verdict: Verdict) -> TreeResult:
        """Commits what one session's walk emits."""
        room = session.limit - len(session.tokens)
        accepted, emitted = emit(verdict.walk, stop_token_ids=session.stop_token_ids, room=room)
        logprobs: TokenLogprobs | None = None
        if session.sampling.logprobs is not None:
            # The j-th emitted token was chosen at the root (j = 0) or at the (j-1)-th accepted node.
            chosen_at = [0, *accepted][: len(emitted)]
            logprobs = token_logprobs(verdict.raw[chosen_at], emitted, session.sampling.logprobs)
        # The root and all emitted tokens but the last, which is the next root, keep their KV.
        self._slots.retain(session.row, session.root_index, [0, *accepted[: len(emitted) - 1]])
        session.tokens.extend(emitted)
        return TreeResult(outcome=Outcome.ACCEPTED, accepted_nodes=accepted, token_ids=emitted, logprobs=logprobs)


def _shared_prefix(held: Iterable[int], given: Iterable[int]) -> int:
    count = 0
    for old, new in zip(held, given, strict=False):
        if old != new:
            break
        count += 1
    return count
