"""Best-first growth of the trees of all sessions: what one draft step computes, and what it adds.

A step is one forward over pending chains (prompts, gaps, final tokens) and over the frontier nodes of highest path
value, whichever session they belong to. Their logits give children by the session's rule: under the default one the
k best under log q + G, with the noise the target will choose with. The children's estimates of acceptance come from the
calibration, and a node's path value is the product along its path.

Knows neither proto nor grpc; one thread calls it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from outrider.draft_worker.calibration import AcceptanceCalibration
from outrider.draft_worker.choice import ChildChooser
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth_step import GrowthConfig, GrowthStep, SessionGrowth
from outrider.draft_worker.session import CommitMismatch, DraftSession, SessionStart
from outrider.draft_worker.step_plan import StepPlan, StepPlanner
from outrider.engine.batch import ForwardBatch
from outrider.engine.kv_slots import SlotTable
from outrider.errors import FieldViolation, InvalidRequest, OutOfSlots, Superseded


class Runner(Protocol):
    """What growth needs of a model; `outrider.engine.model_runner.ModelRunner` is one."""

    slots: SlotTable

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [R, V] float32."""
        ...


class TreeGrowth:
    """All sessions of a worker, grown step by step.

    Attributes:
        runner: the draft model.
        config: see there.
        calibration: of all sessions.
        steps: forwards so far.
    """

    def __init__(self, runner: Runner, config: GrowthConfig) -> None:
        self.config = config
        self.calibration = AcceptanceCalibration(
            branching=max(config.branching, 2),
            prior_strength=config.prior_strength,
            decay=config.calibration_decay,
        )
        self.steps = 0
        self.runner = runner
        self._chooser = ChildChooser(self.calibration, config, vocab_size=runner.vocab_size)
        # In the order they were opened.
        self._sessions: dict[tuple[int, int], DraftSession] = {}
        self._planner = StepPlanner(self._sessions.values(), runner.slots, config)

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

    def open(self, start: SessionStart) -> None:
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
        self._check(start)
        live = min(start.limits.max_live_nodes, self.config.max_live_nodes)
        start = replace(start, limits=replace(start.limits, max_live_nodes=live))
        self._sessions[start.key] = DraftSession(start, self.slots, max_model_len=self.config.max_model_len)

    def commit(self, key: tuple[int, int], epoch: int, position: int, token_ids: Sequence[int]) -> None:
        """Tokens that the target committed after the first `position`.

        Raises:
            Superseded: no session of this key is open under this epoch.
            CommitMismatch: the tokens do not continue the session; it is closed.
            InvalidRequest: a token that this model does not have (the target's vocabulary may be padded wider); the
                session is closed.
        """
        session = self._sessions.get(key)
        if session is None or session.epoch != epoch:
            raise Superseded(f"no session is open under epoch {epoch}")
        highest, vocab_size = max(token_ids, default=0), self.runner.vocab_size
        if highest >= vocab_size:
            self._remove(session)
            violation = FieldViolation("tokens", f"token {highest} given, ids below {vocab_size} needed")
            raise InvalidRequest([violation])
        try:
            session.commit(position, token_ids, self.calibration)
        except CommitMismatch:
            self._remove(session)
            raise

    def close(self, key: tuple[int, int], epoch: int) -> None:
        """Closes the session if it is open under this epoch or an older one."""
        session = self._sessions.get(key)
        if session is not None and session.epoch <= epoch:
            self._remove(session)

    def close_owned(self, owner: Any) -> None:
        """Closes every session of an owner."""
        for session in [held for held in self._sessions.values() if held.owner is owner]:
            self._remove(session)

    def step(self) -> GrowthStep | None:
        """Runs one forward; None if there is nothing to do until the next open, commit or close."""
        started = time.perf_counter_ns()
        step, plan = GrowthStep(), self._planner.plan()
        for session in plan.stuck:
            _end_round(session, step)
        if plan.builder.num_rows:
            self._run(plan, step)
            self.steps += 1
        elif not step.growths:
            return None
        step.step_ns = time.perf_counter_ns() - started
        return step

    def _run(self, plan: StepPlan, step: GrowthStep) -> None:
        started = time.perf_counter_ns()
        step.tokens, step.sessions = plan.builder.num_rows, plan.builder.num_sessions
        logits = self.runner.forward(plan.builder.build())
        if not plan.parents:
            step.forward_ns = time.perf_counter_ns() - started
            return
        children = self._chooser.choose(plan.parents, logits)
        step.forward_ns = time.perf_counter_ns() - started
        row = 0
        for session, count in plan.spans:
            made: list[DraftNode] = []
            for index in range(row, row + count):
                made += session.tree.grow(
                    plan.parents[index][1],
                    children[index].tokens,
                    children[index].acceptance,
                    children[index].buckets,
                    distribution=children[index].distribution,
                    min_acceptance=self.config.min_acceptance,
                )
            row += count
            if session.is_sync:
                _end_level(session, step)
            elif made:
                step.growths.append(_growth_of(session, made, complete=False))

    def _check(self, start: SessionStart) -> None:
        length, limit = len(start.prompt) + len(start.output), self.config.max_model_len
        violations = []
        if not start.prompt:
            violations.append(FieldViolation("prompt", "empty, at least one token needed"))
        if length > limit:
            violations.append(FieldViolation("prompt", f"{length} tokens with the output given, at most {limit} fit"))
        highest, vocab_size = max((*start.prompt, *start.output), default=0), self.runner.vocab_size
        if highest >= vocab_size:
            violations.append(FieldViolation("prompt", f"token {highest} given, ids below {vocab_size} needed"))
        if violations:
            raise InvalidRequest(violations)
        if length > self.slots.num_slots:
            raise OutOfSlots(f"{length} tokens given, {self.slots.num_slots} fit the draft's KV cache")

    def _remove(self, session: DraftSession) -> None:
        session.close()
        del self._sessions[session.key]


def _end_level(session: DraftSession, step: GrowthStep) -> None:
    """Sync mode: after a step of the round's tree, either it can still become better or it is whole."""
    session.level += 1
    values = sorted((node.path_value for node in session.tree.nodes()), reverse=True)
    wanted = session.limits.sync_nodes
    # Children are worth at most their parent, so a parent below the last of the best adds nothing to them.
    session.least_value = values[wanted - 1] if len(values) >= wanted else 0.0
    if session.level >= session.limits.max_depth or session.tree.best_value <= session.least_value:
        _end_round(session, step)


def _end_round(session: DraftSession, step: GrowthStep) -> None:
    limits = session.limits
    best = session.tree.best(limits.sync_nodes, max_depth=limits.max_depth)
    step.growths.append(_growth_of(session, best, complete=True))
    session.level = -1


def _growth_of(session: DraftSession, nodes: Sequence[Any], *, complete: bool) -> SessionGrowth:
    root = session.tree.root
    return SessionGrowth(
        owner=session.owner,
        session_id=session.key[1],
        epoch=session.epoch,
        as_of=session.length,
        node_ids=[node.node_id for node in nodes],
        parents=[0 if node.parent is root else node.parent.node_id for node in nodes],
        tokens=[node.token for node in nodes],
        acceptance=[node.acceptance for node in nodes],
        distributions=[node.distribution for node in nodes],
        complete=complete,
    )
