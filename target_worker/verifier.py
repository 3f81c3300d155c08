"""Verifies token trees: one forward, one walk a session (no proto, no grpc).

Under the default rule the choice at a node depends on the node's path, the session's parameters and its seed alone, so
whatever tree is submitted the emitted tokens are those of plain decoding; a tree only decides how many come out of a
step. Under the other rules (`outrider.target_worker.rules`) their distribution is that of plain decoding.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.model_runner import ModelCard, ModelRunner
from outrider.engine.one_graph_runner import RoundRunner
from outrider.engine.step_runner import StepRunner
from outrider.target_worker.forward_step import ForwardStep, Verdict, start_forward
from outrider.target_worker.one_graph import NO_ROUND_NEEDS, RoundDraft
from outrider.target_worker.open_sessions import OpenSessions
from outrider.target_worker.planning import Planner, Work, step_shape
from outrider.target_worker.prefill_pace import PrefillPace
from outrider.target_worker.resident import ResidentDraft
from outrider.target_worker.session_kv import SessionKv
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
from outrider.target_worker.step_cost import StepShape
from outrider.target_worker.tree_step import TreeStep, TreeSteps
from outrider.target_worker.walk import emit

_PREFILL_PART = 4


@dataclass(kw_only=True, eq=False, slots=True)
class StepResult:
    """Results in the order of the trees, and what the step cost (see StepReport in common.proto).

    Not frozen: a device waits while it is made.

    `step_ns` begins when the step before ended, if this one had begun by then.
    """

    results: list[TreeResult]
    step_ns: int
    forward_ns: int
    tokens: int
    sessions: int


@dataclass(kw_only=True, eq=False, slots=True)
class PendingStep:
    """A step whose forward has been started. Not frozen, as a `StepResult` is not.

    Attributes:
        begin_ns: when it began, by `time.perf_counter_ns`.
        results: of its trees, in their order; what the forward decides is still missing.
        places: the places in `results` of the first of `works`; empty where it is a usual step.
        works: what the forward computes; empty there.
        forward: the forward itself.
    """

    begin_ns: int
    results: list[TreeResult]
    places: Sequence[int] = ()
    works: Sequence[Work] = ()
    forward: ForwardStep | TreeStep


class Verifier:
    """The sessions of one target model. Not thread-safe: one thread calls it.

    Args:
        runner: the target.
        max_step_tokens: most rows of one verification: nodes and roots, and prefill tokens beside them.
        max_prefill_tokens: most rows of a step that only prefills; default a quarter of the others'.
        prefill_slowdown: how much longer than its verification alone a step may take for the sake of prefill.
        rounds: runs one-graph rounds, where the target drafts by itself so.
        resident: drafts beside the target, where there is a head for it.

    Raises:
        ValueError: `max_step_tokens` or `max_prefill_tokens` below 1, or `prefill_slowdown` below 0.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_step_tokens: int,
        max_prefill_tokens: int | None = None,
        prefill_slowdown: float = 0.3,
        rounds: RoundDraft | None = None,
        resident: ResidentDraft | None = None,
    ) -> None:
        if max_prefill_tokens is None:
            max_prefill_tokens = -(-max_step_tokens // _PREFILL_PART)
        for name, value in (("max_step_tokens", max_step_tokens), ("max_prefill_tokens", max_prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name}: {value} given, at least 1 needed")
        if not prefill_slowdown >= 0:
            raise ValueError(f"prefill_slowdown: {prefill_slowdown} given, at least 0 needed")
        self._runner, self._rounds, self._resident = runner, rounds, resident
        self._slots = runner.slots
        self._max_rows = max(max_step_tokens, max_prefill_tokens)
        self._max_prefill_rows = max_prefill_tokens
        self._pace = PrefillPace(slowdown=prefill_slowdown, on_cpu=runner.config.device == "cpu")
        self._kv = SessionKv(
            runner.slots, remembers=runner.config.enable_prefix_caching, looks_ahead=resident is not None
        )
        self._planner = Planner(
            self._kv,
            self._pace.cost,
            max_tree_nodes=runner.config.max_tree_nodes,
            fills_graphs=runner.steps is not None,
        )
        self._sessions = OpenSessions(runner, self._kv)
        self._tree_steps = TreeSteps(runner, max_rows=self._max_rows)
        self._finish_ns = 0
        self._unlearned: tuple[StepShape, int] | None = None
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
    def slots_cached(self) -> int:
        """KV slots that no session holds, with KV that is remembered."""
        return self._slots.remembered

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
        """Whether `prefill` would have something to try, now or after `prefill_due_s`."""
        return any(not session.in_flight and self._kv.pending(session) > 0 for session in self._sessions.values())

    @property
    def prefill_due_s(self) -> float:
        """How long prefill should wait for a batch beside which it is cheap; 0.0 when none is expected."""
        self.learn()
        expected = any(session.in_flight or self._kv.pending(session) == 0 for session in self._sessions.values())
        return self._pace.due_s() if expected else 0.0

    @property
    def free_rows(self) -> int:
        """Sessions that can be opened at once."""
        return self._slots.free_rows

    def is_in_flight(self, key: SessionKey) -> bool:
        """Whether a step of the session has begun and is not finished."""
        return self._sessions.is_in_flight(key)

    def open(self, request: OpenRequest) -> None:
        """Opens a session, or replaces it: see `OpenSessions.open`.

        Raises:
            SessionFault: an older epoch, tokens or parameters out of range, no room.
        """
        self._sessions.open(request)

    def close(self, key: SessionKey, epoch: int) -> None:
        """Frees a session and its slots, after its step in flight; unknown ones and reopened ones stay as they are."""
        self._sessions.close(key, epoch)

    def forget(self) -> None:
        """Closes all sessions, none of which may be in flight, and remembers no KV: it is of weights that go."""
        self._sessions.forget()

    def reload(self, folder: Path) -> None:
        """Puts other weights in the place of those that the model runs with; see `forget`."""
        self.forget()
        self._runner.refill(folder)

    @property
    def goes_on_alone(self) -> bool:
        """Whether `begin` only launches: the step runs beside whatever the host does next."""
        return self._runner.device.type == "cuda"

    @property
    def may_compile(self) -> bool:
        """Whether a launch may have to wait for its kernel to be compiled, which takes seconds."""
        return self._runner.device.type == "cuda"

    @property
    def wants_capture(self) -> bool:
        """Whether steps would be faster after a `capture`, which takes about as long as some of them."""
        return any(steps is not None and steps.due is not None for steps in self._captured)

    def capture(self) -> None:
        """Captures the CUDA graphs that steps lacked most often; none may be in flight."""
        for steps in self._captured:
            if steps is not None and (due := steps.due) is not None:
                steps.capture(due)

    @property
    def _captured(self) -> Sequence[StepRunner | RoundRunner | None]:
        return self._runner.steps, None if self._rounds is None else self._rounds.runner

    def step(self, trees: Sequence[TreeRequest]) -> StepResult:
        """Verifies a batch of trees in one forward and commits what it accepts.

        Sessions are independent: a fault of one is its own result, and closes it.
        """
        return self.finish(self.begin(trees))

    def begin(self, trees: Sequence[TreeRequest]) -> PendingStep:
        """Plans a step, reserves its slots and starts its forward; `finish` must follow.

        Until then what stands in it, the sessions whose prefill it moves as well, is left out of other steps (their
        trees are deferred), is not preempted, and must not be reopened.
        """
        return self._begin(trees, self._max_rows, None)

    def begin_prefill(self) -> PendingStep:
        """The same with pending prefill alone, oldest session first.

        It takes fewer rows than a step may, and little longer than a verification where sessions are running, so that a
        batch that arrives meanwhile does not wait for long.
        """
        self.learn()
        return self._begin([], self._max_prefill_rows, self._pace.chunk_ns())

    def prefill(self) -> int:
        """One forward of pending prefill alone; the rows it computed."""
        return self.finish(self.begin_prefill()).tokens

    def finish(self, pending: PendingStep) -> StepResult:
        """Waits for the forward and commits what the walks accept.

        Raises:
            WorkerUnavailable: a process that shares the model was lost; what the forward left is void.
        """
        self.learn()
        if isinstance(pending.forward, TreeStep):
            return self._finish_trees(pending, pending.forward)
        results = pending.results
        with self._runner.ranks.guard():
            judged = pending.forward.finish()
        for work in pending.works:
            work.session.in_flight = work.session.in_flight and not work.rows
        for place, work in zip(pending.places, pending.works, strict=False):
            verdict = judged.get(id(work))
            results[place] = DEFERRED if verdict is None else self._commit(work.session, verdict)
        if self._resident is not None:
            asked = [results[place] for place in pending.places]
            for place, result in zip(
                pending.places, self._resident.follow(pending.works, asked, pending.forward.first_rows), strict=True
            ):
                results[place] = result
        for work in pending.works:
            self._settle(work)
        return self._finished(
            pending,
            results,
            step_shape(pending.works),
            tokens=sum(work.rows for work in pending.works),
            sessions=sum(work.rows > 0 for work in pending.works),
        )

    def _finish_trees(self, pending: PendingStep, step: TreeStep) -> StepResult:
        results = self._tree_steps.finish(step)
        for session in step.sessions:
            if session.closing:
                self.close(session.key, session.epoch)
        shape = StepShape(verify_rows=step.tokens, keys=sum(step.columns.roots))
        return self._finished(pending, results, shape, tokens=step.tokens, sessions=len(step.sessions))

    def _finished(
        self, pending: PendingStep, results: list[TreeResult], shape: StepShape, *, tokens: int, sessions: int
    ) -> StepResult:
        self.steps += 1
        begin_ns, self._finish_ns = max(pending.begin_ns, self._finish_ns), time.perf_counter_ns()
        step_ns = self._finish_ns - begin_ns
        self._unlearned = shape, step_ns
        return StepResult(
            results=results,
            step_ns=step_ns,
            forward_ns=pending.forward.forward_ns,
            tokens=tokens,
            sessions=sessions,
        )

    def learn(self) -> None:
        """Learns what the step cost that was finished last: what a usual step does not wait for, and others begin with.

        It happens by itself before it is needed; whoever has just begun a step has the time for it, and for what the
        step after that one will need.
        """
        self._tree_steps.look_ahead()
        if self._unlearned is not None:
            shape, step_ns = self._unlearned
            self._unlearned = None
            self._pace.note(shape, step_ns, ended_ns=self._finish_ns)

    def _begin(self, trees: Sequence[TreeRequest], max_rows: int, chunk_ns: float | None) -> PendingStep:
        begin_ns = time.perf_counter_ns()
        if self._resident is None and not self._planner.is_waited_for:
            usual = self._tree_steps.begin(trees, self._sessions)
            if usual is not None:
                return PendingStep(begin_ns=begin_ns, results=usual.results, forward=usual)
        return self._planned(begin_ns, trees, max_rows, chunk_ns)

    def _planned(
        self, begin_ns: int, trees: Sequence[TreeRequest], max_rows: int, chunk_ns: float | None
    ) -> PendingStep:
        self.learn()
        results: list[TreeResult] = [DEFERRED] * len(trees)
        places: list[int] = []
        asked: list[tuple[Session, TreeRequest]] = []
        count = Counter(tree.key for tree in trees)
        rounds = self._rounds if any(tree.resident for tree in trees) else None
        for place, tree in enumerate(trees):
            if tree.settled is not None:
                results[place] = tree.settled
                continue
            try:
                if self._sessions.is_in_flight(tree.key):
                    continue
                session = self._sessions.checked(tree, repeated=count[tree.key] > 1)
                # Until its grammar is compiled nothing can be chosen; the others do not wait for that.
                if session.grammar is None or session.grammar.is_ready:
                    asked.append((session, tree))
                    places.append(place)
            except SessionFault as fault:
                results[place] = TreeResult(outcome=Outcome.ERROR, fault=fault)
        for place, result in enumerate(results):
            if result.outcome is Outcome.ERROR:
                self.close(trees[place].key, trees[place].epoch)
        works = self._round_alone(asked, rounds)
        if rounds is not None and works is not None:
            forward = rounds.launch(works, NO_ROUND_NEEDS, None)
        else:
            if rounds is not None:
                asked = [
                    (session, rounds.expanded(tree, session) if self._kv.pending(session) == 0 else tree)
                    for session, tree in asked
                ]
            works = self._planner.plan(asked, self._sessions.values(), max_rows=max_rows, chunk_ns=chunk_ns)
            forward = self._start(works, rounds)
        for work in works:
            work.session.in_flight = work.rows > 0
        return PendingStep(begin_ns=begin_ns, results=results, places=places, works=works, forward=forward)

    def _round_alone(
        self, asked: Sequence[tuple[Session, TreeRequest]], rounds: RoundDraft | None
    ) -> list[Work] | None:
        """The usual batch in one-graph mode, which leaves nothing to plan; None where something does."""
        if rounds is None or self._planner.is_waited_for or self.has_pending_prefill:
            return None
        return rounds.alone(asked)

    def _start(self, works: list[Work], rounds: RoundDraft | None) -> ForwardStep:
        """The forward of all works: a one-graph round, an ordinary step, or one behind the other."""
        taken, needs, others = ([], None, works) if rounds is None else rounds.split(works)
        ordinary = start_forward(self._runner, others)
        if rounds is None or needs is None or not taken:
            return ordinary
        return rounds.launch(taken, needs, ordinary if ordinary.tokens else None)

    def _settle(self, work: Work) -> None:
        """What follows from a finished step for one of its sessions."""
        session = work.session
        if not work.rows:
            return
        session.note_reached(self._kv.length(session))
        if work.prefill and self._kv.pending(session) == 0:
            self._kv.keep(session)
        if session.closing:
            self.close(session.key, session.epoch)

    def _commit(self, session: Session, verdict: Verdict) -> TreeResult:
        """Commits what one session's walk emits."""
        room = session.limit - len(session.tokens)
        accepted, emitted = emit(verdict.walk, stop_token_ids=session.stop_token_ids, room=room)
        if session.grammar is not None:
            if (fault := session.grammar.fault) is not None:
                self._slots.truncate(session.row, session.root_index)
                session.closing = True
                message = f"structured_outputs: {fault}"
                return TreeResult(outcome=Outcome.ERROR, fault=SessionFault(Code.INVALID_ARGUMENT, message))
            # As one without a tree would go on: with the token that was chosen last by what the grammar says.
            followed = session.grammar.followed(accepted)
            accepted, emitted = accepted[:followed], emitted[: followed + 1]
        logprobs: TokenLogprobs | None = None
        if session.sampling.logprobs is not None:
            # The j-th emitted token was chosen at the root (j = 0) or at the (j-1)-th accepted node.
            chosen_at = [0, *accepted][: len(emitted)]
            logprobs = verdict.logprobs(chosen_at, emitted, session.sampling.logprobs)
        # The root and all emitted tokens but the last, which is the next root, keep their KV.
        self._slots.retain(session.row, session.root_index, [0, *accepted[: len(emitted) - 1]])
        session.tokens.extend(emitted)
        if verdict.drafts and len(emitted) == len(verdict.walk.tokens):
            session.drafted_at = len(session.tokens)
        return TreeResult(
            outcome=Outcome.ACCEPTED,
            accepted_nodes=accepted,
            token_ids=emitted,
            logprobs=logprobs,
            cached_tokens=session.cached_tokens,
            drafted=verdict.drafted,
            ended=len(emitted) == room or emitted[-1] in session.stop_token_ids,
        )
