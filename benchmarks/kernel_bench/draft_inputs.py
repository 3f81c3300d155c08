"""Cases of the operators that prepare inputs for draft heads: 64 requests of 64 tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Subject, Work, size_of
from benchmarks.kernel_bench.logits import VOCABULARY

_BATCH, _TOKENS = 64, 64
_BLOCK, _BLOCKS, _MAX_LEN = 16, 2048, 32768
_PARALLEL = 4


def cases() -> list[Case]:
    """Each operator at one shape, the expansion with and without shift."""
    shape = f"batch {_BATCH}, tokens {_TOKENS}"
    builders: list[tuple[str, str, Callable[[torch.device, Any], Subject]]] = [
        ("eagle_step_update_slot_mapping_and_metadata", f"batch {_BATCH}, blocks {_BLOCKS}", _build_step),
        ("eagle_prepare_inputs_padded", shape, _build_prepare_inputs),
        ("eagle_prepare_next_token_padded", shape, _build_next_token),
        ("copy_and_expand_eagle_inputs", f"{shape}, shift", functools.partial(_build_expand, 1, True)),
        (
            "copy_and_expand_eagle_inputs",
            f"{shape}, {_PARALLEL} slots",
            functools.partial(_build_expand, _PARALLEL, False),
        ),
    ]
    return [
        Case(operator=operator, shape=of_case, target="draft_inputs", build=build)
        for operator, of_case, build in builders
    ]


def _build_step(device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.drafting.step_inputs import eagle_step_reference, eagle_step_update_slot_mapping_and_metadata

    positions = torch.randint(0, _MAX_LEN - 1, (_BATCH,), device=device)
    table = torch.randint(0, 100_000, (_BATCH, _BLOCKS), dtype=torch.int32, device=device)
    lengths = (positions + 1).int()
    clamped, slots = torch.zeros_like(positions), torch.zeros_like(positions)
    return Subject(
        ours=lambda: eagle_step_update_slot_mapping_and_metadata(
            positions, table, lengths, _BLOCK, _MAX_LEN, clamped, slots
        ),
        reference=lambda: eagle_step_reference(positions, table, _BLOCK, _MAX_LEN, (lengths, clamped, slots), _BATCH),
        # Of the table one entry a request, of the lengths a read and a write.
        work=Work(bytes_moved=size_of(positions, clamped, slots, lengths, lengths, table[:, 0])),
    )


def _build_prepare_inputs(device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.draft_inputs import eagle_prepare_inputs_padded, prepare_inputs_reference

    inputs = (
        torch.arange(1, _BATCH + 1, dtype=torch.int32, device=device) * (_TOKENS - 1),
        torch.randint(1, _TOKENS + 1, (_BATCH,), dtype=torch.int32, device=device),
        torch.arange(_BATCH + 1, dtype=torch.int32, device=device) * _TOKENS,
    )
    outputs = tuple(torch.zeros(_BATCH, dtype=torch.int32, device=device) for _ in range(2))
    return Subject(
        ours=lambda: eagle_prepare_inputs_padded(*inputs, *outputs),
        reference=lambda: prepare_inputs_reference(inputs, outputs),
        work=Work(bytes_moved=size_of(*inputs, *outputs)),
    )


def _build_next_token(device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.draft_inputs import eagle_prepare_next_token_padded, prepare_next_token_reference

    sampled = torch.randint(0, VOCABULARY, (_BATCH, _TOKENS), dtype=torch.int32, device=device)
    kept = torch.randint(1, _TOKENS + 1, (_BATCH, 1), device=device)
    sampled[torch.arange(_TOKENS, device=device) >= kept] = -1
    discard = torch.rand(_BATCH, device=device) < 0.1
    backup = torch.zeros(_BATCH, dtype=torch.int32, device=device)
    outputs = (torch.zeros_like(backup), torch.zeros_like(backup))
    return Subject(
        ours=lambda: eagle_prepare_next_token_padded(sampled, discard, backup, *outputs, VOCABULARY),
        reference=lambda: prepare_next_token_reference(sampled, discard, backup, VOCABULARY, outputs),
        work=Work(bytes_moved=size_of(sampled, discard, backup, *outputs)),
    )


def _build_expand(slots: int, shift: bool, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.draft_inputs import copy_and_expand_eagle_inputs

    rows = _BATCH * _TOKENS
    starts = torch.arange(_BATCH + 1, dtype=torch.int32, device=device) * _TOKENS
    inputs = (
        torch.randint(0, VOCABULARY, (rows,), dtype=torch.int32, device=device),
        torch.arange(_TOKENS, device=device).repeat(_BATCH),
        torch.randint(0, VOCABULARY, (_BATCH,), dtype=torch.int32, device=device),
        starts,
        starts[:-1] + torch.randint(0, _TOKENS, (_BATCH,), dtype=torch.int32, device=device),
    )
    expanded = rows + _BATCH * (slots - 1 if shift else slots)
    outputs = (
        torch.zeros(expanded, dtype=torch.int32, device=device),
        torch.zeros(expanded, dtype=torch.int64, device=device),
        torch.zeros(expanded, dtype=torch.bool, device=device),
        torch.zeros(expanded, dtype=torch.bool, device=device),
        torch.zeros(_BATCH * slots, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
    return Subject(
        ours=lambda: copy_and_expand_eagle_inputs(*inputs, 0, 1, slots, shift, *outputs),
        work=Work(bytes_moved=size_of(*inputs, *(outputs if shift else outputs[:-1]))),
    )
