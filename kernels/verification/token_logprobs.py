"""Log probabilities of emitted tokens and of the best others, under the softmax of the raw logits.

    rank_logits        before any processor: what a row's log probabilities need beside its logits, and its K best ids
    report_logprobs    after the walk: the log probabilities of what was emitted, written to the host's memory

    log_mass = log sum exp(logit - largest logit)        log p = (logit - largest logit) - log_mass

all in float32. One float32 number for the log-sum-exp would round log p by 1e-6 and more where logits are large; these
two do not. The best are ordered by logit, ties by the smaller id, so the first of them has the largest logit.

Both work for lines of sessions that ask, and for no others. Shapes: L lines of logits, one a row of the step, V
vocabulary size, K best ids of a line; S rows of the pool, N sessions of the step, M most rows of a session.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.argument_checks import check_at_least, check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.pack import Packed
from outrider.kernels.sampling.coupled_rows import ordered, unordered
from outrider.kernels.verification.walk import DRAFTERS_SHIFT, Walks

__all__ = [
    "Logprobs",
    "logprob_words",
    "rank_logits",
    "rank_logits_reference",
    "report_logprobs",
    "report_logprobs_reference",
]

_LOGITS = (torch.float32, torch.bfloat16)
_HOST = torch.device("cpu")
_LOW_WORD = 0xFFFFFFFF
_LOW = tl.constexpr(_LOW_WORD)
# Below and above every key.
_LEAST, _MOST = tl.constexpr(-(1 << 63)), tl.constexpr((1 << 63) - 1)
_OFFSET = tl.constexpr((1 << DRAFTERS_SHIFT) - 1)
# Logits that a program looks at together, and emitted tokens that one reports together.
_BLOCK = 4096
_RANKING_WARPS = 8
_REPORTED = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Logprobs:
    """Best logits and mass of each line, as log probabilities need them. Build one with `allocate`.

    Of lines that do not ask nothing is written.

    Attributes:
        log_mass: [L] float32: log of the sum of exp(logit - largest logit).
        top_tokens: [L, K] int32: best first; -1 behind the last id of a smaller vocabulary.
        top_logits: [L, K] float32: theirs; -inf there.
    """

    log_mass: torch.Tensor
    top_tokens: torch.Tensor
    top_logits: torch.Tensor

    @classmethod
    def allocate(cls, lines: int, k: int, device: torch.device | str = "cpu") -> Logprobs:
        """Return room for L = `lines` lines and K = `k` best of each.

        Raises:
            ValueError: a size below 1.
        """
        check_at_least("lines", lines, 1)
        check_at_least("k", k, 1)
        return cls(
            log_mass=torch.zeros(lines, dtype=torch.float32, device=device),
            top_tokens=torch.zeros(lines, k, dtype=torch.int32, device=device),
            top_logits=torch.zeros(lines, k, dtype=torch.float32, device=device),
        )


def logprob_words(k: int) -> int:
    """Return the int32 words of a token in the host's buffer: its log probability, then K ids and K log probabilities.

    Log probabilities are float32 bits.
    """
    return 1 + 2 * k


def rank_logits(logits: torch.Tensor, pool_rows: torch.Tensor, asked: torch.Tensor, out: Logprobs) -> None:
    """Rank the logits of every line whose session asks for log probabilities.

    Args:
        logits: [L, V] float32 or bfloat16, as the model gave them; consecutive in V.
        pool_rows: [L] int32, the line's row of the pool; -1 for padding.
        asked: [S] int32, how many alternatives the session asks for; -1: no log probabilities at all.
        out: written, for at least L lines.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    _check_logits(logits)
    check_shape("pool_rows", pool_rows, (logits.shape[0],))
    check_shape("asked", asked, ("S",))
    for name, tensor in (("pool_rows", pool_rows), ("asked", asked)):
        check_dtype(name, tensor, (torch.int32,))
        check_place(name, tensor, logits.device, "logits")
    check_place("out", out.log_mass, logits.device, "logits")
    check_at_least("lines of out", out.log_mass.shape[0], logits.shape[0])
    if not uses_triton(logits):
        rank_logits_reference(logits, pool_rows, asked, out)
        return
    most = out.top_tokens.shape[1]
    _rank_logits_kernel[(logits.shape[0],)](
        logits,
        pool_rows.contiguous(),
        asked.contiguous(),
        out.log_mass,
        out.top_tokens,
        out.top_logits,
        logits.stride(0),
        logits.shape[1],
        K=most,
        BLOCK_K=max(triton.next_power_of_2(most), 32),
        BLOCK=min(max(triton.next_power_of_2(logits.shape[1]), 32), _BLOCK),
        num_warps=_RANKING_WARPS,
        **early_options(logits.device),
    )


def _check_logits(logits: torch.Tensor) -> None:
    check_shape("logits", logits, ("L", "V"))
    check_dtype("logits", logits, _LOGITS)
    if logits.stride(1) != 1:
        raise ValueError(f"logits: strides {logits.stride()} given, consecutive ids needed")


def rank_logits_reference(logits: torch.Tensor, pool_rows: torch.Tensor, asked: torch.Tensor, out: Logprobs) -> None:
    """`rank_logits` in plain torch."""
    asks = (pool_rows >= 0) & (asked[pool_rows.clamp(min=0)] >= 0)
    lines = asks.nonzero().squeeze(1)
    if len(lines) == 0:
        return
    wanted = logits[lines].float()
    count = min(out.top_tokens.shape[1], wanted.shape[1])
    # No two keys are equal, so the best are in one order only.
    bits = (wanted + 0.0).view(torch.int32)
    ranked = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = (ranked | (_LOW_WORD - torch.arange(wanted.shape[1]))).topk(count, dim=1).values
    tokens = _LOW_WORD - (keys & _LOW_WORD)
    out.top_tokens[lines] = -1
    out.top_logits[lines] = float("-inf")
    out.top_tokens[lines, :count] = tokens.int()
    out.top_logits[lines, :count] = wanted.gather(1, tokens)
    out.log_mass[lines] = (wanted - wanted.amax(dim=1, keepdim=True)).exp().sum(dim=1).log()


@jit
def _rank_logits_kernel(
    logits_ptr,  # [L, V] float32 or bfloat16
    pool_rows_ptr,  # [L] int32
    asked_ptr,  # [S] int32
    log_mass_ptr,  # [L] float32
    top_tokens_ptr,  # [L, K] int32
    top_logits_ptr,  # [L, K] float32
    logits_stride,
    vocab_size,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a line: keys order the logits, larger ids below smaller ones, and the K best so far are kept."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line = tl.program_id(0).to(tl.int64)
    pool_row = tl.load(pool_rows_ptr + line)
    if tl.load(asked_ptr + pool_row, mask=pool_row >= 0, other=-1) >= 0:
        number = tl.arange(0, BLOCK_K)
        # No two are equal, so that one is replaced at a time.
        unused = tl.full((BLOCK_K,), _LEAST, tl.int64) + number
        best = tl.where(number < K, unused, tl.full((BLOCK_K,), _MOST, tl.int64))
        worst = tl.min(best)
        largest, mass = float("-inf"), 0.0
        for begin in range(0, vocab_size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            logits = tl.load(logits_ptr + line * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
            top = tl.max(logits)
            raised = tl.maximum(largest, top)
            shift = tl.where(raised > float("-inf"), raised, 0.0)
            mass = mass * tl.exp(largest - shift) + tl.sum(tl.exp(logits - shift))
            largest = raised
            if ordered(top) >= worst >> 32:
                keys = (ordered(logits) << 32) | (_LOW - ids.to(tl.int64))
                keys = tl.where(inside, keys, _LEAST)
                found = tl.max(keys)
                while found > worst:
                    best = tl.where(best == worst, found, best)
                    worst = tl.min(best)
                    keys = tl.where(keys == found, _LEAST, keys)
                    found = tl.max(keys)
        kept = number < K
        is_better = (best[None, :] > best[:, None]) & kept[None, :]
        rank = tl.sum(is_better.to(tl.int32), axis=1)
        is_id = best >= _LEAST + BLOCK_K
        token = tl.where(is_id, _LOW - (best & _LOW), -1).to(tl.int32)
        logit = tl.where(is_id, unordered(best >> 32), float("-inf"))
        tl.store(top_tokens_ptr + line * K + rank, token, mask=kept)
        tl.store(top_logits_ptr + line * K + rank, logit, mask=kept)
        tl.store(log_mass_ptr + line, tl.log(mass))


def report_logprobs(
    logits: torch.Tensor,
    ranked: Logprobs,
    packed: Packed,
    walks: Walks,
    asked: torch.Tensor,
    reports: torch.Tensor,
    rounds: torch.Tensor,
) -> None:
    """Write the log probabilities of emitted tokens into the host's buffer of this round.

    The j-th token of a session was chosen at its root, for j = 0, or at the (j - 1)-th accepted row. `publish_report`
    makes the buffer valid.

    Args:
        logits: [L, V] float32 or bfloat16, those that were ranked, unchanged; consecutive in V.
        ranked: as `rank_logits` wrote it.
        packed: the step.
        walks: as `walk` wrote them.
        asked: [S] int32, as `rank_logits` took it.
        reports: [2, N, M, 1 + 2 K] int32, the host's: by session of the step and emitted token, words as of
            `logprob_words`. Sessions that do not ask, and tokens past those emitted, are not written.
        rounds: [1] int64, rounds reported.

    Raises:
        ValueError: a shape, dtype, device or layout that does not fit, naming the argument.
    """
    _check_logits(logits)
    check_shape("asked", asked, (walks.num_tokens.shape[0],))
    check_dtype("asked", asked, (torch.int32,))
    check_shape("rounds", rounds, (1,))
    check_dtype("rounds", rounds, (torch.int64,))
    placed = {"ranked": ranked.log_mass, "packed": packed.tokens, "walks": walks.tokens}
    for name, tensor in (placed | {"asked": asked, "rounds": rounds}).items():
        check_place(name, tensor, logits.device, "logits")
    most, words = walks.tokens.shape[1], logprob_words(ranked.top_tokens.shape[1])
    check_shape("reports", reports, (2, "N", most, words))
    check_at_least("sessions of reports", reports.shape[1], packed.pool_rows.shape[0])
    check_dtype("reports", reports, (torch.int32,))
    check_place("reports", reports, _HOST, "the host")
    if not reports.is_contiguous():
        raise ValueError(f"reports: strides {reports.stride()} given, a contiguous tensor needed")
    if not uses_triton(logits):
        report_logprobs_reference(logits, ranked, packed, walks, asked, reports, rounds)
        return
    k = ranked.top_tokens.shape[1]
    _report_logprobs_kernel[(packed.pool_rows.shape[0],)](
        logits,
        ranked.log_mass,
        ranked.top_tokens,
        ranked.top_logits,
        packed.pool_rows,
        packed.query_start,
        walks.tokens,
        walks.accepted,
        walks.num_emitted,
        asked.contiguous(),
        reports,
        rounds,
        logits.stride(0),
        logits.shape[1],
        most,
        reports.stride(0),
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        TOKENS=_REPORTED,
        num_warps=4,
        **early_options(logits.device),
    )


def report_logprobs_reference(
    logits: torch.Tensor,
    ranked: Logprobs,
    packed: Packed,
    walks: Walks,
    asked: torch.Tensor,
    reports: torch.Tensor,
    rounds: torch.Tensor,
) -> None:
    """`report_logprobs` in plain torch, one session after the other."""
    buffer, k = reports[int(rounds) % 2], ranked.top_tokens.shape[1]
    starts = packed.query_start.tolist()
    for session, (pool_row, emitted) in enumerate(
        zip(packed.pool_rows.tolist(), walks.num_emitted.tolist(), strict=False)
    ):
        if emitted == 0 or asked[pool_row] < 0:
            continue
        offsets = walks.accepted[session, : emitted - 1] & ((1 << DRAFTERS_SHIFT) - 1)
        lines = starts[session] + torch.cat((offsets.new_zeros(1), offsets))
        tokens = walks.tokens[pool_row, :emitted].long()
        chosen = logits[lines, tokens.clamp(max=logits.shape[1] - 1)].float()
        # The synthetic rule may emit an id that the model has not got.
        chosen = torch.where(tokens < logits.shape[1], chosen, float("-inf"))
        largest, log_mass = ranked.top_logits[lines, :1], ranked.log_mass[lines, None]
        written = buffer[session, :emitted]
        written[:, :1] = (chosen[:, None] - largest - log_mass).view(torch.int32)
        written[:, 1 : 1 + k] = ranked.top_tokens[lines]
        written[:, 1 + k :] = (ranked.top_logits[lines] - largest - log_mass).view(torch.int32)


@jit(do_not_specialize=["vocab_size", "most", "buffer_stride"])
def _report_logprobs_kernel(
    logits_ptr,  # [L, V] float32 or bfloat16
    log_mass_ptr,  # [L] float32
    top_tokens_ptr,  # [L, K] int32
    top_logits_ptr,  # [L, K] float32
    pool_rows_ptr,  # [N] int32
    query_start_ptr,  # [N + 1] int32
    tokens_ptr,  # [S, M] int32
    accepted_ptr,  # [N, M] int32
    num_emitted_ptr,  # [N] int32
    asked_ptr,  # [S] int32
    reports_ptr,  # [2, N, M, 1 + 2 K] int32, the host's
    rounds_ptr,  # [1] int64
    logits_stride,
    vocab_size,
    most,
    buffer_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    session = tl.program_id(0)
    pool_row, emitted = tl.load(pool_rows_ptr + session), tl.load(num_emitted_ptr + session)
    if (emitted > 0) & (tl.load(asked_ptr + tl.maximum(pool_row, 0)) >= 0):
        buffer = reports_ptr + (tl.load(rounds_ptr) % 2) * buffer_stride
        root = tl.load(query_start_ptr + session)
        place = tl.arange(0, BLOCK_K)[None, :]
        for begin in range(0, emitted, TOKENS):
            number = begin + tl.arange(0, TOKENS)
            here = number < emitted
            offset = tl.load(accepted_ptr + session * most + number - 1, mask=here & (number > 0), other=0) & _OFFSET
            line = (root + offset).to(tl.int64)
            token = tl.load(tokens_ptr + pool_row * most + number, mask=here, other=0)
            chosen = tl.load(
                logits_ptr + line * logits_stride + token, mask=here & (token < vocab_size), other=float("-inf")
            ).to(tl.float32)
            largest = tl.load(top_logits_ptr + line * K, mask=here, other=0.0)
            log_mass = tl.load(log_mass_ptr + line, mask=here, other=0.0)
            words = buffer + (session.to(tl.int64) * most + number) * (1 + 2 * K)
            tl.store(words, (chosen - largest - log_mass).to(tl.int32, bitcast=True), mask=here)
            both = here[:, None] & (place < K)
            top_tokens = tl.load(top_tokens_ptr + line[:, None] * K + place, mask=both)
            top_logits = tl.load(top_logits_ptr + line[:, None] * K + place, mask=both, other=0.0)
            tl.store(words[:, None] + 1 + place, top_tokens, mask=both)
            logprobs = top_logits - largest[:, None] - log_mass[:, None]
            tl.store(words[:, None] + 1 + K + place, logprobs.to(tl.int32, bitcast=True), mask=both)
