"""The law of what `tree_speculative_sampling_target_only` emits, by exact integration over its uniforms.

The verdict is piecewise constant in every uniform, and the pieces end where a running sum of target or residual
probabilities does. So one evaluation inside every piece, weighted by the piece's length, gives the law without any
sampling error. The pieces are laid out as a batch, so the kernel itself is integrated on a GPU.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import torch
from tests.kernels.tensors import pieces

from outrider.kernels import tree_sampling
from outrider.kernels.backend import INTERPRETED

_Law = dict[tuple[int, ...], float]
_Operator = Callable[..., None]
_VOCABULARY = 4


class _Tree:
    """A random tree of distinct siblings with a random target of which some entries are 0."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.nodes = 1 + number % 6
        self.path = 1 + int(torch.randint(0, 4, (1,), generator=generator))
        self.parents, self.tokens = [-1], [0]
        while len(self.parents) < self.nodes:
            parent = int(torch.randint(0, len(self.parents), (1,), generator=generator))
            token = int(torch.randint(0, _VOCABULARY, (1,), generator=generator))
            if token not in [self.tokens[child] for child in self.children(parent)]:
                self.parents.append(parent)
                self.tokens.append(token)
        target = torch.rand(self.nodes, _VOCABULARY, generator=generator)
        target[torch.rand(self.nodes, _VOCABULARY, generator=generator) < 0.2] = 0
        target[:, 1] += 0.1
        self.target = target / target.sum(1, keepdim=True)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def links(self) -> list[list[int]]:
        next_token = [min(self.children(node), default=-1) for node in range(self.nodes)]
        next_sibling = [
            min((other for other in self.children(self.parents[node]) if other > node), default=-1) if node else -1
            for node in range(self.nodes)
        ]
        return [self.tokens, next_token, next_sibling]

    def target_law(self) -> _Law:
        """Return the law of plain sampling, cut where it leaves the tree or the path is full."""
        law: _Law = defaultdict(float)

        def extend(node: int, emitted: tuple[int, ...], mass: float) -> None:
            inside = (
                {self.tokens[child]: child for child in self.children(node)} if len(emitted) < self.path - 1 else {}
            )
            for token in range(_VOCABULARY):
                probability = mass * float(self.target[node, token])
                if token in inside:
                    extend(inside[token], (*emitted, token), probability)
                else:
                    law[*emitted, token] += probability

        extend(0, (), 1.0)
        return law


def _cumulative(row: torch.Tensor) -> list[float]:
    sums = row.double().cumsum(0)
    return (sums / sums[-1].clamp(min=1e-30)).tolist()


def _integrated_law(tree: _Tree, operator: _Operator, device: torch.device) -> _Law:
    inner = [node for node in range(tree.nodes) if tree.children(node)]
    families = {node: [tree.tokens[child] for child in tree.children(node)] for node in range(tree.nodes)}
    coins = [pieces(tree.target[node, families[node]].double().cumsum(0).tolist()) for node in inner]
    ends: list[float] = []
    for node in range(tree.nodes):
        residual = tree.target[node].index_fill(0, torch.tensor(families[node], dtype=torch.long), 0.0)
        ends += _cumulative(tree.target[node]) + _cumulative(residual)
    points = list(itertools.product(*coins, pieces(ends)))
    count = len(points)
    uniforms = torch.zeros(count, tree.nodes)
    uniforms[:, inner] = torch.tensor([[point for point, _ in row[:-1]] for row in points]).view(count, len(inner))
    final = torch.tensor([row[-1][0] for row in points])
    tokens, child, sibling = (torch.tensor(column, device=device).expand(count, -1) for column in tree.links())
    rows = torch.arange(count * tree.nodes, device=device).view(count, tree.nodes)
    predicts = torch.full((count * tree.nodes,), -1, dtype=torch.int32, device=device)
    index = torch.full((count, tree.path), -1, dtype=torch.int32, device=device)
    accepted = torch.full((count,), -1, dtype=torch.int32, device=device)
    target = tree.target.expand(count, -1, -1).to(device)
    operator(
        predicts, index, accepted, tokens, rows, child, sibling, uniforms.to(device), final.to(device), target, None
    )
    law: _Law = defaultdict(float)
    predicted = predicts.tolist()
    for path, depth, row in zip(index.tolist(), accepted.tolist(), points, strict=True):
        law[tuple(predicted[place] for place in path[: depth + 1])] += torch.tensor([s for _, s in row]).prod().item()
    return law


def _error(tree: _Tree, operator: _Operator, device: torch.device) -> float:
    """Largest difference of one sequence's probability."""
    found, expected = _integrated_law(tree, operator, device), tree.target_law()
    return max(abs(found.get(emitted, 0.0) - expected.get(emitted, 0.0)) for emitted in {*found, *expected})


# The interpreter has time for a small one.
_TREES = [_Tree(237)] if INTERPRETED else [_Tree(number) for number in range(40)]


def test_the_law_is_the_targets(device: torch.device) -> None:
    operator = tree_sampling.tree_speculative_sampling_target_only
    assert max(_error(tree, operator, device) for tree in _TREES) < 1e-6
