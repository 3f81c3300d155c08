"""Verification of draft chains by speculative sampling: keep a draft token with probability min(1, p / q).

    accept draft i iff u[i] * q[i, d[i]] < p[i, d[i]]
    at the first rejection, i: emit a sample of max(p[i] - q[i], 0) (of p[i] where that is 0 everywhere), and stop
    all accepted: emit a sample of p[S]

If d[i] was sampled from q[i], every emitted token is an exact sample of its row of p. An id outside [0, V) ends the
chain: the final token is then a sample of p at its position.

Randomness comes from `outrider.kernels.noise`. The words of position i are those of the ids 2i and 2i + 1 with

    seed     = seed + (offset >> 32) * 0x9E3779B97F4A7C15 modulo 2^64
    position = offset modulo 2^32
    choice   = the row of the batch where one seed serves all rows, else 0

in the stream of coins for u[i], in that of residuals for a final token at position i. Two words x, y give the uniform
((x >> 5) * 2^26 + (y >> 6)) * 2^-53 in [0, 1), and every comparison with it is float64.

Shapes: B requests, S drafts of a request, V vocabulary size.
Source: arXiv 2211.17192 and 2302.01318; operator of the same name in FlashInfer.
"""

from __future__ import annotations

import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, check_at_least, check_dtype, check_place, check_tensors
from outrider.kernels.backend import check_shape, uses_triton
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_uint32_reference
from outrider.kernels.sampling.residual_sampling import residual_tokens_reference
from outrider.kernels.verification.chain_sampling_kernels import OFFSET_FACTOR, launch_chain_sampling, signed

__all__ = [
    "chain_speculative_sampling",
    "chain_speculative_sampling_reference",
    "chain_uniforms_reference",
    "judge_chains_reference",
]

_Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
) -> _Verdict:
    """Judge each request's drafts from left to right.

    Args:
        draft_probs: [B, S, V] float32 or bfloat16, q.
        draft_token_ids: [B, S] int32 or int64, sampled from q; an id outside [0, V) ends a chain.
        target_probs: [B, S + 1, V] float32 or bfloat16, p.
        maybe_output_accepted_token_num: [B] int32 or int64; `accepted` is added to it.
        maybe_output_emitted_draft_token_num: [B] int32 or int64; `emitted` is added to it.
        deterministic: has no effect: the same inputs always give the same bits.
        generator: draws the seed if none is given; torch's default generator otherwise.
        seed: any int, taken modulo 2^64, or an int64 tensor [1] or [B]. With [B] a row's stream does not depend on
            where the row stands.
        offset: like seed, 0 by default. Each pair of seed and offset has a stream of its own.

    Returns:
        Tokens [B, S + 1] int32, the emitted drafts, then the final token, then -1; accepted [B], the positions whose
        draft passes its test whether or not the walk got there; emitted [B], the drafts emitted. The last two are the
        given tensors, or fresh int32.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    counters = (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    probabilities = (torch.float32, torch.bfloat16)
    check_shape("draft_token_ids", draft_token_ids, ("B", "S"))
    check_tensors(
        target_probs=(target_probs, (draft_token_ids.shape[0], draft_token_ids.shape[1] + 1, "V"), probabilities),
        draft_token_ids=(draft_token_ids, ("B", "S"), INDEX_DTYPES),
        draft_probs=(draft_probs, ("B", "S", "V"), probabilities),
        maybe_output_accepted_token_num=(counters[0], ("B",), INDEX_DTYPES),
        maybe_output_emitted_draft_token_num=(counters[1], ("B",), INDEX_DTYPES),
    )
    check_at_least("target_probs vocabulary", target_probs.shape[2], 1)
    if seed is None:
        where = target_probs.device if generator is None else generator.device
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=where, generator=generator)
        seed = int(seed) if where.type == "cpu" else seed
    offset = 0 if offset is None else offset
    for name, value in (("seed", seed), ("offset", offset)):
        _check_key(name, value, target_probs)
    run = launch_chain_sampling if uses_triton(target_probs) else _counted_reference
    return run(draft_probs, draft_token_ids, target_probs, counters, seed, offset)


def _check_key(name: str, value: int | torch.Tensor, target_probs: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if value.dim() != 1 or value.shape[0] not in (1, target_probs.shape[0]):
        raise ValueError(f"{name}: shape {list(value.shape)} given, [1] or [{target_probs.shape[0]}] needed")
    check_dtype(name, value, (torch.int64,))
    check_place(name, value, target_probs.device, "target_probs")


def chain_speculative_sampling_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    seed: int | torch.Tensor,
    offset: int | torch.Tensor = 0,
) -> _Verdict:
    """`chain_speculative_sampling` in plain torch: tokens, accepted and emitted, all int32."""
    requests, drafts = draft_token_ids.shape
    uniforms = chain_uniforms_reference(seed, offset, requests, drafts + 1)
    coins, finals = (uniform.to(target_probs.device) for uniform in uniforms)
    return judge_chains_reference(draft_probs, draft_token_ids, target_probs, coins[:, :drafts], finals)


def chain_uniforms_reference(
    seed: int | torch.Tensor, offset: int | torch.Tensor, requests: int, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The coin and the residual uniform of each request and position, both [requests, positions] float64."""
    seeds, offsets = (
        (value.cpu() if isinstance(value, torch.Tensor) else torch.tensor([signed(value)])).expand(requests)
        for value in (seed, offset)
    )
    one_seed = not isinstance(seed, torch.Tensor) or len(seed) == 1
    rows = torch.arange(requests) if one_seed else torch.zeros(requests, dtype=torch.int64)
    keys = seeds + (offsets >> 32) * OFFSET_FACTOR
    ids = torch.arange(2 * positions).expand(requests, -1)
    coins, finals = (
        philox_uint32_reference(keys, offsets, ids, stream, rows).view(requests, positions, 2)
        for stream in (STREAM_COINS, STREAM_RESIDUAL)
    )
    return _uniforms_of_words(coins), _uniforms_of_words(finals)


def _uniforms_of_words(words: torch.Tensor) -> torch.Tensor:
    return ((words[..., 0] >> 5) * 2**26 + (words[..., 1] >> 6)).double() * 2**-53


def judge_chains_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    finals: torch.Tensor,
) -> _Verdict:
    """The verdict for given uniforms.

    Args:
        draft_probs: [B, S, V].
        draft_token_ids: [B, S].
        target_probs: [B, S + 1, V].
        coins: [B, S] float64, u of each draft's test.
        finals: [B, S + 1] float64, u of a final token drawn at each position.

    Returns:
        Tokens [B, S + 1], accepted [B] and emitted [B], all int32.
    """
    requests, drafts = draft_token_ids.shape
    vocab_size = target_probs.shape[2]
    ids = draft_token_ids.long()
    known = ((ids >= 0) & (ids < vocab_size)).cumprod(1).bool()
    at = ids.clamp(0, vocab_size - 1)[..., None]
    q = draft_probs.gather(2, at)[..., 0].double()
    p = target_probs[:, :drafts].gather(2, at)[..., 0].double()
    passes = known & (coins * q < p)
    emitted = passes.cumprod(1).sum(1)

    row = torch.arange(requests, device=ids.device)
    target = target_probs[row, emitted].float()
    # A rejection is what leaves a residual: neither the end of the chain nor an unknown id does.
    rejected = emitted < known.sum(1)
    draft = torch.zeros_like(target)
    draft[rejected] = draft_probs[row[rejected], emitted[rejected]].float()
    residual = (target - draft).clamp(min=0)
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, target.clamp(min=0))
    final = residual_tokens_reference(residual, finals[row, emitted])

    position = torch.arange(drafts + 1, device=ids.device)
    tokens = torch.nn.functional.pad(ids, (0, 1), value=-1).masked_fill(position >= emitted[:, None], -1)
    tokens[row, emitted] = final
    return tokens.int(), passes.sum(1).int(), emitted.int()


def _counted_reference(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    counters: tuple[torch.Tensor | None, torch.Tensor | None],
    seed: int | torch.Tensor,
    offset: int | torch.Tensor,
) -> _Verdict:
    tokens, *counts = chain_speculative_sampling_reference(draft_probs, draft_token_ids, target_probs, seed, offset)
    accepted, emitted = (
        count if given is None else given.add_(count) for count, given in zip(counts, counters, strict=True)
    )
    return tokens, accepted, emitted
