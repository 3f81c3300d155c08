from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from outrider.kernels.processors import ProcessorBatch, apply_processors, apply_processors_reference

_VOCAB = 40


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
    banned = [[0], [], [5, 6, 7], _draw(3), [], [-1, 2, _VOCAB], [], [-1]]
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


def _processed(logits: torch.Tensor, batch: ProcessorBatch) -> torch.Tensor:
    """The logits by the reference."""
    out = logits.clone()
    apply_processors_reference(out, batch)
    return out


@pytest.mark.parametrize(
    "groups", [(), ("penalties",), ("bias",), ("allowed",), ("banned",), ("penalties", "bias", "allowed", "banned")]
)
def test_triton_against_the_reference(triton_device: torch.device, groups: tuple[str, ...]) -> None:
    for dtype in (torch.int32, torch.int64):
        batch, logits = _only(_random_batch(dtype), groups), torch.randn(8, _VOCAB)
        changed = logits.to(triton_device, copy=True)
        apply_processors(changed, _moved(batch, triton_device))
        torch.testing.assert_close(changed.cpu(), _processed(logits, batch), rtol=1e-5, atol=1e-5)


def test_rows_of_no_session_have_their_own_banned_tokens_alone(device: torch.device) -> None:
    batch, logits = _random_batch(), torch.randn(8, _VOCAB)
    expected = logits[5].clone()
    expected[2] = -math.inf
    for session in (7, -2):
        batch.row_session[5] = session
        changed = logits.to(device, copy=True)
        apply_processors(changed, _moved(batch, device))
        assert torch.equal(changed[5].cpu(), expected)


def test_strides_reach_the_callers_memory(device: torch.device) -> None:
    batch = _random_batch()
    logits = torch.randn(8, 2 * _VOCAB)
    wide = logits.to(device, copy=True)
    apply_processors(wide[:, ::2], _moved(batch, device))
    torch.testing.assert_close(wide[:, ::2].cpu(), _processed(logits[:, ::2], batch), rtol=1e-5, atol=1e-5)
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
