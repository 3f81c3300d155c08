"""Cases of the operators that verify by probabilities: trees by the target's alone, chains by p / q."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work, size_of
from benchmarks.kernel_bench.logits import VOCABULARY, zipf_logits

_BATCHES = (1, 64)
_NODES, _DRAFTS = 64, 5
# Draft logits differ from the target's by noise of this deviation: some four of five drafts are accepted.
_DRAFT_NOISE = 0.5
# Nodes that a node may hang from, the last ones before it: some twenty levels at 64 nodes.
_REACH = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Forest:
    """Random trees of n nodes for bs requests, parents before children.

    Attributes:
        parents: [bs, n] int64, -1 for the root.
        links: retrive_index, retrive_next_token and retrive_next_sibling, each [bs, n] int64.
        max_depth: levels below the root.
    """

    parents: torch.Tensor
    links: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    max_depth: int


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

    forest = _make_forest(batch, _NODES, device)
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


def _make_forest(batch: int, nodes: int, device: torch.device) -> _Forest:
    generator = np.random.default_rng(batch * 1000 + nodes)
    parents, next_token, next_sibling = np.full((3, batch, nodes), -1)
    depths = np.zeros((batch, nodes), dtype=np.int64)
    for request in range(batch):
        last_child: dict[int, int] = {}
        for node in range(1, nodes):
            parent = int(generator.integers(max(0, node - _REACH), node))
            parents[request, node] = parent
            depths[request, node] = depths[request, parent] + 1
            if parent in last_child:
                next_sibling[request, last_child[parent]] = node
            else:
                next_token[request, parent] = node
            last_child[parent] = node
    rows = np.arange(batch * nodes).reshape(batch, nodes)
    index, token, sibling = (torch.from_numpy(array).to(device) for array in (rows, next_token, next_sibling))
    return _Forest(
        parents=torch.from_numpy(parents).to(device), links=(index, token, sibling), max_depth=int(depths.max())
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
