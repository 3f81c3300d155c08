"""One-graph rounds of a target: which sessions take them, what of them the host stages and what it reads back.

A round verifies what the device has drafted for each session in the round before, and drafts on, in one graph. The
host does not know the nodes: it reserves slots for all of them, and gives back what the walks leave.

Who takes which way is decided in `RoundDraft.split`, a session at a time. A round takes every session that asks for
its resident candidates and whose prompt is computed, and with them those that ask for a plain step. The others (a
prompt that is still to be computed, a tree that was sent, a grammar, the rules with coins, lists of tokens too long for
a round) take an ordinary step, launched in front of the round. A session that goes on with a round after that has no
candidates at first: its row verifies the root alone, and is filled up.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.engine.kv_slots import SlotTable
from outrider.engine.one_graph_buckets import RoundNeeds
from outrider.engine.one_graph_runner import LaunchedRound, RoundRunner
from outrider.engine.one_graph_shape import RoundShape
from outrider.engine.one_graph_staging import RoundAnswer, RoundColumns
from outrider.target_worker.forward_step import NO_LOGITS, ForwardStep, Verdict
from outrider.target_worker.one_graph_lists import NO_NEEDS, SessionNeeds, lists_of, needs_of
from outrider.target_worker.planning import Work
from outrider.target_worker.sessions import Session, TokenLogprobs, TreeRequest
from outrider.target_worker.walk import walks_of

NO_ROUND_NEEDS = RoundNeeds()
"""Of sessions that ask for nothing but choices."""

# Of a node whose token only the device knows.
_UNKNOWN = -1


@dataclass(kw_only=True, eq=False, slots=True)
class RoundVerdict(Verdict):
    """What a round decides for one session.

    Attributes:
        answer: of the round.
        row: of the round, that of the session's root.
    """

    answer: RoundAnswer
    row: int

    def logprobs(self, nodes: Sequence[int], token_ids: Sequence[int], count: int) -> TokenLogprobs:
        """As the base's; the device has taken them already."""
        rows = [self.row + node for node in nodes]
        answer = self.answer
        assert len(token_ids) == len(rows)
        return TokenLogprobs(
            token_logprobs=answer.token_logprobs[rows],
            top_token_ids=answer.top_token_ids[rows, :count].astype(np.int64),
            top_logprobs=answer.top_logprobs[rows, :count],
        )


class RoundStep(ForwardStep):
    """A round under way, and the ordinary step in front of it, if there is one.

    Args:
        works: of the round, in its order.
        known: whether the device held candidates of each.
        launched: the round.
        shape: of every session's tree.
        before: the ordinary step.
    """

    def __init__(
        self,
        works: Sequence[Work],
        known: Sequence[bool],
        launched: LaunchedRound,
        shape: RoundShape,
        before: ForwardStep | None,
    ) -> None:
        rows = len(works) * shape.rows + (0 if before is None else before.tokens)
        super().__init__(time.perf_counter_ns(), {}, None, tokens=rows)
        self._works, self._known, self._launched, self._shape, self._before = works, known, launched, shape, before
        self.may_overlap = before is None or before.may_overlap
        self.first_rows = {} if before is None else before.first_rows

    @property
    def is_done(self) -> bool:
        """As the base's."""
        return (self._before is None or self._before.is_done) and self._launched.is_done

    def finish(self) -> dict[int, Verdict]:
        """As the base's."""
        verdicts: dict[int, Verdict] = {} if self._before is None else self._before.finish()
        answer = self._launched.result()
        step = answer.step
        walks = walks_of(step.tokens, step.rows, step.accepted)
        nodes, row = self._shape.nodes, 0
        for work, walk, known in zip(self._works, walks, self._known, strict=True):
            verdicts[id(work)] = RoundVerdict(
                walk=walk, raw=NO_LOGITS, drafted=nodes if known else 0, drafts=True, answer=answer, row=row
            )
            row += nodes + 1
        self.forward_ns = self._launched.device_ns() + (0 if self._before is None else self._before.forward_ns)
        return verdicts


class RoundDraft:
    """Sends sessions through one-graph rounds.

    Args:
        runner: of the rounds.
        slots: the slot table.
    """

    def __init__(self, runner: RoundRunner, slots: SlotTable) -> None:
        self.runner, self._slots = runner, slots
        self._parents = runner.shape.parents

    def alone(self, asked: Sequence[tuple[Session, TreeRequest]]) -> list[Work] | None:
        """The works of a batch that a round takes as it is, their slots reserved: the usual case, in little time.

        Args:
            asked: sessions whose prompts are computed, and what is asked of each.

        Returns:
            None where a session asks for something else, or not all fit: then there is something to plan.
        """
        shape, slots = self.runner.shape, self._slots
        fits = 0 < len(asked) <= self.runner.ladder.max_sessions and len(asked) * shape.slots <= slots.free
        if not fits or not all(tree.resident and session.only_chooses and not tree.tokens for session, tree in asked):
            return None
        works = []
        for session, tree in asked:
            context = slots.length(session.row)
            slots.extend(session.row, shape.slots)
            works.append(Work(session=session, tree=tree, context=context, verifies=True, nodes=shape.nodes))
        return works

    def expanded(self, tree: TreeRequest, session: Session) -> TreeRequest:
        """A request for resident candidates, or for a plain step, as the planner counts it: with nodes of no token."""
        if tree.tokens or needs_of(session, self.runner.shape) is None:
            return tree
        return replace(tree, tokens=(_UNKNOWN,) * len(self._parents), parents=self._parents)

    def split(self, works: Sequence[Work]) -> tuple[list[Work], RoundNeeds, list[Work]]:
        """Which works a round takes, what they ask for together, and the others; slots follow the decision.

        A round is worth its launch where somebody asks for resident candidates; without that, plain steps stay plain.
        """
        taken: list[Work] = []
        total = NO_NEEDS
        wanted = any(work.nodes and work.tree is not None and work.tree.resident for work in works)
        for work in works:
            needs = self._needs(work) if wanted and len(taken) < self.runner.ladder.max_sessions else None
            if needs is None or not (joined := total.joined(needs)).of_round.fits or not self._reserve(work):
                self._leave(work)
                continue
            total = joined
            taken.append(work)
        inside = {id(work) for work in taken}
        return taken, total.of_round, [work for work in works if id(work) not in inside]

    def launch(self, works: Sequence[Work], needs: RoundNeeds, before: ForwardStep | None) -> RoundStep:
        """Starts a round of works that `split` has chosen."""
        sessions = [work.session for work in works]
        known = [
            work.tree is not None and work.tree.resident and work.session.drafted_at == len(work.session.tokens)
            for work in works
        ]
        shape = self.runner.shape
        columns = RoundColumns(
            rows=[session.row for session in sessions],
            roots=[session.root_index for session in sessions],
            # Nodes past the session's end are never accepted: their positions stay within what the model knows.
            lasts=[session.limit - 1 for session in sessions],
            tokens=[session.tokens[-1] for session in sessions],
            is_known=known,
            records=b"".join([session.sampling.record for session in sessions]),
            lists=lists_of(sessions, shape, needs),
        )
        return RoundStep(works, known, self.runner.launch(columns, needs), shape, before)

    def _needs(self, work: Work) -> SessionNeeds | None:
        """None where the work is nothing for a round."""
        if not _is_expanded(work) or not work.nodes or work.prefill or not work.verifies:
            return None
        return needs_of(work.session, self.runner.shape)

    def _reserve(self, work: Work) -> bool:
        """Slots for the head's own rows, behind those of the tree."""
        more = self.runner.shape.slots - self.runner.shape.rows
        if more > self._slots.free:
            return False
        if more:
            self._slots.extend(work.session.row, more)
        return True

    def _leave(self, work: Work) -> None:
        """Makes a work plain again that was expanded in vain."""
        if not _is_expanded(work):
            return
        row = work.session.row
        self._slots.truncate(row, self._slots.length(row) - work.nodes)
        work.nodes = 0


def _is_expanded(work: Work) -> bool:
    return work.tree is not None and len(work.tree.tokens) > 0 and work.tree.tokens[0] == _UNKNOWN
