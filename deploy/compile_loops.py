"""Compiles all loops ahead: `python -m outrider.deploy.compile_loops`.

Otherwise every worker does it when it first starts, and workers that start together do it side by side.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def _draft() -> None:
    import torch

    from outrider.draft_worker.drafters.ngram import drafter
    from outrider.drafting import acceptance_calibration, expansions
    from outrider.kernels.drafting.children import estimate_children_reference
    from outrider.kernels.sampling.rows import SampledRows

    for module in (acceptance_calibration, expansions, drafter):
        module.warm_up()
    rows, floats, ints = SampledRows.allocate(1, torch.device("cpu")), torch.zeros(1, 1), torch.zeros(1, 1).int()
    tables = torch.zeros(2, 1), torch.zeros(3), torch.zeros(3)
    estimate_children_reference(ints.long(), floats, floats, rows, tables, 1.0, (ints, ints, ints, floats))


def _pool() -> None:
    """The operators on pools, which targets and drafts share."""
    import torch

    from outrider.kernels.pool.append import append_reference
    from outrider.kernels.pool.columns import Pool
    from outrider.kernels.pool.graft import graft_reference
    from outrider.kernels.pool.pack import Packed, pack_reference
    from outrider.kernels.pool.prefill import Chunks, pack_chunks_reference, take_chunks_reference
    from outrider.kernels.pool.re_root import re_root_reference
    from outrider.kernels.pool.select import Selection, select_reference
    from outrider.kernels.verification.walk import WalkRules, Walks, walk_reference

    nothing = torch.zeros(1, 8, dtype=torch.int32)
    pool = Pool.allocate(sessions=1, max_len=1, capacity=1, node_slots=1)
    selection = Selection.allocate(pool, [(1, 1, 1, 1)])
    packed = Packed.allocate(pool, (1, 1, 1, 1), scrap_slot=0)
    graft_reference(pool, nothing, nothing[0, :1], nothing[0, :1], nothing[:, :1], nothing[0, :1])
    select_reference(pool, selection, 0, children=1, chunk=1)
    pack_reference(pool, selection, packed)
    append_reference(pool, packed, nothing[:, :1], torch.zeros(1, 1), nothing[:, :1], nothing[0, :1], 0, 1)
    re_root_reference(pool, nothing[:, :1], nothing[0, :1])
    # A target's pool has columns of the same types.
    target = Pool.allocate(sessions=1, max_len=1, capacity=1)
    chunks, walks = Chunks.allocate(target, chunks=1, rows=1), Walks.allocate(target, sessions=1, most=1)
    take_chunks_reference(target, nothing, nothing[0, :1], chunks, selection.reserved_sessions)
    pack_chunks_reference(target, selection, chunks, packed)
    choices, rules = torch.zeros(1, dtype=torch.int64), WalkRules.allocate(1)
    walk_reference(target, packed, choices, None, rules, nothing, walks, level=0)


_GROUPS: tuple[Callable[[], None], ...] = (_draft, _pool)


def main() -> int:
    """Compile each group in a process of its own."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(group) for group in _GROUPS]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
