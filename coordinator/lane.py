"""One target worker as the scheduler sees it: its link, its sessions, and what its steps cost."""

import asyncio
from collections.abc import Sequence

from outrider.coordinator import clock
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.links import TargetLink
from outrider.coordinator.messages import SessionOpening, SpeculationMode, TreeSubmission, VerifyResult
from outrider.coordinator.selection import choose_nodes
from outrider.coordinator.session import Session, Submission
from outrider.tree import Node, parent_numbers
from outrider.v1 import registry_pb2


class TargetLane:
    """A target's sessions and the state of its verify loop."""

    def __init__(self, worker_id: str, link: TargetLink, limits: registry_pb2.WorkerLimits) -> None:
        self.worker_id = worker_id
        self.link = link
        self.limits = limits
        self.sessions: dict[int, Session] = {}
        self.in_flight: list[Session] = []
        self.cost = StepCost()
        self.steps = 0
        self.rate = 0.0
        """Tokens per nanosecond, an exponential average over rounds, waiting included."""
        self._overhead_ns = 0.0
        self._submitted_ns = self._last_result_ns = 0
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether one more session may be placed here."""
        return len(self.sessions) < self.limits.max_sessions

    def runnable(self) -> list[Session]:
        """Sessions that may be verified now, oldest first; those whose reader stalls rest."""
        now_ns = clock.now_ns()
        return [
            session
            for session in self.sessions.values()
            if not session.is_finished and not session.generation.is_stalled and session.rests_until_ns <= now_ns
        ]

    def notify(self) -> None:
        """Something has changed that the loop may be waiting for: growth, a new session, a reader that reads on."""
        self._changed.set()

    async def change(self, *, timeout_s: float | None = None) -> bool:
        """Waits for the next `notify`; False when it did not come in time."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def submit(self, sessions: Sequence[Session], *, waited_ns: int) -> "asyncio.Future[VerifyResult]":
        """Chooses the nodes of all sessions together and sends one batch."""
        candidates = [session.candidates(self.limits.max_tree_nodes) for session in sessions]
        chosen = choose_nodes(
            candidates,
            cost_ns=lambda rows: self.cost.predict_ns(rows) + self._overhead_ns,
            max_rows=self.limits.max_step_tokens,
        )
        chosen = self._with_fixed_trees(sessions, candidates, chosen)
        openings = [self._opening(session) for session in sessions if session.target_id != self.worker_id]
        self._submitted_ns = clock.now_ns()
        trees = [
            self._tree(session, nodes, waited_ns=waited_ns) for session, nodes in zip(sessions, chosen, strict=True)
        ]
        self.in_flight = list(sessions)
        return self.link.submit(trees, openings=openings)

    def _with_fixed_trees(
        self, sessions: Sequence[Session], candidates: Sequence[Sequence[Node]], chosen: Sequence[Sequence[Node]]
    ) -> list[Sequence[Node]]:
        """A fixed tree is what sync mode is for: it is submitted whole as long as the step has room for it."""
        room = self.limits.max_step_tokens - len(sessions) - sum(map(len, chosen))
        trees: list[Sequence[Node]] = []
        for session, nodes, head in zip(sessions, candidates, chosen, strict=True):
            more = len(nodes) - len(head) if session.mode is SpeculationMode.SYNC else 0
            trees.append(nodes if 0 < more <= room else head)
            room -= more if more <= room else 0
        return trees

    def _opening(self, session: Session) -> SessionOpening:
        opening = session.opening(max_live_nodes=0)
        session.target_id, session.target_epoch = self.worker_id, opening.epoch
        return opening

    def _tree(self, session: Session, nodes: Sequence[Node], *, waited_ns: int) -> TreeSubmission:
        session.submission = Submission(nodes=nodes, submitted_ns=self._submitted_ns, waited_ns=waited_ns)
        return TreeSubmission(
            session_id=session.session_id,
            epoch=session.target_epoch,
            length=len(session.token_ids),
            tokens=[node.token for node in nodes],
            parents=parent_numbers(nodes),
            distributions=[node.distribution for node in nodes] if session.mirror.is_chain else (),
        )

    def learn(self, result: VerifyResult, *, emitted: int) -> None:
        """Takes a round's times into the cost model and the rate."""
        now_ns = clock.now_ns()
        self.steps += 1
        self.cost.observe(result.step_tokens, result.step_ns)
        overhead_ns = max(0, now_ns - self._submitted_ns - result.step_ns)
        self._overhead_ns += 0.1 * (overhead_ns - self._overhead_ns)
        # After a pause the round began when it was submitted, not at the result before.
        began_ns = max(self._last_result_ns, self._submitted_ns - result.step_ns)
        round_rate = emitted / max(1, now_ns - began_ns)
        self.rate += (round_rate - self.rate) * (0.1 if self.rate else 1.0)
        self._last_result_ns = now_ns
