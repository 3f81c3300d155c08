"""Cases of coupled sampling, of the verification built on it, and of the logits processors: rows of 128,256 logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work, size_of
from benchmarks.kernel_bench.forest import follow_children, make_forest
from benchmarks.kernel_bench.logits import VOCABULARY, flat_logits, zipf_logits
from benchmarks.kernel_bench.targets import ARGMAX_ONLY, GREEDY

_ROWS = 64
_REQUESTS = 8
_TEMPERATURE = 0.8
_COUNTED, _BIASED = 1000, 100


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
    for filters in (_NONE, _BOTH):
        shape = _shape(_ROWS, f"{_REQUESTS} trees, {filters.name}")
        build = functools.partial(_build_verify, filters)
        made.append(Case(operator="verify_coupled", shape=shape, build=build))
    shape = _shape(_ROWS, f"{_COUNTED} counted tokens, {_BIASED} biased")
    made.append(Case(operator="apply_processors", shape=shape, build=_build_processors))
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
    from benchmarks.kernel_bench.argmax import argmax_only

    from outrider.kernels.coupled_sampling import coupled_choice

    logits = _LOGITS[kind](rows, device)
    columns = _columns(rows, filters, device)
    greedy = (*columns[:2], torch.zeros_like(columns[2]), *columns[3:])
    return Subject(
        ours=lambda: coupled_choice(logits, *columns),
        beside={
            ARGMAX_ONLY: lambda: argmax_only(logits),
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
    from benchmarks.kernel_bench.argmax import argmax_only

    from outrider.kernels.coupled_sampling import coupled_topk

    logits = zipf_logits(_ROWS, device)
    columns = _columns(_ROWS, filters, device)
    return Subject(
        ours=lambda: coupled_topk(logits, *columns, k=k),
        beside={ARGMAX_ONLY: lambda: argmax_only(logits)},
        work=Work(bytes_moved=size_of(logits)),
    )


def _build_verify(filters: Filters, device: torch.device, _flashinfer: Any) -> Subject:
    from benchmarks.kernel_bench.argmax import argmax_only

    from outrider.kernels.coupled_sampling import coupled_choice
    from outrider.kernels.verify_coupled import verify_coupled

    forest = make_forest(_REQUESTS, _ROWS // _REQUESTS, device)
    logits = zipf_logits(_ROWS, device)
    columns = _columns(_ROWS, filters, device)
    choices = coupled_choice(logits, *columns).view(forest.parents.shape)
    # Children that hold their parent's choice, four times of five: walks go down.
    candidates = torch.randint(0, VOCABULARY, choices.shape, device=device)
    wanted = follow_children(forest, torch.arange(_ROWS, device=device).view(choices.shape), share=0.8)
    request, parent = (wanted < _ROWS).nonzero(as_tuple=True)
    candidates.view(-1)[wanted[request, parent]] = choices[request, parent]
    outputs = {
        "predicts": torch.zeros(_ROWS, dtype=torch.int32, device=device),
        "accept_index": torch.zeros(_REQUESTS, forest.max_depth + 1, dtype=torch.int32, device=device),
        "accept_token_num": torch.zeros(_REQUESTS, dtype=torch.int32, device=device),
    }
    trees = {
        "candidates": candidates,
        "retrive_index": forest.retrive_index,
        "retrive_next_token": forest.retrive_next_token,
        "retrive_next_sibling": forest.retrive_next_sibling,
    }
    return Subject(
        ours=lambda: verify_coupled(logits, *columns, **trees, **outputs),
        beside={
            ARGMAX_ONLY: lambda: argmax_only(logits),
            "choice alone": lambda: coupled_choice(logits, *columns),
        },
        work=Work(bytes_moved=size_of(logits, *trees.values(), *outputs.values())),
    )


def _build_processors(device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels.processors import ProcessorBatch, apply_processors

    logits = zipf_logits(_ROWS, device)
    starts = functools.partial(torch.arange, _REQUESTS + 1, device=device)
    path = torch.randint(0, VOCABULARY, (_ROWS, 5), device=device)
    batch = ProcessorBatch(
        row_session=torch.arange(_ROWS, device=device) // (_ROWS // _REQUESTS),
        repetition_penalty=torch.full((_REQUESTS,), 1.1, device=device),
        presence_penalty=torch.full((_REQUESTS,), 0.1, device=device),
        frequency_penalty=torch.full((_REQUESTS,), 0.1, device=device),
        count_start=starts() * _COUNTED,
        count_tokens=_ascending(_REQUESTS, _COUNTED, device),
        count_output=torch.randint(0, 3, (_REQUESTS * _COUNTED,), device=device),
        path_start=torch.arange(_ROWS + 1, device=device) * path.shape[1],
        path_tokens=path.flatten(),
        bias_start=starts() * _BIASED,
        bias_tokens=_ascending(_REQUESTS, _BIASED, device),
        bias_values=torch.randn(_REQUESTS * _BIASED, device=device),
        banned_start=torch.arange(_ROWS + 1, device=device) * 2,
        banned_tokens=torch.arange(2, device=device).repeat(_ROWS),
    )
    touched = _ROWS * (_COUNTED + _BIASED + path.shape[1] + 2)
    return Subject(
        ours=lambda: apply_processors(logits, batch),
        # Every entry that a list names is read and written; a sector of 32 bytes holds it.
        work=Work(bytes_moved=touched * 2 * 32),
    )


def _ascending(lists: int, entries: int, device: torch.device) -> torch.Tensor:
    """Unique ascending tokens for each list, flat."""
    return torch.stack(
        [torch.randperm(VOCABULARY, device=device)[:entries].sort().values for _ in range(lists)]
    ).flatten()
