"""Logits processors of a step's nodes inside the step: penalties, bias, allowed tokens and the ban of early stops.

    NodeProcessors    what changes the logits of which session, as columns on the device
    process_logits    a step's logits after the processors of their sessions, each line with its own path counted
    count_tokens      committed tokens join the counts; called beside `re_root`, with the same arguments

For a line of session s, whose next token is to stand at index i, and token v, with c = how often v occurs in the
session's output and among the line's own token and its ancestors below the root:

    penalties   v in prompt, output or path:   l = l / repetition if l > 0 else l * repetition
                                               l = l - frequency * c - (presence if c > 0)
    additive    l = l + bias[s, v], or -inf where the session names allowed tokens and v is not one of them
    stop ban    i < min_end[s] and v in stops[s]:   l = -inf

in float32 and in this order, without fused multiply-adds: both sides, and reference and kernel, get the same bits.
Penalties as defined by CTRL (arXiv 1909.05858, repetition) and by the OpenAI API (presence, frequency).

Shapes: L lines, at which a token is chosen (`SampledRows`), V vocabulary, M tokens of a row; S rows and C entries of
the pool, R rows of the step.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.kernels.argument_checks import check_dtype, check_place
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton
from outrider.kernels.early_launch import early_options
from outrider.kernels.pool.columns import MAX_STOPS, Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.sampling.rows import SampledRows

__all__ = [
    "IN_PROMPT",
    "NodeProcessors",
    "ProcessorKind",
    "count_tokens",
    "count_tokens_reference",
    "process_logits",
    "process_logits_reference",
]


class ProcessorKind(enum.IntFlag):
    """Kinds of processors of a session, as bits."""

    PENALTIES = 1
    ADDITIVE = 2
    """A bias, or a list of allowed tokens."""
    STOP_BAN = 4


IN_PROMPT = 1 << 30
"""Bit of `NodeProcessors.counts`: the token is in the prompt."""

_PENALTIES = tl.constexpr(int(ProcessorKind.PENALTIES))
_ADDITIVE = tl.constexpr(int(ProcessorKind.ADDITIVE))
_STOP_BAN = tl.constexpr(int(ProcessorKind.STOP_BAN))
_COUNT = tl.constexpr(IN_PROMPT - 1)
_STOPS = tl.constexpr(MAX_STOPS)
# Tokens that a program handles; its warps. Each program walks the line's path once.
_BLOCK, _WARPS = 2048, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeProcessors:
    """Processors of each row's session. Build one with `allocate`.

    Attributes:
        kinds: [S] int32, the bits of `ProcessorKind`.
        penalties: [S, 3] float32: repetition (1 is off), presence and frequency (0 is off).
        counts: [S, V] int32, how often a token occurs in the output, with the bit IN_PROMPT; of rows with penalties.
        additive: [S, V] float32, the bias; -inf for tokens that are not allowed.

    `process_logits` takes the first columns of both, too, for a model of fewer tokens.
    """

    kinds: torch.Tensor
    penalties: torch.Tensor
    counts: torch.Tensor
    additive: torch.Tensor

    @classmethod
    def allocate(cls, *, sessions: int, vocab_size: int, device: torch.device | str = "cpu") -> NodeProcessors:
        """Return the columns of S = `sessions` rows, none of which has a processor."""

        def column(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(sessions, *shape, dtype=dtype, device=device)

        return cls(
            kinds=column(),
            penalties=column(3, dtype=torch.float32),
            counts=column(vocab_size),
            additive=column(vocab_size, dtype=torch.float32),
        )

    @torch.inference_mode()
    def describe(
        self,
        row: int,
        *,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
        allowed: Sequence[int] = (),
        bans_stops: bool = False,
        prompt: Sequence[int] | npt.NDArray[np.int32] = (),
        output: Sequence[int] | npt.NDArray[np.int32] = (),
    ) -> None:
        """Write all columns of a row that no launched step uses, on the current stream; the host may wait for that.

        Args:
            row: of the pool.
            repetition, presence, frequency: penalties.
            bias: by token, or None.
            allowed: tokens that may be chosen; empty allows all.
            bans_stops: whether `Pool.stops` are banned before `Pool.min_end`.
            prompt: token ids.
            output: those committed so far; what follows joins by `count_tokens`.
        """
        penalties = np.array([repetition, presence, frequency], np.float32)
        has_penalties = bool((penalties != (1, 0, 0)).any())
        kinds = ProcessorKind.PENALTIES * has_penalties | ProcessorKind.STOP_BAN * bans_stops
        kinds |= ProcessorKind.ADDITIVE * bool(bias or allowed)
        self.kinds[row] = int(kinds)
        self.penalties[row].copy_(torch.from_numpy(penalties))
        counts, additive = self.counts[row].zero_(), self.additive[row].fill_(-np.inf if allowed else 0)
        if has_penalties:
            counts.index_fill_(0, self._ids(prompt), IN_PROMPT)
            ids = self._ids(output)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        if allowed:
            additive.index_fill_(0, self._ids(allowed), 0)
        if bias:
            known = {token: value for token, value in bias.items() if 0 <= token < len(additive)}
            values = torch.tensor(list(known.values()), dtype=torch.float32)
            additive.index_add_(0, self._ids(list(known)), values.to(additive.device))

    def _ids(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> torch.Tensor:
        """The tokens of the vocabulary among these, on the device."""
        ids = np.asarray(tokens, np.int64)
        return torch.from_numpy(ids[(ids >= 0) & (ids < self.counts.shape[1])]).to(self.counts.device)


def process_logits(
    logits: torch.Tensor,
    rows: SampledRows,
    packed: Packed,
    pool: Pool,
    processors: NodeProcessors,
    out: torch.Tensor,
) -> None:
    """Write a step's logits after the processors of their sessions. Launches depend on the shapes alone.

    Args:
        logits: [L, V] float32 or bfloat16.
        rows: the lines, as `sample_rows` wrote them; those of padding are left out.
        packed: the step.
        pool: whose step it is, not changed since `pack`.
        processors: of the pool's rows.
        out: [L, V] float32, written; may be `logits`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    lines, vocab_size = rows.rows.shape[0], processors.counts.shape[1]
    check_shape("logits", logits, (lines, vocab_size))
    check_shape("out", out, (lines, vocab_size))
    check_dtype("logits", logits, (torch.float32, torch.bfloat16))
    check_dtype("out", out, (torch.float32,))
    for name, tensor in (("logits", logits), ("out", out), ("processors", processors.kinds)):
        check_place(name, tensor, pool.device, "pool")
    for name, tensor in (("logits", logits), ("out", out)):
        if tensor.stride(1) != 1:
            raise ValueError(f"{name}: stride {tensor.stride(1)} between tokens given, 1 needed")
    if not uses_triton(logits):
        process_logits_reference(logits, rows, packed, pool, processors, out)
    elif lines:
        _process_kernel[(lines, triton.cdiv(vocab_size, _BLOCK))](
            logits,
            logits.stride(0),
            rows.rows,
            rows.pool_rows,
            rows.positions,
            packed.entries,
            pool.token,
            pool.parent,
            pool.stops,
            pool.min_end,
            processors.kinds,
            processors.penalties,
            processors.counts,
            processors.additive,
            processors.counts.stride(0),
            out,
            out.stride(0),
            vocab_size,
            C=pool.capacity,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def process_logits_reference(
    logits: torch.Tensor,
    rows: SampledRows,
    packed: Packed,
    pool: Pool,
    processors: NodeProcessors,
    out: torch.Tensor,
) -> None:
    """`process_logits` in numpy on a CPU, one line after the other."""
    used = min(int(rows.count[0]), len(logits))
    if out is not logits:
        out[:used].copy_(logits[:used])
    lines = zip(rows.pool_rows[:used].tolist(), rows.positions[:used].tolist(), rows.rows[:used].tolist(), strict=True)
    for values, (row, position, step_row) in zip(out[:used].numpy(), lines, strict=True):
        kinds = int(processors.kinds[row])
        if kinds & ProcessorKind.PENALTIES:
            _penalise(values, processors, row, _path(pool, row, int(packed.entries[step_row])))
        if kinds & ProcessorKind.ADDITIVE:
            additive = processors.additive[row].numpy()
            np.add(values, additive, out=values, where=additive > -np.inf)
            values[additive == -np.inf] = -np.inf
        if kinds & ProcessorKind.STOP_BAN and position < int(pool.min_end[row]):
            values[_inside(pool.stops[row].numpy(), len(values))] = -np.inf


def _path(pool: Pool, row: int, entry: int) -> Any:
    """The tokens of an entry and its ancestors; none of a root."""
    path = []
    while entry >= 0:
        path.append(int(pool.token[row, entry]))
        entry = int(pool.parent[row, entry])
    return np.array(path, np.int64)


def _inside(tokens: Any, vocab_size: int) -> Any:
    return tokens[(tokens >= 0) & (tokens < vocab_size)]


def _penalise(values: Any, processors: NodeProcessors, row: int, path: Any) -> None:
    repetition, presence, frequency = processors.penalties[row].numpy()
    counts = processors.counts[row].numpy().copy()
    np.add.at(counts, _inside(path, len(counts)), 1)
    seen = np.flatnonzero(counts)
    logit, count = values[seen], (counts[seen] & (IN_PROMPT - 1)).astype(np.float32)
    repeated = np.where(logit > 0, logit / repetition, logit * repetition)
    values[seen] = repeated - frequency * count - np.where(count > 0, presence, np.float32(0))


@jit
def _process_kernel(
    logits_ptr,  # [L, V] float32 or bfloat16
    logits_stride,
    rows_ptr,  # [L] int64
    pool_rows_ptr,  # [L] int32
    positions_ptr,  # [L] int32
    entries_ptr,  # [R] int32
    token_ptr,  # [S, C] int32
    parent_ptr,  # [S, C] int32
    stops_ptr,  # [S, 64] int32, filled up with -1
    min_end_ptr,  # [S] int32
    kinds_ptr,  # [S] int32
    penalties_ptr,  # [S, 3] float32
    counts_ptr,  # [S, V] int32
    additive_ptr,  # [S, V] float32
    row_stride,  # of both
    out_ptr,  # [L, V] float32
    out_stride,
    vocab_size,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(pool_rows_ptr + line).to(tl.int64)
    if row < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    logit = tl.load(logits_ptr + line * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    kinds = tl.load(kinds_ptr + row)
    if (kinds & _PENALTIES) != 0:
        counts = tl.load(counts_ptr + row * row_stride + ids, mask=inside, other=0)
        entry = tl.load(entries_ptr + tl.load(rows_ptr + line))
        while entry >= 0:
            counts += (ids == tl.load(token_ptr + row * C + entry)).to(tl.int32)
            # Parents stand before their children: the walk ends, whatever a row of no session holds.
            entry = tl.minimum(tl.load(parent_ptr + row * C + entry), entry - 1)
        repetition = tl.load(penalties_ptr + row * 3)
        presence = tl.load(penalties_ptr + row * 3 + 1)
        frequency = tl.load(penalties_ptr + row * 3 + 2)
        count = counts & _COUNT
        divided = tl.div_rn(logit, tl.zeros((BLOCK,), tl.float32) + repetition)
        repeated = tl.where(logit > 0, divided, logit * repetition)
        penalised = repeated - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
        logit = tl.where(counts != 0, penalised, logit)
    if (kinds & _ADDITIVE) != 0:
        additive = tl.load(additive_ptr + row * row_stride + ids, mask=inside, other=0.0)
        # Minus infinity, whatever the logit is.
        logit = tl.where(additive == float("-inf"), additive, logit + additive)
    if ((kinds & _STOP_BAN) != 0) & (tl.load(positions_ptr + line) < tl.load(min_end_ptr + row)):
        number = 0
        stop = tl.load(stops_ptr + row * _STOPS)
        while stop >= 0:
            logit = tl.where(ids == stop, float("-inf"), logit)
            number += 1
            stop = tl.load(stops_ptr + row * _STOPS + number, mask=number < _STOPS, other=-1)
    tl.store(out_ptr + line * out_stride + ids, logit, mask=inside)


def count_tokens(processors: NodeProcessors, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Count the tokens that are committed to rows with penalties.

    Args:
        processors: their `counts` change.
        tokens: [S, M] int32, the tokens committed to each row.
        num_tokens: [S] int32, how many of them.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    sessions, vocab_size = processors.counts.shape
    check_shape("tokens", tokens, (sessions, tokens.shape[-1]))
    check_shape("num_tokens", num_tokens, (sessions,))
    for name, tensor in (("tokens", tokens), ("num_tokens", num_tokens)):
        check_dtype(name, tensor, (torch.int32,))
        check_place(name, tensor, processors.counts.device, "processors")
    if not uses_triton(tokens):
        count_tokens_reference(processors, tokens, num_tokens)
        return
    _count_kernel[(sessions,)](
        processors.kinds,
        processors.counts,
        tokens.contiguous(),
        num_tokens.contiguous(),
        vocab_size,
        processors.counts.stride(0),
        tokens.shape[1],
        BLOCK=triton.next_power_of_2(tokens.shape[1]),
        num_warps=1,
        **early_options(tokens.device),
    )


def count_tokens_reference(processors: NodeProcessors, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """`count_tokens` in numpy on a CPU, one row after the other."""
    counts, numbers = processors.counts.numpy(), num_tokens.numpy()
    for row in np.flatnonzero(processors.kinds.numpy() & int(ProcessorKind.PENALTIES)):
        if numbers[row] > 0:
            np.add.at(counts[row], _inside(tokens[row, : numbers[row]].numpy(), counts.shape[1]), 1)


@jit
def _count_kernel(
    kinds_ptr,  # [S] int32
    counts_ptr,  # [S, V] int32
    tokens_ptr,  # [S, M] int32
    num_tokens_ptr,  # [S] int32
    vocab_size,
    counts_stride,
    most,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    committed = tl.minimum(tl.load(num_tokens_ptr + row), most)
    if ((tl.load(kinds_ptr + row) & _PENALTIES) != 0) & (committed > 0):
        number = tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + row * most + number, mask=number < committed, other=-1)
        # Sums of whole numbers: no order can change them.
        tl.atomic_add(counts_ptr + row * counts_stride + token, 1, mask=(token >= 0) & (token < vocab_size))
