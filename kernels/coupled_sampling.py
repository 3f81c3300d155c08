"""Coupled sampling: choices by argmax of log probability plus noise that draft and target share.

    z      = (logits + bias) / temperature
    thr    = the largest of the thresholds of top-k, top-p and min-p (`_thresholds`); z == thr stays
    choice = argmax over {v : z[v] >= thr} of z[v] + G[v]          an exact sample of the filtered law (Gumbel-max)
    topk   = the k largest z[v] + G[v] of the same set, log q = z - logsumexp of z over that set

with G of `outrider.kernels.noise`. At temperature 0 the filters and the noise are left out: the choice is the argmax of
the logits, and `coupled_topk_scored` ranks by logits with their log softmax as score. Ties go to the smallest id.

Conventions: top_k 0 or below is off, top_p 1 or above is off, min_p 0 is off. Order: top-k, then top-p on what is left,
renormalised (the smallest set of most probable tokens whose mass reaches top_p), then min-p relative to the largest
probability. Tokens that tie with the last one kept are kept.

Shapes: T rows, V vocabulary size, k tokens of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outrider.kernels.backend import check_shape
from outrider.kernels.noise import STREAM_CHOICE, gumbel_noise_reference

__all__ = [
    "coupled_choice",
    "coupled_choice_reference",
    "coupled_topk",
    "coupled_topk_scored",
    "coupled_topk_scored_reference",
]

# Sorted candidates looked at before a whole row is sorted: top-k and top-p rarely reach further down.
_CANDIDATES = 256


def coupled_choice(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    logit_bias: torch.Tensor | None = None,
    *,
    choice_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token each row chooses; a function of its logits, parameters, seed and position alone.

    Args:
        logits: [T, V] float32, bfloat16 or float16; -inf for tokens that may not be chosen.
        seeds: [T] int64, the bit pattern of the request's 64-bit seed.
        positions: [T] int32 or int64, index in prompt + output of the token being chosen.
        temperature: [T] float32; 0 is greedy.
        top_k: [T] int32 or int64; 0 or -1 is off.
        top_p: [T] float32; 1 is off.
        min_p: [T] float32; 0 is off.
        logit_bias: [T, V] added to the logits, or None.
        choice_index: [T] int32 or int64, which of a request's several completions; None is 0.

    Returns:
        [T] int64.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    rows = _checked_rows(logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, choice_index)
    return coupled_choice_reference(rows)


def coupled_topk_scored(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    logit_bias: torch.Tensor | None = None,
    *,
    k: int,
    choice_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k tokens of each row that rank highest under log q + G, best first.

    The first is what `coupled_choice` returns. Arguments as there, and k, the number of tokens.

    Returns:
        tokens [T, k] int64, log q [T, k] float32 (of the filtered, renormalised distribution) and the scores log q + G
        [T, k] float32. At temperature 0 log q is the log softmax of the logits and the score equals it. Where a row
        has fewer than k tokens of positive probability the rest are -1 with -inf.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or k outside [1, V], naming the argument.
    """
    rows = _checked_rows(logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, choice_index)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: {k} given, 1 to V = {logits.shape[1]} needed")
    return coupled_topk_scored_reference(rows, k)


def coupled_topk(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    logit_bias: torch.Tensor | None = None,
    *,
    k: int,
    choice_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`coupled_topk_scored` without the scores: tokens [T, k] int64 and log q [T, k] float32."""
    tokens, log_q, _ = coupled_topk_scored(
        logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, k=k, choice_index=choice_index
    )
    return tokens, log_q


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


def _checked_rows(
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
    for name in ("seeds", "positions", "temperature", "top_k", "top_p", "min_p", "choice_index"):
        column = getattr(rows, name)
        if column is None:
            continue
        check_shape(name, column, (logits.shape[0],))
        if column.device != logits.device:
            raise ValueError(f"{name}: device {column.device} given, {logits.device} (that of logits) needed")
        if column.is_floating_point() != (name in ("temperature", "top_p", "min_p")):
            raise ValueError(f"{name}: dtype {column.dtype} given, {_needed_dtype(name)} needed")
    if seeds.dtype != torch.int64:
        raise ValueError(f"seeds: dtype {seeds.dtype} given, torch.int64 needed")
    if logit_bias is not None:
        check_shape("logit_bias", logit_bias, tuple(logits.shape))
        if logit_bias.device != logits.device:
            raise ValueError(f"logit_bias: device {logit_bias.device} given, {logits.device} (that of logits) needed")
    return rows


def _needed_dtype(name: str) -> str:
    return "torch.float32" if name in ("temperature", "top_p", "min_p") else "torch.int32 or torch.int64"


def coupled_choice_reference(rows: SamplingRows) -> torch.Tensor:
    """`coupled_choice` in plain torch. Greedy rows draw no noise; a row without filters is not sorted."""
    logits = _biased(rows)
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    if sampled.numel() == 0:
        return logits.argmax(dim=-1)
    if sampled.numel() == logits.shape[0]:
        return _perturbed(logits, rows)[1].argmax(dim=-1)
    chosen = logits.argmax(dim=-1)
    chosen[sampled] = _perturbed(logits[sampled], _take(rows, sampled))[1].argmax(dim=-1)
    return chosen


def coupled_topk_scored_reference(rows: SamplingRows, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`coupled_topk_scored` in plain torch."""
    logits = _biased(rows)
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    if sampled.numel() == logits.shape[0]:
        scaled, scores = _perturbed(logits, rows)
    elif sampled.numel() == 0:
        scaled = scores = logits
    else:
        scaled, scores = logits.clone(), logits.clone()
        scaled[sampled], scores[sampled] = _perturbed(logits[sampled], _take(rows, sampled))
    best, tokens = _topk_smallest_id_first(scores, k)
    log_mass = torch.logsumexp(scaled, dim=-1, keepdim=True)
    log_q = scaled.gather(1, tokens) - log_mass
    absent = best == -math.inf
    return tokens.masked_fill(absent, -1), log_q.masked_fill(absent, -math.inf), best - log_mass


def _biased(rows: SamplingRows) -> torch.Tensor:
    logits = rows.logits.float()
    return logits if rows.logit_bias is None else logits + rows.logit_bias.float()


def _take(rows: SamplingRows, index: torch.Tensor) -> SamplingRows:
    return SamplingRows(
        logits=rows.logits,
        seeds=rows.seeds[index],
        positions=rows.positions[index],
        temperature=rows.temperature[index],
        top_k=rows.top_k[index],
        top_p=rows.top_p[index],
        min_p=rows.min_p[index],
        logit_bias=None,
        choice_index=None if rows.choice_index is None else rows.choice_index[index],
    )


def _perturbed(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """z with -inf outside the support, and z + G, both [T, V]; every row of `rows` has a positive temperature."""
    # The clamp keeps z finite for temperatures so small that they are greedy anyway.
    scaled = logits / rows.temperature.clamp(min=1e-30)[:, None]
    filtered = ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).nonzero().squeeze(1)
    if filtered.numel():
        kept = scaled[filtered]
        threshold = _thresholds(kept, rows.top_k[filtered], rows.top_p[filtered], rows.min_p[filtered])
        scaled[filtered] = kept.masked_fill(kept < threshold[:, None], -math.inf)
    choice = 0 if rows.choice_index is None else rows.choice_index
    noise = gumbel_noise_reference(rows.seeds, rows.positions, logits.shape[1], STREAM_CHOICE, choice)
    return scaled, noise.add_(scaled)


def _thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest z kept in each row, [T]: all three filters keep what reaches a threshold."""
    vocab_size = scaled.shape[1]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()
    wanted = max(int(top_k.masked_fill(top_k == vocab_size, 0).max()), _CANDIDATES)
    ordered = _descending(scaled, wanted)
    threshold = torch.full_like(scaled[:, 0], -math.inf)
    limited = top_k < vocab_size
    if limited.any():
        kth = ordered.gather(1, top_k.clamp(max=ordered.shape[1])[:, None] - 1).squeeze(1)
        threshold = torch.where(limited, kth, threshold)
    nucleus = top_p < 1
    if nucleus.any():
        threshold = torch.where(nucleus, _nucleus_threshold(scaled, ordered, threshold, top_p), threshold)
    # p >= min_p * max p, in logarithms: the normaliser drops out.
    relative = torch.where(min_p > 0, ordered[:, 0] + torch.log(min_p), -math.inf)
    return torch.maximum(threshold, relative)


def _descending(scaled: torch.Tensor, count: int) -> torch.Tensor:
    if count >= scaled.shape[1]:
        return scaled.sort(dim=-1, descending=True).values
    return scaled.topk(count, dim=-1).values


def _nucleus_threshold(
    scaled: torch.Tensor, ordered: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """z of the last token of the nucleus, [T]; float64 sums, so that the order of summation decides nothing."""
    largest = ordered[:, :1]
    weight = (scaled - largest).double().exp_().masked_fill_(scaled < threshold[:, None], 0.0)
    needed = weight.sum(dim=-1) * top_p.double().clamp(min=0.0)
    mass = (ordered - largest).double().exp_().masked_fill_(ordered < threshold[:, None], 0.0).cumsum(dim=-1)
    reached = mass >= needed[:, None]
    if ordered.shape[1] < scaled.shape[1] and not bool(reached[:, -1][top_p < 1].all()):
        return _nucleus_threshold(scaled, _descending(scaled, scaled.shape[1]), threshold, top_p)
    # Rounding may leave the whole mass just below `needed`; then all that is left of top-k stays.
    last = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), ordered.shape[1] - 1)
    return torch.maximum(ordered.gather(1, last[:, None]).squeeze(1), threshold)


def _topk_smallest_id_first(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row, best first, equal ones by id: `torch.topk` leaves both orders open."""
    best, ids = scores.topk(k, dim=-1)
    tied = ((scores >= best[:, -1:]).sum(dim=-1) > k) & (best[:, -1] > -math.inf)
    if bool(tied.any()):
        best, ids = scores.sort(dim=-1, descending=True, stable=True)
        return best[:, :k], ids[:, :k]
    ids = ids.sort(dim=-1).values
    best, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)
