"""Triton side of `outrider.kernels.coupled_sampling`, whose formulas and conventions hold here.

Three launches, none of which writes anything of size V:

    scan_kernel     reads every logit once. Of a row without filters it estimates z + G, with logarithms that take one
                    instruction each and an error that is bounded, and keeps the largest of every tile; of a filtered
                    row it keeps the largest logit and the mass of every tile.
    bound_kernel    one program a row: bounds within which the choice, and the filters' threshold, must lie.
    choose_kernel   lists the few logits within the bounds, tile by tile where a tile reaches them, and chooses among
                    them exactly: thresholds by counts and masses that are whole numbers, scores with exact logarithms.

Nothing that is estimated, sampled or guessed can change the outcome, only the time it takes: the list is checked to be
complete, and the whole row is gone through where it is not.

Shapes: T rows, V vocabulary size, C tiles of a row, k tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.backend import triton
from outrider.kernels.coupled_bounds import bound_kernel
from outrider.kernels.coupled_choose import choose_kernel, threshold_kernel
from outrider.kernels.coupled_list import list_kernel
from outrider.kernels.coupled_scan import scan_kernel
from outrider.kernels.sampling_rows import SamplingRows

__all__ = ["launch_choice", "launch_topk"]

# Under this name `outrider.kernels.filtered_probs` takes it.
_threshold_kernel = threshold_kernel

# Places of a row's list, fewer where a batch has very many rows; the outcome does not depend on it.
_LIST = 16384
_LISTS = 1 << 24
_SAMPLE = 4096
# Programs of `choose_kernel` over all rows: some for each multiprocessor.
_PROGRAMS = 1056
_SCAN = (2048, 4)
_CHOOSE = (1024, 8)
_BOUND_WARPS = 8


def launch_choice(rows: SamplingRows) -> torch.Tensor:
    """The choice of each row, [T] int64."""
    return _launch(rows, 1, with_mass=False).tokens.squeeze(1)


def launch_topk(rows: SamplingRows, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, k] int64, log q [T, k] and scores [T, k] float32; -1 and -inf where tokens run out."""
    chosen = _launch(rows, k, with_mass=True)
    return chosen.tokens, chosen.log_q, chosen.scores


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Chosen:
    """What the launches leave: thresholds [T], tokens [T, k]; log q and scores [T, k] where masses were asked for."""

    thresholds: torch.Tensor
    tokens: torch.Tensor
    log_q: torch.Tensor
    scores: torch.Tensor


def _launch(rows: SamplingRows, k: int, *, with_mass: bool) -> _Chosen:
    logits = rows.logits
    count, vocab_size = logits.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    log_q = empty(count, k if with_mass else 0)
    chosen = _Chosen(
        thresholds=empty(count),
        tokens=empty(count, k, dtype=torch.int64),
        log_q=log_q,
        scores=torch.empty_like(log_q),
    )
    if count == 0:
        return chosen
    # At most 256 tiles a row, so that a program can rank them against each other.
    tile = min(triton.next_power_of_2(vocab_size), max(1024, triton.next_power_of_2(triton.cdiv(vocab_size, 256))))
    tile = max(tile, 16)
    tiles = triton.cdiv(vocab_size, tile)
    parts = 1 if tiles == 1 else max(_SCAN[0] // tile, 1)
    places = min(_LIST, max(1024, _LISTS // triton.next_power_of_2(count)), max(triton.next_power_of_2(vocab_size), 16))
    bias = logits if rows.logit_bias is None else rows.logit_bias
    filters = [column.contiguous() for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)]
    choice_index = rows.positions if rows.choice_index is None else rows.choice_index
    noise = [column.contiguous() for column in (rows.seeds, rows.positions, choice_index)]
    strides = (*logits.stride(), *bias.stride(), vocab_size, tiles)
    stats = empty(3, count, tiles).unbind()
    bounds = (empty(count, 4), empty(count, dtype=torch.int32), empty(count, dtype=torch.int64))
    flags = {"HAS_BIAS": rows.logit_bias is not None, "WITH_MASS": with_mass}
    noise_flags = {"HAS_CHOICE": rows.choice_index is not None}
    scan_kernel[(count, triton.cdiv(tiles, parts))](
        logits,
        bias,
        *filters,
        *noise,
        *stats,
        *strides,
        **flags,
        **noise_flags,
        PARTS=parts,
        TILE=tile,
        num_warps=_SCAN[1],
    )
    ranked = max(triton.next_power_of_2(tiles), 16)
    bound_kernel[(count,)](
        logits, bias, *filters, *stats, *bounds, *strides, k, **flags, LIST=places, SAMPLE=_SAMPLE, TILES=ranked,
        num_warps=_BOUND_WARPS,
    )  # fmt: skip
    listing = (empty(count, places), empty(count, places, dtype=torch.int32))
    programs = max(triton.cdiv(tiles, 64), min(tiles, triton.cdiv(_PROGRAMS, count)))
    list_kernel[(count, programs)](
        logits,
        bias,
        filters[0],
        *noise,
        stats[0],
        *bounds,
        *listing,
        *strides,
        HAS_BIAS=flags["HAS_BIAS"],
        **noise_flags,
        LIST=places,
        TILE=tile,
        num_warps=4,
    )
    choose_kernel[(count,)](
        logits, bias, *filters, *noise, *stats[1:], *bounds, *listing,
        chosen.thresholds, chosen.tokens, chosen.log_q, chosen.scores,
        *strides, **flags, **noise_flags,
        K=k, BLOCK_K=triton.next_power_of_2(k), LIST=places, TILES=ranked, BLOCK=min(places, _CHOOSE[0]),
        num_warps=_CHOOSE[1],
    )  # fmt: skip
    return chosen
