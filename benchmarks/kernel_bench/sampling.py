"""Cases of coupled sampling: rows of 128,256 logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work, size_of
from benchmarks.kernel_bench.logits import VOCABULARY, flat_logits, zipf_logits
from benchmarks.kernel_bench.targets import GREEDY

_ROWS = 64
_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Filters of every row of a case."""

    name: str
    top_k: int = 0
    top_p: float = 1.0


_NONE = Filters(name="no filters")
_TOP_K = Filters(name="top-k 50", top_k=50)
_TOP_P = Filters(name="top-p 0.95", top_p=0.95)
_BOTH = Filters(name="top-k 50, top-p 0.95", top_k=50, top_p=0.95)
_LOGITS: dict[str, Callable[[int, torch.device], torch.Tensor]] = {"": zipf_logits, ", flat": flat_logits}


def cases() -> list[Case]:
    """64 rows, one row, and rows so flat that filters keep thousands of tokens."""
    made = []
    for rows, filters, kind in (
        *((_ROWS, filters, "") for filters in (_NONE, _TOP_K, _TOP_P, _BOTH)),
        (_ROWS, _NONE, ", flat"),
        (_ROWS, _TOP_P, ", flat"),
        (_ROWS, _BOTH, ", flat"),
        (1, _NONE, ""),
        (1, _BOTH, ""),
    ):
        target = {"no filters": "coupled_choice", _BOTH.name: "coupled_choice, top-k and top-p"}.get(filters.name)
        made.append(
            Case(
                operator="coupled_choice",
                shape=_shape(rows, filters.name + kind),
                # One row is a matter of latency and has no target.
                target=target if rows == _ROWS else None,
                build=functools.partial(_build_choice, rows, filters, kind),
            )
        )
    for k, filters in ((4, _NONE), (4, _BOTH), (8, _NONE)):
        build = functools.partial(_build_topk, k, filters)
        made.append(Case(operator="coupled_topk", shape=_shape(_ROWS, f"k {k}, {filters.name}"), build=build))
    return made


def _shape(rows: int, rest: str) -> str:
    return f"{rows} x {VOCABULARY}, {rest}"


def _columns(rows: int, filters: Filters, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Seeds, positions, temperature, top_k, top_p and min_p of `rows` rows."""
    return (
        torch.randint(-(2**62), 2**62, (rows,), device=device),
        torch.randint(0, 4096, (rows,), device=device),
        torch.full((rows,), _TEMPERATURE, device=device),
        torch.full((rows,), filters.top_k, dtype=torch.int32, device=device),
        torch.full((rows,), filters.top_p, device=device),
        torch.zeros(rows, device=device),
    )


def _build_choice(rows: int, filters: Filters, kind: str, device: torch.device, flashinfer: Any) -> Subject:
    from outrider.kernels.coupled_sampling import coupled_choice

    logits = _LOGITS[kind](rows, device)
    columns = _columns(rows, filters, device)
    greedy = (*columns[:2], torch.zeros_like(columns[2]), *columns[3:])
    return Subject(
        ours=lambda: coupled_choice(logits, *columns),
        beside={
            GREEDY: lambda: coupled_choice(logits, *greedy),
            **_flashinfer_sampling(flashinfer, logits, filters),
        },
        work=Work(bytes_moved=size_of(logits)),
    )


def _flashinfer_sampling(flashinfer: Any, logits: torch.Tensor, filters: Filters) -> dict[str, Run]:
    """The same draw with noise of its own, which depends on the place in the batch: beside, not instead.

    Its filtered draw is left out: another module, which takes more than two minutes to compile.
    """
    if flashinfer is None or filters != _NONE:
        return {}
    scaled = logits / _TEMPERATURE
    return {"FlashInfer, own noise": lambda: flashinfer.sampling.sampling_from_logits(scaled, seed=1, offset=0)}


def _build_topk(k: int, filters: Filters, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.coupled_sampling import coupled_topk

    logits = zipf_logits(_ROWS, device)
    columns = _columns(_ROWS, filters, device)
    return Subject(
        ours=lambda: coupled_topk(logits, *columns, k=k),
        work=Work(bytes_moved=size_of(logits)),
    )
