"""Arguments of the operators that sample, checked once for reference and Triton."""

# operators take positional columns
# ruff: noqa: PLR0917

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape

_FLOATING = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SamplingRows:
    """Checked arguments of the operators: logits [T, V], everything else [T], bias [T, V] or None."""

    logits: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    logit_bias: torch.Tensor | None
    choice_index: torch.Tensor | None


def checked_rows(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    logit_bias: torch.Tensor | None,
    choice_index: torch.Tensor | None,
) -> SamplingRows:
    """The arguments as one object; raises ValueError naming the one that does not fit."""
    rows = SamplingRows(
        logits=logits,
        seeds=seeds,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logit_bias=logit_bias,
        choice_index=choice_index,
    )
    names = (*_FLOATING, "seeds", "positions", "top_k", "choice_index")
    check_sampling(logits, **{name: column for name in names if (column := getattr(rows, name)) is not None})
    check_dtype("seeds", seeds, (torch.int64,))
    if logit_bias is not None:
        check_shape("logit_bias", logit_bias, tuple(logits.shape))
        check_place("logit_bias", logit_bias, logits.device, "logits")
    return rows


def check_sampling(logits: torch.Tensor, **columns: torch.Tensor) -> None:
    """Raise ValueError unless `logits` are [T, V] and each column, by its name, is [T], of its type and beside them."""
    check_shape("logits", logits, ("T", "V"))
    if logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits: {list(logits.shape)} {logits.dtype} given, at least one floating column needed")
    for name, column in columns.items():
        check_shape(name, column, (logits.shape[0],))
        check_place(name, column, logits.device, "logits")
        if column.is_floating_point() != (name in _FLOATING):
            needed = "torch.float32" if name in _FLOATING else "torch.int32 or torch.int64"
            raise ValueError(f"{name}: dtype {column.dtype} given, {needed} needed")
