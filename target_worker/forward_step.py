"""One forward of the target and what it decides: rows of every session's work, choices, walks.

A forward is started and finished apart, so that the host can prepare the next one in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.batch import BatchBuilder
from outrider.engine.kv_slots import SlotTable
from outrider.engine.model_runner import ModelRunner
from outrider.target_worker.logits import process
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.planning import Work
from outrider.target_worker.rules import verify
from outrider.target_worker.walk import Walk
from outrider.tree import ancestor_masks


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What a forward decides for one session.

    Attributes:
        walk: down its tree.
        raw: [1 + n, V] the logits of its root and nodes before any processor.
    """

    walk: Walk
    raw: torch.Tensor


class ForwardStep:
    """A forward under way.

    Args:
        begin_ns: when it was started.
        logits: [T, V] float32 of the rows that verify.
        trees: what verifies, by id of its work, in the order of the logits.

    Attributes:
        forward_ns: how long forward, choices and walks took; 0 until `finish`.
    """

    def __init__(self, begin_ns: int, logits: torch.Tensor, trees: dict[int, NodeRows]) -> None:
        self._begin_ns = begin_ns
        self._logits = logits
        self._trees = trees
        self.forward_ns = 0

    def finish(self) -> dict[int, Verdict]:
        """Waits for the forward; the verdicts of the works that verify, by their id."""
        verdicts: dict[int, Verdict] = {}
        if self._trees:
            parts = list(self._trees.values())
            raw = process(self._logits, parts)
            first = 0
            for (work, tree), walk in zip(self._trees.items(), verify(self._logits, parts), strict=True):
                verdicts[work] = Verdict(walk=walk, raw=raw[first : first + tree.count])
                first += tree.count
        if self._begin_ns:
            self.forward_ns = time.perf_counter_ns() - self._begin_ns
        return verdicts


def start_forward(runner: ModelRunner, works: Sequence[Work]) -> ForwardStep:
    """Starts the forward of all works that have rows; their slots are reserved."""
    active = [work for work in works if work.rows]
    if not active:
        return ForwardStep(0, torch.empty(0), {})
    builder = BatchBuilder()
    trees = {id(work): _node_rows(work) for work in active if work.verifies}
    for work in active:
        _add_rows(builder, work, trees.get(id(work)), runner.slots)
    begin_ns = time.perf_counter_ns()
    return ForwardStep(begin_ns, runner.forward(builder.build()), trees)


def _node_rows(work: Work) -> NodeRows:
    """The rows that verify: the root and the tree's nodes, or the root alone where the tree was cut to it."""
    if not work.nodes or work.tree is None:
        return NodeRows.of(work.session, (), ())
    return NodeRows.of(work.session, work.tree.tokens, work.tree.parents, work.tree.distributions)


def _add_rows(builder: BatchBuilder, work: Work, tree: NodeRows | None, slots: SlotTable) -> None:
    session = work.session
    first_index = slots.length(session.row) - work.rows
    if tree is None or not tree.tokens:
        chain = session.tokens[first_index : first_index + work.prefill + work.verifies]
        builder.add_chain(session.row, chain, first_index, work.verifies)
        return
    root = session.root_index
    if work.prefill:
        builder.add_chain(session.row, session.tokens[first_index:root], first_index, False)
    # Nodes past the session's end are never accepted: their positions stay within what the model knows.
    positions = np.minimum(root + tree.depths, session.limit - 1).tolist()
    builder.add_tree(
        session.row,
        tree_start=root,
        token_ids=[session.tokens[root], *tree.tokens],
        positions=positions,
        masks=ancestor_masks(tree.parents),
        write_indices=range(root, root + tree.count),
    )
