"""Arguments of the operators of `outrider.kernels.coupled_sampling`, checked once for reference and Triton."""

# operators take positional columns
# ruff: noqa: PLR0917

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    check_shape("logits", logits, ("T", "V"))
    if logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits: {list(logits.shape)} {logits.dtype} given, at least one floating column needed")
    for name in (*_FLOATING, "seeds", "positions", "top_k", "choice_index"):
        column = getattr(rows, name)
        if column is None:
            continue
        check_shape(name, column, (logits.shape[0],))
        if column.device != logits.device:
            raise ValueError(f"{name}: device {column.device} given, {logits.device} (that of logits) needed")
        if column.is_floating_point() != (name in _FLOATING):
            raise ValueError(f"{name}: dtype {column.dtype} given, {_needed_dtype(name)} needed")
    if seeds.dtype != torch.int64:
        raise ValueError(f"seeds: dtype {seeds.dtype} given, torch.int64 needed")
    if logit_bias is not None:
        check_shape("logit_bias", logit_bias, tuple(logits.shape))
        if logit_bias.device != logits.device:
            raise ValueError(f"logit_bias: device {logit_bias.device} given, {logits.device} (that of logits) needed")
    return rows


def _needed_dtype(name: str) -> str:
    return "torch.float32" if name in _FLOATING else "torch.int32 or torch.int64"
