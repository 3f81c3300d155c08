"""The rows of a step at which a token is chosen, with their sessions' sampling parameters.

A draft worker ranks children at them, a target worker makes its choices: at a session's root and at every entry among
the rows. At committed tokens before the root nothing is chosen.

Shapes: R rows of the step, L of them at which a token is chosen ("lines"), S rows of the pool, N sessions of the step.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.kernels.backend import jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import ROOT, Packed

__all__ = ["PARAMETERS", "SampledRows", "sample_rows", "sample_rows_reference"]

PARAMETERS = 8
"""int32 words of a session's sampling parameters: seed (2), temperature, top_p, min_p (float32 bits), top_k, choice
index, and 1 where a drafter's estimates come from the prior alone."""

# Rows looked at together. With those of a whole prefill a thread spilled to local memory, which a GPU sets aside
# for every thread that it could ever run: 3 GB of an H200.
_MOST_AT_A_TIME = 512

_ROOT = tl.constexpr(ROOT)
_PARAMETERS = tl.constexpr(PARAMETERS)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRows:
    """The rows of a step at which a token is chosen, and how. Build one with `allocate`.

    Attributes:
        count: [1] int32: rows in use; the others are padding.
        rows: [L] int64: row of the step; 0 for padding.
        pool_rows: [L] int32: the session's row of the pool; -1 for padding.
        seeds: [L] int64.
        positions: [L] int32: index of the token that is to be chosen.
        temperature, top_p, min_p: [L] float32.
        top_k, choice_index: [L] int32.
        fixed: [L] int32: 1 where a drafter's estimates come from the prior alone.
    """

    count: torch.Tensor
    rows: torch.Tensor
    pool_rows: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    choice_index: torch.Tensor
    fixed: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> SampledRows:
        """Return room for L = `rows` rows."""

        def column(dtype: torch.dtype, size: int = rows) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        ints = {name: column(torch.int32) for name in ("pool_rows", "positions", "top_k", "choice_index", "fixed")}
        floats = {name: column(torch.float32) for name in ("temperature", "top_p", "min_p")}
        return cls(count=column(torch.int32, 1), rows=column(torch.int64), seeds=column(torch.int64), **ints, **floats)

    def first(self, count: int) -> SampledRows:
        """Return the first rows, as views."""
        columns = {name: getattr(self, name)[:count] for name in self.__dataclass_fields__ if name != "count"}
        return SampledRows(count=self.count, **columns)


def sample_rows(pool: Pool, packed: Packed, parameters: torch.Tensor, out: SampledRows) -> None:
    """Find the rows of a step at which a token is chosen. What is past L is left out.

    Args:
        pool: whose step it is.
        packed: the step, as `pack` wrote it.
        parameters: [S, 8] int32, see `PARAMETERS`.
        out: written.
    """
    if not uses_triton(packed.tokens):
        sample_rows_reference(packed, parameters, out)
        return
    rows = packed.tokens.shape[0]
    _sample_rows_kernel[(1,)](
        packed.entries,
        packed.positions,
        packed.sessions,
        packed.pool_rows,
        parameters,
        out.count,
        out.rows,
        out.pool_rows,
        out.seeds,
        out.positions,
        out.temperature,
        out.top_p,
        out.min_p,
        out.top_k,
        out.choice_index,
        out.fixed,
        rows,
        out.rows.shape[0],
        BLOCK=min(triton.next_power_of_2(rows), _MOST_AT_A_TIME),
        num_warps=4,
        **early_options(pool.device),
    )


def sample_rows_reference(packed: Packed, parameters: torch.Tensor, out: SampledRows) -> None:
    """`sample_rows` in numpy, on a CPU; padding is left as it is."""
    used = packed.query_start.numpy()[-1]
    rows = np.flatnonzero(packed.entries.numpy()[:used] >= ROOT)[: out.rows.shape[0]]
    count = len(rows)
    out.count.numpy()[0] = count
    pool_rows = packed.pool_rows.numpy()[packed.sessions.numpy()[rows]]
    words = parameters.numpy()[pool_rows]
    floats = words.view(np.float32)
    columns: dict[str, Any] = {
        "rows": rows,
        "pool_rows": pool_rows,
        "seeds": np.ascontiguousarray(words[:, :2]).view(np.int64)[:, 0],
        "positions": packed.positions.numpy()[rows] + 1,
        "temperature": floats[:, 2],
        "top_p": floats[:, 3],
        "min_p": floats[:, 4],
        "top_k": words[:, 5],
        "choice_index": words[:, 6],
        "fixed": words[:, 7],
    }
    for name, column in columns.items():
        getattr(out, name).numpy()[:count] = column


@jit(do_not_specialize=["rows", "most"])
def _sample_rows_kernel(
    entries_ptr,  # [R] int32
    step_positions_ptr,  # [R] int32
    sessions_ptr,  # [R] int32
    step_pool_rows_ptr,  # [N] int32
    parameters_ptr,  # [S, 8] int32
    count_ptr,  # [1] int32
    rows_ptr,  # [L] int64
    pool_rows_ptr,  # [L] int32
    seeds_ptr,  # [L] int64
    positions_ptr,  # [L] int32
    temperature_ptr,  # [L] float32
    top_p_ptr,  # [L] float32
    min_p_ptr,  # [L] float32
    top_k_ptr,  # [L] int32
    choice_index_ptr,  # [L] int32
    fixed_ptr,  # [L] int32
    rows,
    most,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    # The forward pass reads these arrays before its `gdc_wait`: no `gdc_launch_dependents` here.
    if EARLY:
        tl.extra.cuda.gdc_wait()
    count = 0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        wanted = tl.load(entries_ptr + row, mask=row < rows, other=_ROOT - 1) >= _ROOT
        place = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
        count += tl.sum(wanted.to(tl.int32))
        wanted = wanted & (place < most)
        session = tl.load(sessions_ptr + row, mask=wanted, other=0)
        pool_row = tl.load(step_pool_rows_ptr + session, mask=wanted, other=0)
        words = parameters_ptr + pool_row * _PARAMETERS
        low = tl.load(words, mask=wanted, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(words + 1, mask=wanted, other=0).to(tl.int64)
        tl.store(rows_ptr + place, row.to(tl.int64), mask=wanted)
        tl.store(pool_rows_ptr + place, pool_row, mask=wanted)
        tl.store(seeds_ptr + place, low | (high << 32), mask=wanted)
        tl.store(positions_ptr + place, tl.load(step_positions_ptr + row, mask=wanted, other=0) + 1, mask=wanted)
        temperature = tl.load(words + 2, mask=wanted, other=0).to(tl.float32, bitcast=True)
        top_p = tl.load(words + 3, mask=wanted, other=0).to(tl.float32, bitcast=True)
        min_p = tl.load(words + 4, mask=wanted, other=0).to(tl.float32, bitcast=True)
        tl.store(temperature_ptr + place, temperature, mask=wanted)
        tl.store(top_p_ptr + place, top_p, mask=wanted)
        tl.store(min_p_ptr + place, min_p, mask=wanted)
        tl.store(top_k_ptr + place, tl.load(words + 5, mask=wanted, other=0), mask=wanted)
        tl.store(choice_index_ptr + place, tl.load(words + 6, mask=wanted, other=0), mask=wanted)
        tl.store(fixed_ptr + place, tl.load(words + 7, mask=wanted, other=0), mask=wanted)
    count = tl.minimum(count, most)
    tl.store(count_ptr, count)
    nothing, none, zero = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, most, BLOCK):
        padding = begin + tl.arange(0, BLOCK)
        unused = (padding >= count) & (padding < most)
        tl.store(rows_ptr + padding, none, mask=unused)
        tl.store(pool_rows_ptr + padding, nothing - 1, mask=unused)
        tl.store(seeds_ptr + padding, none, mask=unused)
        tl.store(positions_ptr + padding, nothing, mask=unused)
        tl.store(temperature_ptr + padding, zero, mask=unused)
        tl.store(top_p_ptr + padding, zero, mask=unused)
        tl.store(min_p_ptr + padding, zero, mask=unused)
        tl.store(top_k_ptr + padding, nothing, mask=unused)
        tl.store(choice_index_ptr + padding, nothing, mask=unused)
        tl.store(fixed_ptr + padding, nothing, mask=unused)
