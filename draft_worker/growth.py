"""Best-first growth of the trees of all sessions: what one draft step computes, and what it adds.

A step is one forward over pending chains (prompts, gaps, final tokens) and over the frontier nodes of highest path
value, whichever session they belong to. Their logits give children by the session's rule: under the default one the
k best under log q + G, with the noise the target will choose with. The children's estimates of acceptance come from the
calibration, and a node's path value is the product along its path.

A step is begun and finished. In between, while the device works, sessions may be opened, committed to and closed: what
a commit leaves of the nodes in flight gets its children, and the others' are dropped. Where the device works on its
own, another step may be begun meanwhile, and follows it without a gap; steps are finished in their order.

Knows neither proto nor grpc; one thread calls it.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider import acceptance_calibration
from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.draft_worker import draft_tree
from outrider.draft_worker.choice import ChildChooser
from outrider.draft_worker.draft_forest import DraftForest
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.growth_launch import FoundChildren, GrowthFlight, GrowthLauncher, Runner
from outrider.draft_worker.growth_step import GrowthStep
from outrider.draft_worker.session import DraftSession, SessionStart
from outrider.draft_worker.session_checks import CommitMismatch, check_commit, check_start
from outrider.draft_worker.step_plan import StepPlan, StepPlanner
from outrider.engine.draft_buckets import words_per_mask
from outrider.engine.kv_slots import SlotTable
from outrider.errors import InvalidRequest, OutOfSlots, Superseded
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar

# Steps that may be under way: one that runs, and one that waits for the device.
_MOST_BEGUN = 2


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was begun.

    Attributes:
        step: what it will give.
        flight: its forward; None where it has none.
        since_ns: when it was begun.
    """

    step: GrowthStep
    flight: GrowthFlight | None
    since_ns: int


class TreeGrowth:
    """All sessions of a worker, grown step by step.

    Attributes:
        runner: the draft model.
        config: see there.
        calibration: of all sessions.
        steps: forwards so far.
        most_begun: steps that may be under way at a time, on a device that works on its own: 1 or 2, for only the
            nodes of the last one have their children promised, and credit set aside.
        wake: called, on any thread, when there may be something to do that no command tells of.
    """

    def __init__(self, runner: Runner, config: GrowthConfig) -> None:
        self.config = config
        self.calibration = AcceptanceCalibration(
            branching=max(config.branching, 2),
            prior_strength=config.prior_strength,
            decay=config.calibration_decay,
        )
        self.steps = 0
        self.most_begun = _MOST_BEGUN
        self.wake: Callable[[], None] = _nobody
        self.runner = runner
        chooser = ChildChooser(self.calibration, config, vocab_size=runner.vocab_size)
        model: Any = getattr(runner, "config", None)
        self._grammars = None if model is None else GrammarCompiler.of_checkpoint(model.model_path)
        # Those whose grammar was not compiled when last looked at.
        self._unready: set[tuple[int, int]] = set()
        self._launcher = GrowthLauncher(runner, chooser, max_nodes=config.max_live_nodes)
        # The oldest first.
        self._begun: deque[_Begun] = deque()
        # When the last step's children were there, and when it was over.
        self._collected_ns = self._finished_ns = 0
        # Open sessions whose next step hangs on what the last one gave.
        self._stepwise = 0
        # In the order they were opened.
        self._sessions: dict[tuple[int, int], DraftSession] = {}
        self._forest = DraftForest(
            len(runner.slots.lengths), children=config.branching, nodes=64 * words_per_mask(config.max_live_nodes)
        )
        self._planner = StepPlanner(self._sessions.values(), self._forest, runner.slots, config)

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def slots(self) -> SlotTable:
        """Where the KV of all sessions lies."""
        return self.runner.slots

    def session(self, key: tuple[int, int]) -> DraftSession | None:
        """The open session of this key."""
        return self._sessions.get(key)

    def open(self, start: SessionStart) -> DraftSession:
        """Opens a session; one of the same key and an older epoch is replaced.

        Raises:
            Superseded: the session is open under this epoch or a newer one.
            InvalidRequest: token ids or lengths that the model does not take.
            OutOfSlots: there is no room for it, now or ever.
        """
        held = self._sessions.get(start.key)
        if held is not None:
            if start.epoch <= held.epoch:
                raise Superseded(f"epoch {start.epoch} given, epoch {held.epoch} is open")
            self._remove(held)
        check_start(start, vocab_size=self.runner.vocab_size, max_model_len=self.config.max_model_len)
        length = len(start.prompt) + len(start.output)
        if length > self.slots.num_slots:
            raise self._too_long(length)
        live = min(start.limits.max_live_nodes, self.config.max_live_nodes)
        start = replace(start, limits=replace(start.limits, max_live_nodes=live))
        session = self._sessions[start.key] = DraftSession(
            start, self.slots, self._forest, max_model_len=self.config.max_model_len
        )
        self._stepwise += session.is_stepwise
        if start.sampling.grammar and self._grammars is not None:
            self._follow_grammar(session, self._grammars)
        return session

    def commit(self, key: tuple[int, int], epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Tokens that the target committed after the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            InvalidRequest: a token that this model does not have (the target's vocabulary may be padded wider); the
                session is closed.
            OutOfSlots: it has become longer than can ever have KV here; it is closed, for it would stay silent.
        """
        session = self._sessions.get(key)
        if session is None or session.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        try:
            check_commit(token_ids, vocab_size=self.runner.vocab_size)
            session.commit(position, token_ids, self.calibration)
        except (InvalidRequest, CommitMismatch):
            self._remove(session)
            raise
        if session.length > self.slots.num_slots:
            self._remove(session)
            raise self._too_long(session.length)

    def close(self, key: tuple[int, int], epoch: int) -> None:
        """Closes the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            self._remove(session)

    def close_owned(self, owner: Any) -> None:
        """Closes every session of an owner."""
        for session in [held for held in self._sessions.values() if held.owner is owner]:
            self._remove(session)

    def keys_of(self, owner: Any) -> set[tuple[int, int]]:
        """Keys of an owner's sessions."""
        return {key for key, session in self._sessions.items() if session.owner is owner}

    def warm_up(self) -> None:
        """Compiles and captures what steps need, on a device where that is done ahead."""
        config = self.config
        draft_tree.warm_up()
        acceptance_calibration.warm_up()
        self._launcher.warm_up(
            step_nodes=config.max_step_nodes,
            step_tokens=config.max_step_tokens,
            level_nodes=config.sync_step_nodes,
            sessions=self.slots.free_rows,
            cuts=config.graph_cuts,
        )

    def match(self, left_out: Container[tuple[int, int]] = ()) -> None:
        """A model grows by its steps alone; see `Growth`."""

    def step(self) -> GrowthStep | None:
        """Runs one forward; None if there is nothing to do until the next open, commit or close."""
        return self.finish() if self.begin() else None

    def begin(self, left_out: Container[tuple[int, int]] = ()) -> bool:
        """Starts a step; False if there is nothing to do until the next open, commit or close, or `finish`.

        Args:
            left_out: keys of sessions that have no part in it.
        """
        if not self.takes_another:
            return False
        before = None
        if self._begun:
            flight = self._begun[-1].flight
            assert flight is not None
            before = flight.plan
            if self._launcher.due is not None:
                return False
        since, flight = time.perf_counter_ns(), None
        step, plan = GrowthStep(), self._planner.plan(self._without_unready(left_out), before)
        for session in plan.stuck:
            _end_round(session, step)
        if plan.rows.num_rows:
            step.tokens, step.sessions = plan.rows.num_rows, plan.rows.num_sessions
            flight = self._launcher.launch(plan)
            self.steps += 1
        elif not step.has_growth:
            return False
        self._begun.append(_Begun(step, flight, since))
        return True

    @property
    def num_begun(self) -> int:
        """Steps that were begun and are not finished."""
        return len(self._begun)

    @property
    def takes_another(self) -> bool:
        """Whether a step may be begun now: none is under way, or one that need not be finished first."""
        if not self._begun:
            return True
        flight = self._begun[-1].flight
        return (
            len(self._begun) < self.most_begun
            and self._launcher.queues
            and not self._stepwise
            and flight is not None
            and flight.plan.is_ranked
        )

    @property
    def overlaps(self) -> bool:
        """Whether the device works on its own between `begin` and `finish`."""
        return self._launcher.overlaps

    @property
    def step_tokens(self) -> int:
        """Rows of the forward that was begun first; 0 where none was."""
        return self._begun[0].step.tokens if self._begun else 0

    @property
    def expected_end_ns(self) -> int:
        """When the forward that was begun first should end, by `time.perf_counter_ns`."""
        flight = self._begun[0].flight if self._begun else None
        return 0 if flight is None else max(flight.expected_end_ns, self._collected_ns + flight.device_ns)

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        flight = self._begun[0].flight if self._begun else None
        return flight is None or flight.is_done()

    def finish(self) -> GrowthStep:
        """The step that was begun first, with its nodes."""
        begun = self._begun.popleft()
        step, flight = begun.step, begun.flight
        if flight is None:
            return step
        children = flight.collect()
        collected = time.perf_counter_ns()
        step.forward_ns = collected - max(flight.begun_ns, self._collected_ns)
        self._collected_ns = collected
        self._add(flight.plan, children, step)
        finished = time.perf_counter_ns()
        step.step_ns = finished - max(begun.since_ns, self._finished_ns)
        self._finished_ns = finished
        return step

    def _add(self, plan: StepPlan, found: FoundChildren, step: GrowthStep) -> None:
        """Gives the nodes that are still there their children."""
        if not len(plan.nodes):
            return
        for (session, node), q in zip(plan.parents(), found.distributions, strict=True) if found.distributions else ():
            if q is not None and not node.is_dead:
                session.tree.distributions[node.serial] = q
        grown = self._forest.grow(
            plan.nodes,
            [count for _, count in plan.spans],
            found.tokens,
            found.acceptance,
            found.buckets,
            learned=found.learned,
            least=self.config.min_acceptance,
        )
        sessions = [session for session, _ in plan.spans]
        distributions = [
            q for q, count in zip(found.distributions, grown.made, strict=True) for _ in range(count)
        ] if found.distributions else []  # fmt: skip
        step.add_children(sessions, grown, distributions)
        for session, expanded in zip(sessions, grown.expanded, strict=True):
            if session.is_sync and expanded:
                _end_level(session, step)

    def _too_long(self, length: int) -> OutOfSlots:
        return OutOfSlots(f"{length} tokens given, {self.slots.num_slots} fit the draft's KV cache")

    def _follow_grammar(self, session: DraftSession, grammars: GrammarCompiler) -> None:
        """The session grows once its grammar is compiled; the others do not wait for that."""
        sampling = session.sampling
        compiled = grammars.start(sampling.grammar, sampling.grammar_end_ids, self.wake)
        session.grammar = SessionGrammar(compiled, sampling.grammar_end_ids)
        if not session.grammar.is_ready:
            self._unready.add(session.key)

    def _without_unready(self, left_out: Container[tuple[int, int]]) -> Container[tuple[int, int]]:
        """`left_out`, and the sessions whose grammar is still being compiled."""
        for key in list(self._unready):
            session = self._sessions.get(key)
            if session is None or session.grammar is None or session.grammar.is_ready:
                self._unready.discard(key)
        if not self._unready:
            return left_out
        return self._unready | {key for key in self._sessions if key in left_out}

    def _remove(self, session: DraftSession) -> None:
        session.close()
        del self._sessions[session.key]
        self._stepwise -= session.is_stepwise


def _nobody() -> None:
    """Wakes nobody: whoever drives the growth by hand asks again."""


def _end_level(session: DraftSession, step: GrowthStep) -> None:
    """Sync mode: after a step of the round's tree, either it can still become better or it is whole."""
    session.level += 1
    values, wanted = session.tree.path_values(), session.limits.sync_nodes
    # Children are worth at most their parent, so a parent below the last of the best adds nothing to them.
    session.least_value = float(np.partition(values, -wanted)[-wanted]) if len(values) >= wanted else 0.0
    if session.level >= session.limits.max_depth or session.tree.best_value <= session.least_value:
        _end_round(session, step)


def _end_round(session: DraftSession, step: GrowthStep) -> None:
    limits = session.limits
    step.add_nodes(session, session.tree.best_rows(limits.sync_nodes, max_depth=limits.max_depth))
    session.level = -1
