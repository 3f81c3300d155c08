"""The root and nodes of one session's tree as rows of a forward's logits, and what applies to these rows.

Shapes: T rows of all sessions (root and nodes, session after session).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.draft_distribution import DraftDistribution
from outrider.target_worker.sessions import Session
from outrider.tree import node_depths


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeRows:
    """The root and n nodes of one session's tree.

    Attributes:
        session: whose; its last token is the root.
        tokens: [n] of nodes 1 to n.
        parents: [n] node numbers, 0 the root.
        depths: [n + 1], the root's 0 first.
        distributions: [n] the q each node's token was drawn from, where the rule needs it; otherwise empty.
    """

    session: Session
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: np.ndarray
    distributions: Sequence[DraftDistribution | None] = ()

    @classmethod
    def of(
        cls,
        session: Session,
        tokens: Sequence[int],
        parents: Sequence[int],
        distributions: Sequence[DraftDistribution | None] = (),
    ) -> NodeRows:
        """The rows, depths computed."""
        depths = node_depths(parents)
        return cls(session=session, tokens=tokens, parents=parents, depths=depths, distributions=distributions)

    @property
    def count(self) -> int:
        """Rows: n + 1."""
        return len(self.tokens) + 1

    def paths(self) -> list[list[int]]:
        """[n + 1] the tokens from below the root to each row's own."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    def bans_stop(self) -> np.ndarray:
        """[n + 1] bool: the row chooses a token before which fewer than min_new_tokens are out."""
        session = self.session
        out_before = len(session.tokens) - session.prompt_len + self.depths
        return out_before < session.sampling.min_new_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingColumns:
    """The sampling parameters of T rows as the operators take them, each [T].

    Attributes:
        seeds: int64, bit patterns.
        positions: int64, index in prompt + output of the token that the row chooses.
        temperature, top_k, top_p, min_p: float32, but top_k int64.
        choice_index: int64.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    choice_index: torch.Tensor

    @classmethod
    def of(cls, trees: Sequence[NodeRows], device: torch.device) -> SamplingColumns:
        """Those of all rows of the trees, tree after tree."""
        counts = [tree.count for tree in trees]
        specs = [tree.session.sampling for tree in trees]

        def column(values: Sequence[float], dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

        seeds = np.array([spec.seed & (1 << 64) - 1 for spec in specs], dtype=np.uint64).view(np.int64)
        positions = np.concatenate([tree.session.root_index + 1 + tree.depths for tree in trees])
        return cls(
            seeds=torch.from_numpy(np.repeat(seeds, counts)).to(device),
            positions=torch.from_numpy(positions.astype(np.int64)).to(device),
            temperature=column([spec.temperature for spec in specs], np.float32),
            top_k=column([spec.top_k for spec in specs], np.int64),
            top_p=column([spec.top_p for spec in specs], np.float32),
            min_p=column([spec.min_p for spec in specs], np.float32),
            choice_index=column([spec.choice_index for spec in specs], np.int64),
        )
