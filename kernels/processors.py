"""Logits processors, exact for every node of a tree: penalties, bias, allowed and banned tokens, in this order.

For row r of session s, token v, with c = how often v occurs in the session's output and on the row's own path:

    penalties   v in prompt, output or path:   l = l / repetition if l > 0 else l * repetition
                c > 0:                         l = l - frequency * c - presence
    bias        l = l + bias[s, v]
    allowed     the session names allowed tokens and v is not one of them:   l = -inf
    banned      v is banned in row r (stop tokens before the minimum length):   l = -inf

Only entries that occur are touched; nothing of size T x V is built. The draft applies the same processors, so the two
sides choose from the same law. Penalties as defined by CTRL (arXiv 1909.05858, repetition) and by the OpenAI API
(presence, frequency).

Lists of different lengths are compressed rows: `x_start[i]:x_start[i + 1]` is the part of list i. Shapes: T rows, V
vocabulary size, S sessions.
"""

# compile-time parameters of kernels are upper case
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from outrider.kernels.argument_checks import INDEX_DTYPES, NeededTensor, check_place, check_tensors
from outrider.kernels.backend import check_shape, jit, tl, triton, uses_triton

__all__ = ["ProcessorBatch", "apply_processors", "apply_processors_reference"]


# The groups that are given or left out together: column and its size, equal names for equal sizes.
_PENALTIES = {
    "repetition_penalty": "S",
    "presence_penalty": "S",
    "frequency_penalty": "S",
    "count_start": "S + 1",
    "count_tokens": "counts",
    "count_output": "counts",
    "path_start": "T + 1",
    "path_tokens": "path entries",
}
_GROUPS = (
    _PENALTIES,
    {"bias_start": "S + 1", "bias_tokens": "bias entries", "bias_values": "bias entries"},
    {"allowed_start": "S + 1", "allowed_tokens": "allowed entries"},
    {"banned_start": "T + 1", "banned_tokens": "banned entries"},
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessorBatch:
    """Processors of each row. A group left at None is off for every session, and costs nothing.

    Tokens of one list are unique and ascending, except in paths; tokens outside [0, V) are ignored. A row whose
    session lies outside [0, S) gets only its own banned tokens.

    Attributes:
        row_session: [T] int32 or int64, the session of each row.
        repetition_penalty: [S] float32, 1 is off; None when no session has a penalty of any kind.
        presence_penalty: [S] float32, 0 is off.
        frequency_penalty: [S] float32, 0 is off.
        count_start: [S + 1], count_tokens: the tokens of each session's prompt and committed output.
        count_output: how often each of them occurs in the output; 0 for a token of the prompt alone.
        path_start: [T + 1], path_tokens: the tokens of each row's path, from below the root to the row's own token;
            they count as output.
        bias_start: [S + 1], bias_tokens, bias_values (float32); None when no session has a bias.
        allowed_start: [S + 1], allowed_tokens; an empty list allows all. None when no session restricts.
        banned_start: [T + 1], banned_tokens, per row; None when no row bans.

    Raises:
        ValueError: a shape that does not fit or a group given in part, naming the argument.
    """

    row_session: torch.Tensor
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    count_start: torch.Tensor | None = None
    count_tokens: torch.Tensor | None = None
    count_output: torch.Tensor | None = None
    path_start: torch.Tensor | None = None
    path_tokens: torch.Tensor | None = None
    bias_start: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    allowed_start: torch.Tensor | None = None
    allowed_tokens: torch.Tensor | None = None
    banned_start: torch.Tensor | None = None
    banned_tokens: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_shape("row_session", self.row_session, ("T",))
        sizes = {"T + 1": self.row_session.shape[0] + 1}
        if self.repetition_penalty is not None:
            sizes["S + 1"] = self.repetition_penalty.shape[0] + 1
        needed: dict[str, NeededTensor] = {"row_session": (self.row_session, ("T",), INDEX_DTYPES)}
        for group in _GROUPS:
            columns = {name: getattr(self, name) for name in group}
            if all(column is None for column in columns.values()):
                continue
            for name, column in columns.items():
                if column is None:
                    raise ValueError(f"{name}: None given, a tensor needed as for the rest of its group")
                dtypes = (torch.float32,) if name.endswith(("_penalty", "_values")) else INDEX_DTYPES
                needed[name] = (column, (sizes.get(group[name], group[name]),), dtypes)
        check_tensors(**needed)

    @property
    def is_empty(self) -> bool:
        """True if no processor is on for any row."""
        return all(getattr(self, next(iter(group))) is None for group in _GROUPS)


def apply_processors(logits: torch.Tensor, batch: ProcessorBatch) -> None:
    """Apply the processors of `batch` to `logits` in place.

    Args:
        logits: [T, V] float32, changed.
        batch: what applies to which row.

    Raises:
        ValueError: a shape, dtype or device that does not fit, naming the argument.
    """
    check_tensors(logits=(logits, (batch.row_session.shape[0], "V"), (torch.float32,)))
    check_place("batch", batch.row_session, logits.device, "logits")
    if batch.is_empty or logits.numel() == 0:
        return
    if uses_triton(logits):
        _launch(logits, batch)
    else:
        apply_processors_reference(logits, batch)


def apply_processors_reference(logits: torch.Tensor, batch: ProcessorBatch) -> None:
    """`apply_processors` on the CPU, row by row, through numpy's view of the same memory."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    columns = {name: column.numpy() for name, column in columns.items() if column is not None}
    vocab_size = logits.shape[1]

    def of_list(name: str, index: int, entries: str = "tokens") -> np.ndarray:
        """The tokens within the vocabulary of list `index` of a group, or other entries that stand beside them."""
        start = columns.get(f"{name}_start", ())
        if not 0 <= index < len(start) - 1:
            return np.empty(0, np.int64)
        part = slice(max(start[index], 0), max(start[index + 1], 0))
        tokens = columns[f"{name}_tokens"][part]
        return columns[f"{name}_{entries}"][part][(tokens >= 0) & (tokens < vocab_size)]

    for row, session in enumerate(batch.row_session.tolist()):
        values = logits[row].numpy()
        if batch.repetition_penalty is not None and 0 <= session < len(batch.repetition_penalty):
            repetition, presence, frequency = (
                columns[f"{name}_penalty"][session] for name in ("repetition", "presence", "frequency")
            )
            known, path, count = of_list("count", session), of_list("path", row), np.zeros(vocab_size, np.float32)
            count[known] = of_list("count", session, "output")
            np.add.at(count, path, 1)
            seen = np.union1d(known, path)
            logit, count = values[seen], count[seen]
            repeated = np.where(logit > 0, logit / repetition, logit * repetition)
            values[seen] = repeated - frequency * count - presence * (count > 0).astype(np.float32)
        values[of_list("bias", session)] += of_list("bias", session, "values")
        # A list allows nothing where none of its tokens is in the vocabulary, and all where it is empty.
        allowed_start = columns.get("allowed_start", ())
        if 0 <= session < len(allowed_start) - 1 and allowed_start[session + 1] > allowed_start[session]:
            kept = np.full(vocab_size, -np.inf, np.float32)
            kept[of_list("allowed", session)] = values[of_list("allowed", session)]
            values[:] = kept
        values[of_list("banned", row)] = -np.inf


def _entries(tokens: torch.Tensor | None) -> int:
    return 0 if tokens is None else tokens.shape[0]


def _launch(logits: torch.Tensor, batch: ProcessorBatch) -> None:
    """One launch a group that is on; launches keep the order of the groups."""
    rows, vocab_size = logits.shape
    target = (logits, *logits.stride(), vocab_size)
    row_session = batch.row_session.contiguous()
    if batch.count_start is not None:
        columns = [getattr(batch, name).contiguous() for name in _PENALTIES]
        entries = (_entries(batch.count_tokens), _entries(batch.path_tokens))
        _penalty_kernel[(rows,)](*target, row_session, batch.count_start.shape[0] - 1, *columns, *entries, BLOCK=256)
    if batch.bias_start is not None and batch.bias_tokens is not None and batch.bias_values is not None:
        sessions = batch.bias_start.shape[0] - 1
        columns = (batch.bias_start.contiguous(), batch.bias_tokens.contiguous(), batch.bias_values.contiguous())
        entries = batch.bias_tokens.shape[0]
        _bias_kernel[(rows,)](*target, row_session, sessions, *columns, entries, BLOCK=256)
    if batch.allowed_start is not None and batch.allowed_tokens is not None:
        sessions = batch.allowed_start.shape[0] - 1
        columns = (batch.allowed_start.contiguous(), batch.allowed_tokens.contiguous())
        block = min(triton.next_power_of_2(vocab_size), 2048)
        entries = batch.allowed_tokens.shape[0]
        grid = (rows, triton.cdiv(vocab_size, block))
        _allowed_kernel[grid](*target, row_session, sessions, *columns, entries, BLOCK=block)
    if batch.banned_start is not None and batch.banned_tokens is not None:
        columns = (batch.banned_start.contiguous(), batch.banned_tokens.contiguous())
        _banned_kernel[(rows,)](*target, *columns, batch.banned_tokens.shape[0], BLOCK=32)


@jit
def _list_bounds(start_ptr, index, entries):
    """Return begin and end of list `index`, clamped to the entries."""
    begin = tl.minimum(tl.maximum(tl.load(start_ptr + index).to(tl.int64), 0), entries)
    end = tl.minimum(tl.maximum(tl.load(start_ptr + index + 1).to(tl.int64), 0), entries)
    return begin.to(tl.int32), end.to(tl.int32)


@jit
def _penalised(logit, count, repetition, presence, frequency):
    repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
    return repeated - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)


@jit
def _penalty_kernel(
    logits_ptr,  # [T, V] float32
    row_stride,
    stride,
    vocab_size,
    row_session_ptr,  # [T] int
    sessions,
    repetition_ptr,  # [S] float32
    presence_ptr,  # [S] float32
    frequency_ptr,  # [S] float32
    count_start_ptr,  # [S + 1] int
    count_tokens_ptr,  # [N] int
    count_output_ptr,  # [N] int
    path_start_ptr,  # [T + 1] int
    path_tokens_ptr,  # [M] int
    count_entries,  # N
    path_entries,  # M
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    session = tl.load(row_session_ptr + row).to(tl.int64)
    if (session < 0) | (session >= sessions):
        return
    repetition = tl.load(repetition_ptr + session)
    presence = tl.load(presence_ptr + session)
    frequency = tl.load(frequency_ptr + session)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    logits_ptr += row.to(tl.int64) * row_stride
    begin, end = _list_bounds(count_start_ptr, session, count_entries)
    path_begin, path_end = _list_bounds(path_start_ptr, row, path_entries)
    # The session's own tokens, with what the path adds to their counts.
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(count_tokens_ptr + entry, mask=entry < end, other=-1).to(tl.int64)
        count = tl.load(count_output_ptr + entry, mask=entry < end, other=0).to(tl.int32)
        for step in range(path_begin, path_end):
            count += (tl.load(path_tokens_ptr + step).to(tl.int64) == token).to(tl.int32)
        inside = (token >= 0) & (token < vocab_size)
        logit = tl.load(logits_ptr + token * stride, mask=inside, other=0.0)
        tl.store(logits_ptr + token * stride, _penalised(logit, count, repetition, presence, frequency), mask=inside)
    # Tokens of the path that the session has not got, each where it occurs first.
    for step in range(path_begin, path_end):
        token = tl.load(path_tokens_ptr + step).to(tl.int64)
        elsewhere = tl.zeros([BLOCK], tl.int32)
        for first in range(begin, end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            known = tl.load(count_tokens_ptr + entry, mask=entry < end, other=-1).to(tl.int64)
            elsewhere += (known == token).to(tl.int32)
        count = tl.full([], 0, tl.int32)
        earlier = tl.full([], 0, tl.int32)
        for other in range(path_begin, path_end):
            same = (tl.load(path_tokens_ptr + other).to(tl.int64) == token).to(tl.int32)
            count += same
            earlier += tl.where(other < step, same, 0)
        if (token >= 0) & (token < vocab_size) & (tl.sum(elsewhere) + earlier == 0):
            logit = tl.load(logits_ptr + token * stride)
            tl.store(logits_ptr + token * stride, _penalised(logit, count, repetition, presence, frequency))


@jit
def _bias_kernel(
    logits_ptr,  # [T, V] float32
    row_stride,
    stride,
    vocab_size,
    row_session_ptr,  # [T] int
    sessions,
    start_ptr,  # [S + 1] int
    tokens_ptr,  # [N] int
    values_ptr,  # [N] float32
    entries,  # N
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    session = tl.load(row_session_ptr + row).to(tl.int64)
    if (session < 0) | (session >= sessions):
        return
    logits_ptr += row.to(tl.int64) * row_stride
    begin, end = _list_bounds(start_ptr, session, entries)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + entry, mask=entry < end, other=-1).to(tl.int64)
        inside = (token >= 0) & (token < vocab_size)
        logit = tl.load(logits_ptr + token * stride, mask=inside, other=0.0)
        bias = tl.load(values_ptr + entry, mask=entry < end, other=0.0)
        tl.store(logits_ptr + token * stride, logit + bias, mask=inside)


@jit
def _allowed_kernel(
    logits_ptr,  # [T, V] float32
    row_stride,
    stride,
    vocab_size,
    row_session_ptr,  # [T] int
    sessions,
    start_ptr,  # [S + 1] int
    tokens_ptr,  # [N] int, ascending within a session
    entries,  # N
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    session = tl.load(row_session_ptr + row).to(tl.int64)
    if (session < 0) | (session >= sessions):
        return
    begin, end = _list_bounds(start_ptr, session, entries)
    if end <= begin:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Binary search of every token of the block: the place of the last entry that is not above it.
    place = tl.full([BLOCK], 0, tl.int32) + begin
    left = end - begin
    while left > 1:
        half = left // 2
        middle = tl.minimum(place + half, end - 1)
        place = tl.where(tl.load(tokens_ptr + middle).to(tl.int64) <= token, middle, place)
        left = left - half
    allowed = tl.load(tokens_ptr + place).to(tl.int64) == token
    tl.store(
        logits_ptr + row.to(tl.int64) * row_stride + token * stride,
        tl.full([BLOCK], float("-inf"), tl.float32),
        mask=(token < vocab_size) & (allowed == 0),
    )


@jit
def _banned_kernel(
    logits_ptr,  # [T, V] float32
    row_stride,
    stride,
    vocab_size,
    start_ptr,  # [T + 1] int
    tokens_ptr,  # [N] int
    entries,  # N
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    begin, end = _list_bounds(start_ptr, row, entries)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + entry, mask=entry < end, other=-1).to(tl.int64)
        inside = (token >= 0) & (token < vocab_size)
        tl.store(logits_ptr + token * stride, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside)
