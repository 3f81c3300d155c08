"""One forward of the target and what it decides: rows of every session's work, choices, walks.

A forward is started and finished apart, so that the host can prepare the next one in between. Where the device chooses
and walks by itself, only tokens and paths come back. Where a session's logits are read or changed before the choice
(processors, log probabilities, another rule than coupled), they are taken from the forward and judged here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.engine.batch import BatchBuilder, ForwardBatch
from outrider.engine.kv_slots import SlotTable
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_runner import LaunchedStep
from outrider.engine.step_trees import TreeColumns
from outrider.target_worker.forest import Forest, decided_ends
from outrider.target_worker.logits import needs_logits, process, token_logprobs
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.planning import Work
from outrider.target_worker.rules import verify
from outrider.target_worker.sessions import TokenLogprobs
from outrider.target_worker.walk import Walk, completed, walks_of

NO_LOGITS = torch.empty(0)
"""Of a session whose logits nobody asks for."""


@dataclass(kw_only=True, eq=False, slots=True)
class Verdict:
    """What a forward decides for one session.

    Attributes:
        walk: down its tree.
        raw: [1 + n, V] the logits of its root and nodes before any processor; empty where nobody asks for them.
        drafted: nodes of its that the device had drafted.
        drafts: whether the device has drafted what may follow the whole walk.
    """

    walk: Walk
    raw: torch.Tensor = field(default_factory=lambda: NO_LOGITS)
    drafted: int = 0
    drafts: bool = False

    def logprobs(self, nodes: Sequence[int], token_ids: Sequence[int], count: int) -> TokenLogprobs:
        """Log probabilities under the raw softmax.

        Args:
            nodes: [m] where tokens were chosen, 0 the root.
            token_ids: [m] the tokens.
            count: alternatives of each.
        """
        return token_logprobs(self.raw[list(nodes)], token_ids, count)


class ForwardStep:
    """A forward under way, whose logits are judged when it is finished.

    Args:
        begin_ns: when it was started, by `time.perf_counter_ns`.
        trees: what verifies, by id of its work, in the order of the logits.
        logits: [T, V] float32 of the rows that verify; None where there is no forward.
        tokens: rows of the forward.

    Attributes:
        tokens: as given.
        forward_ns: how long forward, choices and walks took; 0 until `finish`.
        may_overlap: whether another step may be started before this one is finished, and gains by it.
        first_rows: by id of a work, the first row of the forward that is its.
    """

    may_overlap = False

    def __init__(self, begin_ns: int, trees: dict[int, NodeRows], logits: torch.Tensor | None, *, tokens: int) -> None:
        self._begin_ns, self._trees, self._logits = begin_ns, trees, logits
        self.tokens = tokens
        self.forward_ns = 0
        self.first_rows: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait for the device."""
        return True

    def finish(self) -> dict[int, Verdict]:
        """Waits for the forward; the verdicts of the works that verify, by their id."""
        if self._logits is None:
            return {}
        verdicts: dict[int, Verdict] = {}
        if self._trees:
            parts = list(self._trees.values())
            raw = process(self._logits, parts)
            first = 0
            for (work, tree), walk in zip(self._trees.items(), verify(self._logits, parts), strict=True):
                verdicts[work] = Verdict(walk=walk, raw=raw[first : first + tree.count])
                first += tree.count
        self.forward_ns = time.perf_counter_ns() - self._begin_ns
        return verdicts


class WalkedStep(ForwardStep):
    """A forward whose walks the device does by itself.

    Args:
        begin_ns: when it was started, by `time.perf_counter_ns`.
        trees: what verifies, by id of its work.
        launched: the forward.
        tokens: rows of the forward.
        may_overlap: whether nothing of the forward is needed after it but its walks.
    """

    def __init__(
        self,
        begin_ns: int,
        trees: dict[int, NodeRows],
        launched: LaunchedStep,
        *,
        tokens: int,
        may_overlap: bool = True,
    ) -> None:
        super().__init__(begin_ns, trees, None, tokens=tokens)
        self._launched = launched
        self.may_overlap = may_overlap

    @property
    def is_done(self) -> bool:
        """As the base's."""
        return self._launched.is_done

    def finish(self) -> dict[int, Verdict]:
        """As the base's."""
        walks: list[Walk] = []
        if self._trees:
            answer = self._launched.result()
            walks = completed(walks_of(answer.tokens, answer.rows, answer.accepted), list(self._trees.values()))
        else:
            self._launched.wait()
        self.forward_ns = self._launched.device_ns()
        return {work: Verdict(walk=walk, raw=NO_LOGITS) for work, walk in zip(self._trees, walks, strict=True)}


def start_forward(runner: ModelRunner, works: Sequence[Work]) -> ForwardStep:
    """Starts the forward of all works that have rows; their slots are reserved."""
    active = [work for work in works if work.rows]
    if not active:
        return ForwardStep(0, {}, None, tokens=0)
    step = _started(runner, active)
    ends = np.cumsum([work.rows for work in active]).tolist()
    step.first_rows = {id(work): end - work.rows for work, end in zip(active, ends, strict=True)}
    return step


def _started(runner: ModelRunner, active: Sequence[Work]) -> ForwardStep:
    begin_ns = time.perf_counter_ns()
    steps = runner.steps
    trees = {id(work): _node_rows(work) for work in active if work.verifies}
    parts = list(trees.values())
    tokens = sum(work.rows for work in active)
    if steps is not None and needs_logits(parts):
        steps = None
    if steps is not None and steps.takes_trees and all(work.verifies and not work.prefill for work in active):
        launched = steps.launch(steps.stage_trees(_columns(parts)))
        return WalkedStep(begin_ns, trees, launched, tokens=tokens, may_overlap=not runner.is_tapped)
    forest = Forest(parts) if parts else None
    batch = _batch(active, forest, runner.slots)
    if steps is None:
        return ForwardStep(begin_ns, trees, runner.forward(batch), tokens=tokens)
    launched = steps.launch(steps.stage(batch, None if forest is None else forest.choices()))
    return WalkedStep(begin_ns, trees, launched, tokens=tokens, may_overlap=not runner.is_tapped)


def _node_rows(work: Work) -> NodeRows:
    """The rows that verify: the root and the tree's nodes, or the root alone where the tree was cut to it."""
    if not work.nodes or work.tree is None:
        return NodeRows.of(work.session, (), ())
    return NodeRows.of(work.session, work.tree.tokens, work.tree.parents, work.tree.distributions)


def _columns(trees: Sequence[NodeRows]) -> TreeColumns:
    """The rows of trees alone: the usual step."""
    tokens: list[int] = []
    parents: list[int] = []
    for tree in trees:
        tokens.append(tree.session.tokens[-1])
        tokens.extend(tree.tokens)
        parents.append(0)
        parents.extend(tree.parents)
    sessions = [tree.session for tree in trees]
    return TreeColumns(
        rows=[session.row for session in sessions],
        roots=[len(session.tokens) - 1 for session in sessions],
        # Nodes past the session's end are never accepted: their positions stay within what the model knows.
        lasts=[session.limit - 1 for session in sessions],
        counts=[len(tree.tokens) + 1 for tree in trees],
        tokens=tokens,
        parents=parents,
        records=b"".join([session.sampling.record for session in sessions]),
        decided=decided_ends(trees),
    )


def _batch(works: Sequence[Work], forest: Forest | None, slots: SlotTable) -> ForwardBatch:
    """The rows of all works, in their order."""
    builder = BatchBuilder()
    place = 0
    for work in works:
        session = work.session
        first_index = slots.length(session.row) - work.rows
        if not work.nodes:
            end = first_index + work.prefill + work.verifies
            builder.add_chain(session.row, session.tokens[first_index:end], first_index, work.verifies)
        else:
            assert forest is not None
            if work.prefill:
                builder.add_chain(session.row, session.tokens[first_index : session.root_index], first_index, False)
            _add_tree(builder, work, forest, forest.rows_of(place))
        place += work.verifies
    return builder.build()


def _add_tree(builder: BatchBuilder, work: Work, forest: Forest, rows: slice) -> None:
    session = work.session
    root, count = session.root_index, rows.stop - rows.start
    builder.add_tree(
        session.row,
        tree_start=root,
        token_ids=forest.tokens[rows].tolist(),
        # Nodes past the session's end are never accepted: their positions stay within what the model knows.
        positions=np.minimum(root + forest.depths[rows], session.limit - 1),
        masks=forest.masks[rows],
        write_indices=range(root, root + count),
        key_len=root + count,
    )
