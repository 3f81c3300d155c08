"""Makes what is compiled ready before anybody waits for it.

numba compiles a function when it is first called with arguments of some kind, which takes seconds; what was compiled is
kept on disk beside the code or, where that cannot be written, in the user's cache folder (`NUMBA_CACHE_DIR`), and takes
a second to load. So all loops are called once, on a forest of their own.
"""

import functools
import logging
import time

import numpy as np

from outrider import succession_kernels
from outrider.compiled import IS_COMPILED
from outrider.coordinator.answer_kernels import is_usual
from outrider.coordinator.candidates import candidates
from outrider.coordinator.commit_kernels import Told, all_go_on, count_misses, note_commits
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.forest import Forest, Moves
from outrider.coordinator.growth_kernels import count_expanded, note_known
from outrider.coordinator.messages import Growth, GrowthBatch
from outrider.coordinator.mirror import TreeMirror, graft, move_roots
from outrider.coordinator.open_leaves import next_level, open_leaves, whole_next_level
from outrider.coordinator.selection import choose_counts
from outrider.coordinator.successor_kernels import number_new

logger = logging.getLogger(__name__)


@functools.cache
def warm_up() -> None:
    """Once a process; nothing where nothing is compiled."""
    if not IS_COMPILED:
        return
    began_s = time.perf_counter()
    succession_kernels.warm_up()
    forest, token_ids, most = Forest(), [1], np.array([1])
    mirror = TreeMirror(forest, token_ids)
    growth = Growth(
        session_id=1, epoch=1, as_of=1, node_ids=(1, 2), parents=(0, 1), tokens=(2, 3), acceptance=(0.5, 0.5)
    )
    batch, states = GrowthBatch.of([growth]), forest.rows
    is_usual(most, most, most, most, most, most, 1, 2)
    yes = np.array([True])
    all_go_on(most, most, most, most)
    note_commits(Told(*np.zeros((4, 1), np.int64)), most * 0, yes, most, most, most * 0, most, 1)
    count_misses(yes, yes, yes, yes, yes, most, most)
    count_expanded(batch.parents, np.array(batch.node_counts))
    note_known(most, most, states.unanswered, states.length, states.was_drafted, np.array([0]))
    graft("warm-up", batch, [mirror])
    found = candidates([mirror], most=[2], deepest=[2])
    whole_next_level(found, widths=np.ones(1), most=most, hit=0.5, price=0.0)
    next_level(found, open_leaves(found, None), widths=np.ones(1), most=most, hit=0.5, price=0.0)
    number, value = np.zeros(len(forest.row), dtype=np.int64), np.ones(len(forest.row), dtype=np.float32)
    number_new(forest.columns(0), found.starts, found.slots, number, number.copy(), value, most, most, 1)
    cost = StepCost()
    cost.observe(1, 1.0)
    choose_counts(found.values, found.places, sessions=1, cost_ns=cost.predict_many_ns, max_rows=4)
    trees = found.trees(most)
    token_ids.append(2)
    one = np.array([1])
    moves = Moves(
        rows=np.array([mirror.row]),
        counts=one,
        tokens=np.array([2]),
        accepted=one,
        slots=trees.slots[:1],
        keeps_tree=np.array([True]),
    )
    # Asked for by itself beside other sources alone.
    forest.ways(moves)
    move_roots(forest, moves)
    logger.debug("compiled loops were ready after %.1f s", time.perf_counter() - began_s)
