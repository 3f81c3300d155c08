"""Cases of the operators that verify by probabilities: trees by the target's alone, chains by p / q."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work, size_of
from benchmarks.kernel_bench.forest import make_forest
from benchmarks.kernel_bench.logits import VOCABULARY, zipf_logits

_BATCHES = (1, 64)
_NODES, _DRAFTS = 64, 5
# Draft logits differ from the target's by noise of this deviation: some four of five drafts are accepted.
_DRAFT_NOISE = 0.5


def cases() -> list[Case]:
    """Batch 1 and 64 over a vocabulary of 128,256."""
    made = []
    for batch in _BATCHES:
        operator = "tree_speculative_sampling_target_only"
        made.append(
            Case(
                operator=operator,
                shape=f"batch {batch}, nodes {_NODES}, vocabulary {VOCABULARY}",
                target=f"{operator}, batch {batch}",
                build=functools.partial(_build_tree, batch),
            )
        )
    for batch in _BATCHES:
        made.append(
            Case(
                operator="chain_speculative_sampling",
                shape=f"batch {batch}, drafts {_DRAFTS}, vocabulary {VOCABULARY}",
                target="chain_speculative_sampling",
                build=functools.partial(_build_chain, batch),
            )
        )
    return made


def _build_tree(batch: int, device: torch.device, _flashinfer: Any) -> Subject:
    from outrider.kernels import tree_sampling

    forest = make_forest(batch, _NODES, device)
    target = torch.stack([zipf_logits(_NODES, device).softmax(dim=-1) for _ in range(batch)])
    outputs = (
        torch.zeros(batch * _NODES, dtype=torch.int32, device=device),
        torch.zeros(batch, forest.max_depth + 1, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
    )
    inputs = (
        _likely_children(forest.parents, target),
        *forest.links,
        torch.rand(batch, _NODES, device=device),
        torch.rand(batch, device=device),
        target,
        None,
    )
    reference = tree_sampling.tree_speculative_sampling_target_only_reference
    return Subject(
        ours=lambda: tree_sampling.tree_speculative_sampling_target_only(*outputs, *inputs),
        reference=lambda: reference(*outputs, *inputs),
        # The row of the final token has to be read; of the others a few entries.
        work=Work(bytes_moved=batch * VOCABULARY * target.element_size()),
    )


def _likely_children(parents: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[bs, n] tokens: a node's children are the likeliest tokens of its row, best first."""
    batch, nodes = parents.shape
    best = target.topk(8, dim=-1).indices
    candidates = torch.zeros(batch, nodes, dtype=torch.int64, device=parents.device)
    seen = torch.zeros(batch, nodes, dtype=torch.int64, device=parents.device)
    request = torch.arange(batch, device=parents.device)
    for node in range(1, nodes):
        parent = parents[:, node]
        candidates[:, node] = best[request, parent, seen[request, parent].clamp(max=7)]
        seen[request, parent] += 1
    return candidates


def _build_chain(batch: int, device: torch.device, flashinfer: Any) -> Subject:
    from outrider.kernels import chain_sampling

    logits = torch.stack([zipf_logits(_DRAFTS + 1, device) for _ in range(batch)])
    target = logits.softmax(dim=-1)
    noise = torch.randn(batch, _DRAFTS, VOCABULARY, device=device) * _DRAFT_NOISE
    draft = (logits[:, :_DRAFTS] + noise).softmax(dim=-1)
    tokens = draft.flatten(0, 1).multinomial(1).view(batch, _DRAFTS).int()
    inputs = (draft, tokens, target)
    emitted = chain_sampling.chain_speculative_sampling(*inputs, seed=1)[2]
    # The final token needs its row of p and, after a rejection, of q.
    rows = batch + int((emitted < _DRAFTS).sum())
    theirs: Run | None = None
    if flashinfer is not None:
        theirs = functools.partial(flashinfer.chain_speculative_sampling, *inputs, seed=1, offset=0)
    return Subject(
        ours=lambda: chain_sampling.chain_speculative_sampling(*inputs, seed=1),
        reference=lambda: chain_sampling.chain_speculative_sampling_reference(*inputs, 1),
        flashinfer=theirs,
        work=Work(bytes_moved=rows * VOCABULARY * target.element_size() + size_of(tokens)),
    )
