"""The distribution q from which a draft drew a token: sparse, exact, and its form on the wire (torch-free).

q(token) = weight / 2^24 with whole weights that sum to 2^24. Float32 holds every such number exactly, so the q that a
target divides by is, bit for bit, the one that the draft drew from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from outrider.v1 import common_pb2
from outrider.wire import split_by_counts

UInt32Array = npt.NDArray[np.uint32]

_WEIGHT_BITS = 24
WEIGHT_SUM = 1 << _WEIGHT_BITS


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """One q of k tokens."""

    token_ids: UInt32Array  # [k], distinct
    weights: UInt32Array  # [k], each at least 1, `WEIGHT_SUM` in sum

    @classmethod
    def quantised(cls, token_ids: Sequence[int] | npt.NDArray, mass: Sequence[float] | npt.NDArray) -> Self:
        """The distribution nearest to given masses, renormalised (largest remainders); too small a token is left out.

        Args:
            token_ids: [n], distinct.
            mass: [n], at least 0 each, above 0 in sum.
        """
        given = np.asarray(mass, dtype=np.float64)
        exact = given * (WEIGHT_SUM / given.sum())
        weights = np.floor(exact)
        missing = WEIGHT_SUM - int(weights.sum())
        weights[np.argsort(weights - exact, kind="stable")[:missing]] += 1
        kept = weights > 0
        return cls(np.asarray(token_ids)[kept].astype(np.uint32), weights[kept].astype(np.uint32))

    def draw(self, word: int) -> int:
        """The token that a 32-bit word gives: an exact sample of q if all words are equally likely."""
        place = np.searchsorted(np.cumsum(self.weights), word >> (32 - _WEIGHT_BITS), side="right")
        return int(self.token_ids[place])

    def probabilities(self) -> npt.NDArray[np.float32]:
        """[k] q of each token, exact."""
        return self.weights.astype(np.float32) / np.float32(WEIGHT_SUM)

    def fault(self, token: int, vocab_size: int) -> str | None:
        """Return why this cannot be the q that `token` was drawn from; None if it can."""
        if len(self.token_ids) == 0 or int(self.token_ids.max()) >= vocab_size:
            return f"token ids from 0 to {vocab_size - 1} needed, at least one"
        if len(np.unique(self.token_ids)) < len(self.token_ids):
            return "a token stands in it twice"
        total = int(self.weights.sum(dtype=np.int64))
        if total != WEIGHT_SUM or not self.weights.all():
            return f"weights of at least 1 and {WEIGHT_SUM} in sum needed, {total} given"
        if token not in self.token_ids:
            return f"the node's own token, {token}, is not in it"
        return None


def pack_distributions(distributions: Sequence[DraftDistribution | None]) -> common_pb2.DraftDistributions | None:
    """Pack the distributions of a batch's nodes for the wire; None if no node has one."""
    present = [distribution for distribution in distributions if distribution is not None]
    if not present:
        return None
    return common_pb2.DraftDistributions(
        counts=[0 if distribution is None else len(distribution.token_ids) for distribution in distributions],
        token_ids=b"".join(distribution.token_ids.astype("<u4", copy=False).tobytes() for distribution in present),
        weights=b"".join(distribution.weights.astype("<u4", copy=False).tobytes() for distribution in present),
    )


def unpack_distributions(message: common_pb2.DraftDistributions, nodes: int) -> list[DraftDistribution | None]:
    """Invert `pack_distributions` for a batch of so many nodes; ValueError for columns of different lengths."""
    if not (message.counts or message.token_ids or message.weights):
        return [None] * nodes
    token_ids, weights = (np.frombuffer(column, dtype="<u4") for column in (message.token_ids, message.weights))
    total = sum(message.counts)
    for name, count, needed in (
        ("counts", len(message.counts), nodes),
        ("token_ids", len(token_ids), total),
        ("weights", len(weights), total),
    ):
        if count != needed:
            raise ValueError(f"distributions.{name}: {count} entries given, {needed} needed")
    return [
        DraftDistribution(token_ids[entries], weights[entries]) if entries.stop > entries.start else None
        for entries in split_by_counts(message.counts)
    ]
