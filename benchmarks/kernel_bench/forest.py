"""Random token trees, as links and as a draft's candidate pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Forest:
    """Trees of n nodes for bs requests, parents before children.

    Attributes:
        parents: [bs, n] int64, -1 for the root.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, n] int64, the field's links.
        sees: [bs, n, n] bool: whether a node is the other or descends from it.
        max_depth: levels below the root.
    """

    parents: torch.Tensor
    retrive_index: torch.Tensor
    retrive_next_token: torch.Tensor
    retrive_next_sibling: torch.Tensor
    sees: torch.Tensor
    max_depth: int

    @property
    def links(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order in which operators take them."""
        return self.retrive_index, self.retrive_next_token, self.retrive_next_sibling


def make_forest(batch: int, nodes: int, device: torch.device, *, reach: int = 6) -> Forest:
    """Each node hangs from one of the `reach` before it: some six levels at 16 nodes, some twenty at 64."""
    generator = np.random.default_rng(batch * 1000 + nodes)
    parents = np.full((batch, nodes), -1)
    next_token, next_sibling = np.full((2, batch, nodes), -1)
    depths = np.zeros((batch, nodes), dtype=np.int64)
    sees = np.broadcast_to(np.eye(nodes, dtype=np.bool_), (batch, nodes, nodes)).copy()
    for request in range(batch):
        last_child: dict[int, int] = {}
        for node in range(1, nodes):
            parent = int(generator.integers(max(0, node - reach), node))
            parents[request, node] = parent
            depths[request, node] = depths[request, parent] + 1
            sees[request, node] |= sees[request, parent]
            if parent in last_child:
                next_sibling[request, last_child[parent]] = node
            else:
                next_token[request, parent] = node
            last_child[parent] = node
    rows = np.arange(batch * nodes).reshape(batch, nodes)
    put = [torch.from_numpy(array).to(device) for array in (parents, rows, next_token, next_sibling, sees)]
    return Forest(
        parents=put[0],
        retrive_index=put[1],
        retrive_next_token=put[2],
        retrive_next_sibling=put[3],
        sees=put[4],
        max_depth=int(depths.max()),
    )


def follow_children(forest: Forest, candidates: torch.Tensor, *, share: float) -> torch.Tensor:
    """A choice per node, [bs, n]: the token of one of its children with probability `share`, else no child's token."""
    batch, nodes = forest.parents.shape
    wanted = torch.full_like(candidates, -1)
    # A random child of each node wins: of several writers to one place any may be last.
    order = torch.randperm(nodes - 1, device=candidates.device) + 1
    request = torch.arange(batch, device=candidates.device)[:, None].expand(-1, nodes - 1)
    wanted[request, forest.parents[:, order]] = candidates[:, order]
    stays = torch.rand(batch, nodes, device=candidates.device) < share
    return torch.where(stays & (wanted >= 0), wanted, candidates.max() + 1)


def draft_pool(
    batch: int, nodes: int, topk: int, depth: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of candidates in "topk-squared" order, and the nodes selected from it.

    Beams and selection are those of highest product of random probabilities, so every selected candidate has its parent
    selected too.

    Returns:
        parent_list [bs, topk * (depth - 1) + 1] and selected_index [bs, n - 1], both int64.
    """
    generator = np.random.default_rng(nodes)
    lists, selections = [], []
    for _ in range(batch):
        pool = np.log(generator.random(topk))
        parent_list, beams = [-1, *range(topk)], np.arange(topk)
        for level in range(1, depth):
            children = (pool[beams, None] + np.log(generator.random((topk, topk)))).ravel()
            kept = np.sort(np.argsort(children)[-topk:])
            beams = len(pool) + kept
            pool = np.concatenate([pool, children])
            if level < depth - 1:
                parent_list += beams.tolist()
        lists.append(parent_list[: topk * (depth - 1) + 1])
        selections.append(np.sort(np.argsort(pool)[-(nodes - 1) :]))
    return torch.tensor(lists, device=device), torch.from_numpy(np.stack(selections)).to(device)
