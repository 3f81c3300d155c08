"""Input rows of an EAGLE head in a growth step, and the keys that its rows attend to.

The head's row of a token reads the hidden row before it: the target's, as far as the target has computed it, or the
head's own. With t the index of the row's token:

    committed token     hidden[r] = features[target_table[row, t - 1]]; zeros for the first token, t = 0
    entry               hidden[r] = grown[place of the parent]; zeros without `grown`

The first token has no hidden row before it, and published heads have no row for it: it is no key of any other row, and
the others count from the second token on. So positions, prefixes, the start of the tree and the number of keys are all
one less than those of a model of the same tokens, and 0 for the first token.

What a row leaves in `grown` for the entries below it has a place by row and entry of the pool, (C + 1) row + entry + 1,
where the root is entry -1. All else goes to the last place. An entry of a head's pool keeps its number until its whole
tree goes.

Shapes: R rows of the step, N sessions, S rows of both pools, C entries of a row, F numbers of a hidden row.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_dense, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import PADDING, ROOT, Packed

__all__ = ["Entering", "enter_rows", "enter_rows_reference"]

_INT32 = (torch.int32,)
_ROOT, _PADDING = tl.constexpr(ROOT), tl.constexpr(PADDING)


class Entering(NamedTuple):
    """Inputs of a head's forward pass.

    Attributes:
        hidden: [R, F]; zeros for padding.
        positions, prefix_len: [R] int32.
        places: [R] int64, of the rows' own hidden rows in `grown`.
        tree_start, key_len: [N] int32.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    prefix_len: torch.Tensor
    places: torch.Tensor
    tree_start: torch.Tensor
    key_len: torch.Tensor


def enter_rows(
    packed: Packed,
    pool: Pool,
    target_table: torch.Tensor,
    features: torch.Tensor,
    grown: torch.Tensor | None,
    *,
    count: int | None = None,
) -> Entering:
    """Gather what the rows of a step enter the head with.

    Args:
        packed: the step.
        pool: the drafter's, not changed since `pack`.
        target_table: [S, ..] int32, KV slots of the target's rows.
        features: [slots, F] bfloat16, float16 or float32, the target's hidden rows by KV slot.
        grown: [S (C + 1) + 1, F], the head's own, in the dtype of `features`; None where it has none.
        count: rows of the step without padding; where it is not known, padding takes part.

    Returns:
        New tensors, of R = `count` rows if that is given.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument.
    """
    check_tensors(
        features=(features, ("slots", "F"), FLOAT_DTYPES),
        grown=(grown, (pool.sessions * (pool.capacity + 1) + 1, features.shape[1]), (features.dtype,)),
        target_table=(target_table, (pool.sessions, "target len"), _INT32),
    )
    check_dense(features=features, grown=grown, target_table=target_table)
    if not uses_triton(features):
        return enter_rows_reference(packed, pool, target_table, features, grown, count=count)
    rows, sessions, size = packed.positions[:count].shape[0], packed.pool_rows.shape[0], features.shape[1]
    found = Entering(
        hidden=features.new_empty((rows, size)),
        positions=torch.empty_like(packed.positions[:count]),
        prefix_len=torch.empty_like(packed.prefix_len[:count]),
        places=torch.empty((rows,), dtype=torch.int64, device=features.device),
        tree_start=torch.empty_like(packed.tree_start),
        key_len=torch.empty_like(packed.key_len),
    )
    block = triton.next_power_of_2(size)
    # What it writes is read by launches that begin early: it lets none begin before its own end.
    _enter_rows_kernel[(max(rows, sessions),)](
        *found,
        packed.entries,
        packed.positions,
        packed.sessions,
        packed.prefix_len,
        packed.pool_rows,
        packed.tree_start,
        packed.key_len,
        pool.parent,
        target_table,
        features,
        features if grown is None else grown,
        rows,
        sessions,
        pool.sessions,
        target_table.shape[1],
        size,
        C=pool.capacity,
        BLOCK=block,
        HAS_GROWN=grown is not None,
        num_warps=min(max(block // 512, 1), 8),
    )
    return found


def enter_rows_reference(
    packed: Packed,
    pool: Pool,
    target_table: torch.Tensor,
    features: torch.Tensor,
    grown: torch.Tensor | None,
    *,
    count: int | None = None,
) -> Entering:
    """`enter_rows` in plain torch, on any device."""
    entries, positions, prefix_len = packed.entries[:count], packed.positions[:count], packed.prefix_len[:count]
    is_entry, index = entries >= 0, positions - 1
    pool_rows = packed.pool_rows.long()[packed.sessions[:count].clamp(min=0)].clamp(min=0)
    # Of the root, in `grown`.
    first = (pool.capacity + 1) * pool_rows
    places = torch.where(entries >= ROOT, first + entries - ROOT, (pool.capacity + 1) * pool.sessions)
    parent_place = first + pool.parent[pool_rows, entries.clamp(min=0)] - ROOT
    target_slot = target_table[pool_rows, index.clamp(min=0).masked_fill(is_entry, 0)].clamp(min=0).long()
    is_blank = (entries == PADDING) | (~is_entry & (index < 0))
    if grown is None:
        hidden, is_blank = features[target_slot], is_blank | is_entry
    else:
        hidden = torch.where(is_entry[:, None], grown[parent_place], features[target_slot])
    columns = positions, prefix_len, packed.tree_start, packed.key_len
    positions, prefix_len, tree_start, key_len = ((column - 1).clamp(min=0) for column in columns)
    return Entering(hidden.masked_fill(is_blank[:, None], 0), positions, prefix_len, places, tree_start, key_len)


@jit(do_not_specialize=["rows", "sessions", "pool_sessions"])
def _enter_rows_kernel(
    hidden_ptr,  # [R, F]
    out_positions_ptr,  # [R] int32
    out_prefix_len_ptr,  # [R] int32
    out_places_ptr,  # [R] int64
    out_tree_start_ptr,  # [N] int32
    out_key_len_ptr,  # [N] int32
    entries_ptr,  # [R] int32
    positions_ptr,  # [R] int32
    sessions_ptr,  # [R] int32
    prefix_len_ptr,  # [R] int32
    pool_rows_ptr,  # [N] int32
    tree_start_ptr,  # [N] int32
    key_len_ptr,  # [N] int32
    parent_ptr,  # [S, C] int32
    target_table_ptr,  # [S, target_width] int32
    features_ptr,  # [slots, F]
    grown_ptr,  # [S (C + 1) + 1, F]
    rows,
    sessions,
    pool_sessions,
    target_width,
    size,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_GROWN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < sessions:
        tl.store(out_tree_start_ptr + row, tl.maximum(tl.load(tree_start_ptr + row) - 1, 0))
        tl.store(out_key_len_ptr + row, tl.maximum(tl.load(key_len_ptr + row) - 1, 0))
    if row < rows:
        entry, index = tl.load(entries_ptr + row), tl.load(positions_ptr + row) - 1
        prefix_len, session = tl.load(prefix_len_ptr + row), tl.load(sessions_ptr + row)
        tl.store(out_positions_ptr + row, tl.maximum(index, 0))
        tl.store(out_prefix_len_ptr + row, tl.maximum(prefix_len - 1, 0))
        column = tl.arange(0, BLOCK)
        kept = column < size
        hidden = tl.zeros((BLOCK,), features_ptr.dtype.element_ty)
        pool_row = tl.load(pool_rows_ptr + tl.maximum(session, 0)).to(tl.int64)
        # Of the root, in `grown`.
        first = (C + 1) * tl.maximum(pool_row, 0)
        last = (C + 1) * pool_sessions.to(tl.int64)
        tl.store(out_places_ptr + row, tl.where(entry >= _ROOT, first + entry - _ROOT, last))
        if HAS_GROWN and entry >= 0:
            parent = tl.load(parent_ptr + tl.maximum(pool_row, 0) * C + entry)
            hidden = tl.load(grown_ptr + (first + parent - _ROOT) * size + column, mask=kept, other=0.0)
        elif (entry < 0) & (entry != _PADDING) & (index >= 0):
            slot = tl.load(target_table_ptr + pool_row * target_width + index)
            hidden = tl.load(features_ptr + tl.maximum(slot, 0).to(tl.int64) * size + column, mask=kept, other=0.0)
        tl.store(hidden_ptr + row * size + column, hidden, mask=kept)
