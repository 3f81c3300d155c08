"""Input rows of an EAGLE head in a growth step, and the keys that its rows attend to.

The head's row of a token reads the hidden row before it: the target's, as far as the target has computed it, or the
head's own. With t the index of the row's token:

    committed token     hidden[r] = features[target_table[row, t - 1]]; zeros for the first token, t = 0
    entry               hidden[r] = grown[slot of the parent's row]; zeros without `grown`

The first token has no hidden row before it, and published heads have no row for it: it is no key of any other row, and
the others count from the second token on. So positions, prefixes, the start of the tree and the number of keys are all
one less than those of a model of the same tokens, and 0 for the first token.

A row's parent is the last key but one that its mask names, the row itself being the last; an entry whose mask names the
row alone hangs below the root, the last key of its prefix.

Shapes: R rows of the step, N sessions, W mask words, S rows of both pools, F numbers of a hidden row.
"""

# compile-time parameters of kernels are upper case, pointers positional
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, check_dense, check_tensors
from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.pool.pack import PADDING, Packed

__all__ = ["Entering", "enter_rows", "enter_rows_reference"]

_INT32 = (torch.int32,)
_PADDING = tl.constexpr(PADDING)


class Entering(NamedTuple):
    """Inputs of a head's forward pass.

    Attributes:
        hidden: [R, F]; zeros for padding.
        positions, prefix_len: [R] int32.
        tree_start, key_len: [N] int32.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    prefix_len: torch.Tensor
    tree_start: torch.Tensor
    key_len: torch.Tensor


def enter_rows(
    packed: Packed,
    table: torch.Tensor,
    target_table: torch.Tensor,
    features: torch.Tensor,
    grown: torch.Tensor | None,
    *,
    count: int | None = None,
) -> Entering:
    """Gather what the rows of a step enter the head with.

    Args:
        packed: the step, of a drafter's pool.
        table: [S, ..] int32, KV slots of that pool's rows.
        target_table: [S, ..] int32, KV slots of the target's rows.
        features: [slots, F] bfloat16, float16 or float32, the target's hidden rows by KV slot.
        grown: [slots, F], the head's own by KV slot of its own, in the dtype of `features`; None where it has none.
        count: rows of the step without padding; where it is not known, padding takes part.

    Returns:
        New tensors, of R = `count` rows if that is given.

    Raises:
        ValueError: a shape, dtype, device or stride that does not fit, naming the argument.
    """
    check_tensors(
        features=(features, ("slots", "F"), FLOAT_DTYPES),
        grown=(grown, ("own slots", features.shape[1]), (features.dtype,)),
        table=(table, ("S", "len"), _INT32),
        target_table=(target_table, (table.shape[0], "target len"), _INT32),
    )
    check_dense(features=features, grown=grown, table=table, target_table=target_table)
    if not uses_triton(features):
        return enter_rows_reference(packed, table, target_table, features, grown, count=count)
    (rows, words), sessions, size = packed.tree_mask[:count].shape, packed.pool_rows.shape[0], features.shape[1]
    found = Entering(
        hidden=features.new_empty((rows, size)),
        positions=torch.empty_like(packed.positions[:count]),
        prefix_len=torch.empty_like(packed.prefix_len[:count]),
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
        packed.tree_mask,
        packed.pool_rows,
        packed.tree_start,
        packed.key_len,
        table,
        target_table,
        features,
        features if grown is None else grown,
        rows,
        sessions,
        table.shape[1],
        target_table.shape[1],
        size,
        W=words,
        BLOCK_BITS=triton.next_power_of_2(64 * words),
        BLOCK=block,
        HAS_GROWN=grown is not None,
        num_warps=min(max(block // 512, 1), 8),
    )
    return found


def enter_rows_reference(
    packed: Packed,
    table: torch.Tensor,
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
    bit = torch.arange(64, device=table.device)
    is_key = (packed.tree_mask[:count, :, None] >> bit & 1).flatten(1).bool()
    keys = torch.where(is_key, torch.arange(is_key.shape[1], device=table.device), -1)
    parent = torch.where(keys < keys.amax(dim=1, keepdim=True), keys, -1).amax(dim=1)
    parent_slot = table[pool_rows, (prefix_len + parent).clamp(min=0)].clamp(min=0).long()
    target_slot = target_table[pool_rows, index.clamp(min=0).masked_fill(is_entry, 0)].clamp(min=0).long()
    is_blank = (entries == PADDING) | (~is_entry & (index < 0))
    if grown is None:
        hidden, is_blank = features[target_slot], is_blank | is_entry
    else:
        hidden = torch.where(is_entry[:, None], grown[parent_slot], features[target_slot])
    shifted = (positions, prefix_len, packed.tree_start, packed.key_len)
    return Entering(hidden.masked_fill(is_blank[:, None], 0), *((column - 1).clamp(min=0) for column in shifted))


@jit(do_not_specialize=["rows", "sessions"])
def _enter_rows_kernel(
    hidden_ptr,  # [R, F]
    out_positions_ptr,  # [R] int32
    out_prefix_len_ptr,  # [R] int32
    out_tree_start_ptr,  # [N] int32
    out_key_len_ptr,  # [N] int32
    entries_ptr,  # [R] int32
    positions_ptr,  # [R] int32
    sessions_ptr,  # [R] int32
    prefix_len_ptr,  # [R] int32
    tree_mask_ptr,  # [R, W] int64
    pool_rows_ptr,  # [N] int32
    tree_start_ptr,  # [N] int32
    key_len_ptr,  # [N] int32
    table_ptr,  # [S, table_width] int32
    target_table_ptr,  # [S, target_width] int32
    features_ptr,  # [slots, F]
    grown_ptr,  # [own slots, F]
    rows,
    sessions,
    table_width,
    target_width,
    size,
    W: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
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
        if HAS_GROWN and entry >= 0:
            pool_row = tl.load(pool_rows_ptr + session).to(tl.int64)
            bit = tl.arange(0, BLOCK_BITS)
            word = tl.load(tree_mask_ptr + row * W + (bit >> 6), mask=bit < 64 * W, other=0)
            keys = tl.where(((word >> (bit & 63).to(tl.int64)) & 1) != 0, bit, -1)
            parent = tl.max(tl.where(keys < tl.max(keys, 0), keys, -1), 0)
            slot = tl.load(table_ptr + pool_row * table_width + tl.maximum(prefix_len + parent, 0))
            hidden = tl.load(grown_ptr + tl.maximum(slot, 0).to(tl.int64) * size + column, mask=kept, other=0.0)
        elif (entry < 0) & (entry != _PADDING) & (index >= 0):
            pool_row = tl.load(pool_rows_ptr + session).to(tl.int64)
            slot = tl.load(target_table_ptr + pool_row * target_width + index)
            hidden = tl.load(features_ptr + tl.maximum(slot, 0).to(tl.int64) * size + column, mask=kept, other=0.0)
        tl.store(hidden_ptr + row * size + column, hidden, mask=kept)
