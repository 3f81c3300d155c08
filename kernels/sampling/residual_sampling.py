"""The last token of a verdict: a draw from what the target has over the draft, in rows that only the device knows.

    r[t]  = max(p[t] - q[t], 0), and 0 for excluded tokens
    token = smallest t with r[t] > 0 and cumsum(r)[t] > u * sum(r); else the last t with r[t] > 0; else V - 1

Both rejection rules end so: `outrider.kernels.tree_sampling` and `outrider.kernels.chain_sampling`, whose walks write
into a `ResidualPlan` which rows of p and q each request draws from. One launch follows, and writes nothing of size V.
Differences are float32, their sums float64, so that the rounding of sums all but never decides a token.

Shapes: bs requests, V vocabulary size, n tokens that can be excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.backend import triton
from outrider.kernels.sampling.residual_sampling_kernels import PLAN_COLUMNS, residual_kernel

__all__ = [
    "ResidualPlan",
    "launch_residual_draw",
    "overlap_options",
    "residual_tokens_reference",
    "with_dense_rows",
]

_LARGEST_BLOCK = 1024
# A program takes one block at a time where there are few, so that the whole GPU reads, else two, so that more is in
# flight from each; and all programs together are one wave of an H200, for each wave has its own beginning and end.
_GROUP, _MANY_BLOCKS = 2, 256
_PROGRAMS = 132 * 8


@dataclass(frozen=True, kw_only=True)
class ResidualPlan:
    """Plan that a walk leaves on the device for the residual draw.

    Attributes:
        columns: [bs, PLAN_COLUMNS] int64, see `store_plan`.
        uniforms: [bs] float64, u of each request.
        excluded: [bs, n] int32, tokens without residual (-1: unused), or None.
    """

    columns: torch.Tensor
    uniforms: torch.Tensor
    excluded: torch.Tensor | None = None

    @classmethod
    def empty(cls, requests: int, device: torch.device, *, excluded: int = 0) -> ResidualPlan:
        """Room for a walk to write into; `excluded` is n."""
        return cls(
            columns=torch.empty(requests, PLAN_COLUMNS, dtype=torch.int64, device=device),
            uniforms=torch.empty(requests, dtype=torch.float64, device=device),
            excluded=torch.empty(requests, excluded, dtype=torch.int32, device=device) if excluded else None,
        )


def residual_tokens_reference(residual: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row of `residual`.

    Args:
        residual: [R, V] float32, not negative.
        uniforms: [R] float, u of each row.

    Returns:
        [R] int64.
    """
    vocab_size = residual.shape[1]
    ids = torch.arange(vocab_size, device=residual.device)
    cumulative = residual.double().cumsum(1)
    threshold = uniforms.double()[:, None] * cumulative[:, -1:]
    first = torch.where((residual > 0) & (cumulative > threshold), ids, vocab_size).amin(1)
    last = torch.where(residual > 0, ids, -1).amax(1)
    return torch.where(first < vocab_size, first, torch.where(last >= 0, last, vocab_size - 1))


def with_dense_rows(probabilities: torch.Tensor) -> torch.Tensor:
    """`probabilities`, or a copy if the entries of a row are not neighbours in memory."""
    return probabilities if probabilities.stride(-1) == 1 else probabilities.contiguous()


def overlap_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Return launch options of the draw: from Hopper on it starts before the walk has ended, and waits for it."""
    overlaps = (
        tensor.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    )
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def launch_residual_draw(
    out: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    plan: ResidualPlan,
    *,
    falls_back: bool,
) -> None:
    """Draw one token per request.

    Args:
        out: contiguous, int32 or int64; the token of request b goes to the place that `plan` names.
        target_probs: [bs, rows, V], dense rows.
        draft_probs: [bs, rows, V], dense rows, or None for zeros.
        plan: what the walk wrote.
        falls_back: whether a request without any residual draws from its row of p.
    """
    requests, _, vocab_size = target_probs.shape
    block = min(max(triton.next_power_of_2(vocab_size), 16), _LARGEST_BLOCK)
    blocks = triton.cdiv(vocab_size, block)
    group = _GROUP if requests * blocks > _MANY_BLOCKS else 1
    tiles = triton.cdiv(blocks, group)
    programs = min(tiles, max(_PROGRAMS // requests, 1))
    steps = triton.cdiv(tiles, programs)
    programs = triton.cdiv(tiles, steps)
    sums = torch.empty(requests, blocks, dtype=torch.float64, device=out.device)
    draft = target_probs if draft_probs is None else draft_probs
    excluded = plan.columns if plan.excluded is None else plan.excluded
    residual_kernel[(requests * programs,)](
        out,
        target_probs,
        draft,
        plan.columns,
        plan.uniforms,
        excluded,
        sums,
        target_probs.stride(0),
        target_probs.stride(1),
        draft.stride(0),
        draft.stride(1),
        excluded.stride(0),
        vocab_size,
        blocks,
        programs,
        steps,
        HAS_DRAFT=draft_probs is not None,
        EXCLUDED=0 if plan.excluded is None else triton.next_power_of_2(plan.excluded.shape[1]),
        FALLS_BACK=falls_back,
        GROUP=group,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4,
        **overlap_options(out),
    )
