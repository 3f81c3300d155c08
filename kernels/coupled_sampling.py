"""Coupled sampling: choices by argmax of log probability plus noise that draft and target share.

    z      = (logits + bias) / temperature
    thr    = the largest of the thresholds of top-k, top-p and min-p (`_thresholds`); z == thr stays
    choice = argmax over {v : z[v] >= thr} of z[v] + G[v]          an exact sample of the filtered law (Gumbel-max)
    topk   = the k largest z[v] + G[v] of the same set, log q = z - logsumexp of z over that set

with G of `outrider.kernels.noise`. At temperature 0 the filters and the noise are left out: the choice is the argmax of
the logits, and `coupled_topk_scored` ranks by logits with their log softmax as score. Ties go to the smallest id.
z and z + G are float32 as they stand, without a first pass for the row's maximum: at temperature 0.01 and logits around
20 the noise rounds to 1e-4, and far below that a choice is greedy.

Conventions: top_k 0 or below is off, top_p 1 or above is off, min_p 0 is off. Order: top-k, then top-p on what is left,
renormalised (the smallest set of most probable tokens whose mass reaches top_p), then min-p relative to the largest
probability. Tokens that tie with the last one kept are kept.

Shapes: T rows, V vocabulary size, k tokens of a row.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from outrider.kernels.backend import uses_triton
from outrider.kernels.noise import STREAM_CHOICE, gumbel_noise_reference
from outrider.kernels.sampling.coupled_kernels import launch_choice, launch_topk
from outrider.kernels.sampling.row_arguments import SamplingRows, checked_rows

__all__ = [
    "coupled_choice",
    "coupled_choice_reference",
    "coupled_topk",
    "coupled_topk_scored",
    "coupled_topk_scored_reference",
    "row_threshold",
]


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
    rows = checked_rows(logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, choice_index)
    return launch_choice(rows) if uses_triton(logits) else coupled_choice_reference(rows)


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
    rows = checked_rows(logits, seeds, positions, temperature, top_k, top_p, min_p, logit_bias, choice_index)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k: {k} given, 1 to V = {logits.shape[1]} needed")
    return launch_topk(rows, k) if uses_triton(logits) else coupled_topk_scored_reference(rows, k)


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


def coupled_choice_reference(rows: SamplingRows) -> torch.Tensor:
    """`coupled_choice` in plain torch. Greedy rows draw no noise; a row without filters is not sorted."""
    return _argmax(_scaled_and_scores(rows)[1])


def coupled_topk_scored_reference(rows: SamplingRows, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`coupled_topk_scored` in plain torch: k times the best of what is left, which also orders ties by id."""
    scaled, scores = _scaled_and_scores(rows)
    scores = scores.clone() if scores is scaled else scores
    picked = []
    for _ in range(k):
        token = _argmax(scores)[:, None]
        picked.append((token, scores.gather(1, token)))
        scores.scatter_(1, token, -math.inf)
    tokens, best = (torch.cat(column, dim=1) for column in zip(*picked, strict=True))
    log_q = scaled.log_softmax(dim=-1).gather(1, tokens)
    # log q + G from z + G, by the row's normaliser: subtracting one number keeps the order exactly.
    log_mass = scaled.gather(1, tokens[:, :1]) - log_q[:, :1]
    absent = best == -math.inf
    return (
        tokens.masked_fill(absent, -1),
        log_q.masked_fill(absent, -math.inf),
        (best - log_mass).masked_fill(absent, -math.inf),
    )


def _scaled_and_scores(rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """z (-inf outside the support) and z + G, [T, V]; the logits themselves twice for greedy rows."""
    logits = _biased(rows)
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    if sampled.numel() == 0:
        return logits, logits
    if sampled.numel() == logits.shape[0]:
        return _perturbed(logits, rows)
    scaled, scores = logits.clone(), logits.clone()
    scaled[sampled], scores[sampled] = _perturbed(logits[sampled], _take(rows, sampled))
    return scaled, scores


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Argmax of each row, the smallest id of equal ones; numpy takes a tenth of torch's time for it on a CPU."""
    return torch.from_numpy(scores.numpy().argmax(axis=-1))


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
    """The smallest z kept in each row, [T]: each of the three filters keeps what reaches a threshold."""
    # numpy sorts float32 thirty times faster than torch on a CPU.
    ascending = np.sort(scaled.numpy(), axis=-1)
    parameters = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    return torch.tensor([row_threshold(row, *of_row) for row, of_row in zip(ascending, parameters, strict=True)])


def row_threshold(ascending: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """Return the smallest z that all three filters keep, of a row's z in ascending order, [V] float32."""
    largest = ascending[-1]
    threshold = np.float32(-np.inf)
    if not np.isfinite(largest):
        # Nothing is allowed, or nothing compares: infinities stay, and only they.
        return float(largest) if largest > 0 else float(threshold)
    if 0 < top_k < ascending.size:
        threshold = ascending[-top_k]
    if top_p < 1:
        descending = ascending[np.searchsorted(ascending, threshold) :][::-1]
        mass = np.cumsum(np.exp(descending - largest), dtype=np.float64)
        threshold = descending[np.searchsorted(mass, top_p * mass[-1])]
    if min_p > 0:
        # p >= min_p * max p, in logarithms: the normaliser drops out.
        threshold = max(threshold, largest + np.float32(math.log(min_p)))
    return float(threshold)
