"""Arguments of the operators that sample, checked once for reference and Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import FLOAT_DTYPES, INDEX_DTYPES, check_at_least, check_tensors

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
    """Return the arguments as one object.

    Args:
        logits: [T, V] float.
        seeds: [T] int64.
        positions: [T] int32 or int64.
        temperature, top_p, min_p: [T] float32.
        top_k: [T] int32 or int64.
        logit_bias: [T, V] float, or None.
        choice_index: [T] int32 or int64, or None.

    Raises:
        ValueError: an argument of another shape or type, with its name.
    """
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
    names = (*_FLOATING, "top_k", "positions", "choice_index")
    check_sampling(logits, **{name: getattr(rows, name) for name in names})
    check_tensors(
        logits=(logits, ("T", "V"), FLOAT_DTYPES),
        seeds=(seeds, ("T",), (torch.int64,)),
        logit_bias=(logit_bias, ("T", "V"), FLOAT_DTYPES),
    )
    return rows


def check_sampling(logits: torch.Tensor, **columns: torch.Tensor | None) -> None:
    """Raise ValueError unless `logits` are [T, V] and each column, by its name, is [T], of its type and beside them."""
    needed = {
        name: (column, ("T",), (torch.float32,) if name in _FLOATING else INDEX_DTYPES)
        for name, column in columns.items()
    }
    check_tensors(logits=(logits, ("T", "V"), FLOAT_DTYPES), **needed)
    check_at_least("logits vocabulary", logits.shape[1], 1)
