"""Choice of the tokens with a row of their own in a draft's embedding: the frequent ones. All others share one row.

A draft has few parameters, and 49,152 rows would take most of them. As a model it is an ordinary Llama in which many
rows of the tied embedding are equal; while it learns, the tokens that share the last row are one bin.

Shapes: V tokens, F of them frequent, B = F + 1 rows of the embedding and bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """Rows of a draft's embedding.

    Attributes:
        row_of: [V] int64, of each token; the frequent ones have rows 0 to F - 1 in their order.
    """

    row_of: Tensor

    @property
    def frequent(self) -> Tensor:
        """Tokens with a row of their own, [F] int64, in the order of their rows."""
        return self._tokens(shares=False)

    @property
    def sharing(self) -> Tensor:
        """Tokens that share the last row, [V - F] int64."""
        return self._tokens(shares=True)

    @property
    def bias(self) -> Tensor:
        """Logarithm of how many tokens each row stands for, [B] float32."""
        bias = torch.zeros(len(self.frequent) + 1, device=self.row_of.device)
        bias[-1] = math.log(len(self.sharing))
        return bias

    def _tokens(self, *, shares: bool) -> Tensor:
        return ((self.row_of == self.row_of.max()) == shares).nonzero()[:, 0]


def choose_rows(tokens: Tensor, *, vocab_size: int, rows: int, always: Sequence[int]) -> EmbeddingRows:
    """Return rows for the most frequent tokens of a text, and one for all others.

    Args:
        tokens: the text, int32 or int64.
        vocab_size: V.
        rows: B.
        always: tokens that have a row of their own however rare they are.

    Raises:
        ValueError: not every row would stand for a token, or the last one for a single token.
    """
    if not len(set(always)) < rows < vocab_size:
        raise ValueError(f"{rows} rows given, more than {len(set(always))} and fewer than {vocab_size} needed")
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size)
    counts[list(always)] = counts.sum() + 1
    frequent = counts.topk(rows - 1).indices.sort().values
    row_of = torch.full((vocab_size,), rows - 1, device=tokens.device)
    row_of[frequent] = torch.arange(rows - 1, device=tokens.device)
    return EmbeddingRows(row_of)
