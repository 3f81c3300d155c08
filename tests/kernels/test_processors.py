from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from outrider.kernels.processors import ProcessorBatch, apply_processors

_VOCAB = 40
_SESSIONS = 4


def _rows_of(lists: list[list[int]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.tensor([0, *torch.tensor([len(part) for part in lists]).cumsum(0).tolist()], dtype=torch.int32)
    return start, torch.tensor([entry for part in lists for entry in part], dtype=dtype)


def _draw(size: int, low: int = 0, high: int = _VOCAB) -> list[int]:
    return torch.randint(low, high, (size,)).tolist()


def _random_batch(dtype: torch.dtype = torch.int64) -> ProcessorBatch:
    """Sessions with everything, penalties alone, nothing, and odd tokens; rows in mixed order, one of no session."""
    row_session = [1, 0, 3, 0, 2, 7, 0, 3]
    counted = [sorted(set(_draw(30))), sorted(set(_draw(6))), sorted(set(_draw(5))), [-3, 4, 9, _VOCAB + 5]]
    allowed = [sorted(set(_draw(20))), [], [], [7]]
    biased = [sorted(set(_draw(8))), [], [], [0, _VOCAB + 1]]
    paths = [_draw(5, 0, 12), [3, 3, 5, 3], [4, _VOCAB, -1, 11], _draw(4, 0, 6), _draw(3), [1], [], [9, 9]]
    banned = [[0], [], [5, 6, 7], _draw(3), [], [2, _VOCAB], [], [-1]]
    count_start, count_tokens = _rows_of(counted, dtype)
    bias_start, bias_tokens = _rows_of(biased, dtype)
    allowed_start, allowed_tokens = _rows_of(allowed, dtype)
    path_start, path_tokens = _rows_of(paths, dtype)
    banned_start, banned_tokens = _rows_of(banned, dtype)
    return ProcessorBatch(
        row_session=torch.tensor(row_session, dtype=torch.int32),
        repetition_penalty=torch.tensor([1.3, 0.8, 1.0, 1.1]),
        presence_penalty=torch.tensor([0.5, 0.0, 0.0, -0.25]),
        frequency_penalty=torch.tensor([0.1, 0.0, 0.0, 0.3]),
        count_start=count_start,
        count_tokens=count_tokens,
        count_output=torch.randint(0, 3, count_tokens.shape, dtype=torch.int32),
        path_start=path_start,
        path_tokens=path_tokens,
        bias_start=bias_start,
        bias_tokens=bias_tokens,
        bias_values=torch.randn(len(bias_tokens)),
        allowed_start=allowed_start,
        allowed_tokens=allowed_tokens,
        banned_start=banned_start,
        banned_tokens=banned_tokens,
    )


def _part(start: torch.Tensor | None, entries: torch.Tensor | None, index: int) -> list:
    if start is None or entries is None:
        return []
    return entries[int(start[index]) : int(start[index + 1])].tolist()


def _brute_force(logits: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """Entry by entry, straight from the definition, in float64."""
    out = logits.double().clone()
    for row, session in enumerate(batch.row_session.tolist()):
        if 0 <= session < _SESSIONS:
            known = dict(
                zip(
                    _part(batch.count_start, batch.count_tokens, session),
                    _part(batch.count_start, batch.count_output, session),
                    strict=True,
                )
            )
            path = _part(batch.path_start, batch.path_tokens, row)
            bias = dict(
                zip(
                    _part(batch.bias_start, batch.bias_tokens, session),
                    _part(batch.bias_start, batch.bias_values, session),
                    strict=True,
                )
            )
            allowed = _part(batch.allowed_start, batch.allowed_tokens, session)
            for token in range(logits.shape[1]):
                value = float(out[row, token])
                if batch.repetition_penalty is not None and (token in known or token in path):
                    assert batch.frequency_penalty is not None and batch.presence_penalty is not None
                    repetition = float(batch.repetition_penalty[session])
                    count = known.get(token, 0) + path.count(token)
                    value = value / repetition if value > 0 else value * repetition
                    value -= float(batch.frequency_penalty[session]) * count
                    value -= float(batch.presence_penalty[session]) * (count > 0)
                value += bias.get(token, 0.0)
                out[row, token] = -math.inf if allowed and token not in allowed else value
        for token in _part(batch.banned_start, batch.banned_tokens, row):
            if 0 <= token < logits.shape[1]:
                out[row, token] = -math.inf
    return out


def _moved(batch: ProcessorBatch, device: torch.device) -> ProcessorBatch:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: column.to(device) for name, column in columns.items() if column is not None})


_GROUPS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty", "count_start", "count_tokens",
                  "count_output", "path_start", "path_tokens"),
    "bias": ("bias_start", "bias_tokens", "bias_values"),
    "allowed": ("allowed_start", "allowed_tokens"),
    "banned": ("banned_start", "banned_tokens"),
}  # fmt: skip


def _only(batch: ProcessorBatch, groups: tuple[str, ...]) -> ProcessorBatch:
    off = [name for group, names in _GROUPS.items() if group not in groups for name in names]
    return replace(batch, **dict.fromkeys(off))


def _check(batch: ProcessorBatch, device: torch.device) -> None:
    logits = torch.randn(batch.row_session.shape[0], _VOCAB)
    changed = logits.clone().to(device)
    apply_processors(changed, _moved(batch, device))
    torch.testing.assert_close(changed.cpu().double(), _brute_force(logits, batch), rtol=1e-5, atol=1e-5)


_COMBINATIONS = [(), ("penalties",), ("bias",), ("allowed",), ("banned",), ("penalties", "bias", "allowed", "banned")]


@pytest.mark.parametrize("groups", _COMBINATIONS)
def test_against_the_definition(device: torch.device, groups: tuple[str, ...]) -> None:
    for dtype in (torch.int32, torch.int64):
        _check(_only(_random_batch(dtype), groups), device)


def test_strides_reach_the_callers_memory(device: torch.device) -> None:
    batch = _random_batch()
    logits = torch.randn(8, 2 * _VOCAB)
    expected = _brute_force(logits[:, ::2], batch)
    wide = logits.clone().to(device)
    apply_processors(wide[:, ::2], _moved(batch, device))
    torch.testing.assert_close(wide[:, ::2].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(wide[:, 1::2].cpu(), logits[:, 1::2])


def test_nothing_active_changes_nothing() -> None:
    batch = ProcessorBatch(row_session=torch.zeros(3, dtype=torch.int64))
    logits = torch.randn(3, 5)
    before = logits.clone()
    assert batch.is_empty
    apply_processors(logits, batch)
    assert torch.equal(logits, before)


def test_siblings_differ_by_their_own_paths_alone() -> None:
    batch = replace(
        _only(_random_batch(), ("penalties",)),
        row_session=torch.zeros(2, dtype=torch.int64),
        path_start=torch.tensor([0, 1, 2]),
        path_tokens=torch.tensor([10, 20]),
    )
    logits = torch.randn(1, _VOCAB).repeat(2, 1)
    apply_processors(logits, batch)
    different = (logits[0] != logits[1]).nonzero().flatten().tolist()
    assert different == [10, 20]
