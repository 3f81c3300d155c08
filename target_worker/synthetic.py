"""The synthetic rule, for benchmarks alone: coins say which nodes are accepted, whatever the target thinks of them.

    path    the root's first child, that one's first child, and so on, while coin(position) < rate(depth)

The decision at a depth reads the request's seed, the position, the rate of that depth and whether the path has a node
there: never which token was drafted, nor what either model says of it. So contenders can be held against each other at
equal acceptance, and a request with a seed accepts the same where its trees are as deep.

Everything else is a real step: the same rows are computed, a choice is made at every one of them, and the walk kernel
walks. It begins with the choice at the last accepted node, and of what it brings back that one alone is used: the
final token. Where a coin has rejected a child with that very token, its neighbour is emitted in its place: a rejected
draft is lost to the draft worker too, as it would be in earnest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.kernels.noise import STREAM_COINS, philox_uint32
from outrider.sampling import SamplingSpec

# Coins that are made at a time: one by one they would cost a step more than all the rest of its packing.
_BLOCK = 256


@dataclass(kw_only=True, slots=True)
class DecidedPath:
    """A path that coins have accepted.

    Attributes:
        nodes: [k] the accepted nodes' numbers, root to leaf, the root left out.
        tokens: [k] theirs.
        rejected: the token of the child that was rejected at the path's end; None where there is no child.
        stop_token_ids: not to be emitted in the place of a rejected token.
    """

    nodes: Sequence[int]
    tokens: Sequence[int]
    rejected: int | None
    stop_token_ids: frozenset[int]

    @property
    def end(self) -> int:
        """The number of the last accepted node, 0 for the root: the final token is chosen there."""
        return self.nodes[-1] if self.nodes else 0

    def final(self, choice: int) -> int:
        """The token emitted after the path.

        Args:
            choice: the target's at its end.
        """
        if choice != self.rejected:
            return choice
        below = (other for other in range(choice - 1, -1, -1) if other not in self.stop_token_ids)
        return next(below, choice + 1)


class SyntheticCoins:
    """One session's coins and what it accepts by them.

    Args:
        sampling: with the rates.
    """

    def __init__(self, sampling: SamplingSpec) -> None:
        self._sampling = sampling
        self._stops = frozenset(sampling.stop_token_ids)
        self._blocks: dict[int, list[float]] = {}

    def coin(self, position: int) -> float:
        """In [0, 1), of the token at this index of prompt + output."""
        number, place = divmod(position, _BLOCK)
        if number not in self._blocks:
            self._blocks[number] = self._made(number)
        return self._blocks[number][place]

    def decide(self, tokens: Sequence[int], parents: Sequence[int], *, root: int) -> DecidedPath:
        """What is accepted of a tree.

        Args:
            tokens: [n] of nodes 1 to n.
            parents: [n] node numbers, 0 the root; a parent stands before its children.
            root: index of the root in prompt + output.
        """
        rates = self._sampling.synthetic_rates
        nodes: list[int] = []
        accepted: list[int] = []
        rejected, last, depth, deepest = None, 0, 0, len(rates) - 1
        for number, parent in enumerate(parents, start=1):
            if parent == last:
                if self.coin(root + depth + 1) >= rates[depth if depth < deepest else deepest]:
                    rejected = tokens[number - 1]
                    break
                nodes.append(number)
                accepted.append(tokens[number - 1])
                last = number
                depth += 1
        return DecidedPath(nodes=nodes, tokens=accepted, rejected=rejected, stop_token_ids=self._stops)

    def make_ahead(self, position: int) -> None:
        """Makes the coins that are needed soon after those of a position, so that no step waits for them."""
        number = position // _BLOCK + 1
        if number not in self._blocks:
            self._blocks[number] = self._made(number)

    def _made(self, number: int) -> list[float]:
        sampling = self._sampling
        seed = int(np.array([sampling.seed & (1 << 64) - 1], dtype=np.uint64).view(np.int64)[0])
        positions = torch.arange(number * _BLOCK, (number + 1) * _BLOCK)
        seeds, word = torch.full_like(positions, seed), torch.zeros_like(positions)[:, None]
        words = philox_uint32(seeds, positions, word, STREAM_COINS, sampling.choice_index)[:, 0]
        return ((words >> 8).float() * 2.0**-24).tolist()
