"""Cases of the operator that expands the inputs of parallel drafting: 64 requests of 64 tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Subject, Work, size_of
from benchmarks.kernel_bench.logits import VOCABULARY

_BATCH, _TOKENS = 64, 64
_PARALLEL = 4


def cases() -> list[Case]:
    """The expansion with and without shift."""
    return [
        Case(
            operator="copy_and_expand_eagle_inputs",
            shape=f"batch {_BATCH}, tokens {_TOKENS}, {name}",
            target="copy_and_expand_eagle_inputs",
            build=functools.partial(_build_expand, slots, shift),
        )
        for name, slots, shift in (("shift", 1, True), (f"{_PARALLEL} slots", _PARALLEL, False))
    ]


def _build_expand(slots: int, shift: bool, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.expand_inputs import copy_and_expand_eagle_inputs

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
