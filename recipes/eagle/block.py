"""The block drafter as it is trained: all drafting steps at once, in one pass over the target's features.

    entering[i]     = fc [features of i]
    x[i, s]         = [norm(embedding of token i + 1), norm(entering[i] + mask[s])]
    hidden[i, s]    = entering[i] + mask[s] + attention(x[i, s]) ... + MLP      the head's layer, at position i + s
    z[i, s]         = head's norm(hidden[i, s]) + following previous(embedding of token i + 1 + s)
    q(token i+2+s)  = z[i, s], the target's output layer

Step s reads the target's features up to i and, of what was drafted, the token before alone: through a product of low
rank, which is a bias of every token given the one before it. All steps attend to the rows of step 0, none to another
step's: with one layer, keys of masks could tell nothing that is not in the mask itself.

Shapes: N sequences, T rows, C hidden channels, F features (3 C).
"""

from collections.abc import Sequence

import torch
from head import Eagle3
from llama import LlamaShape, project
from torch import Tensor, nn


class Block(Eagle3):
    """The block drafter; embedding and output layer are the target's.

    Args:
        shape: of the layer; hidden size and vocabulary are the target's.
        taps: after how many of the target's layers the features are taken.
        steps: drafting steps of a pass.
        rank: of that product.
    """

    def __init__(self, shape: LlamaShape, taps: tuple[int, ...], *, steps: int, rank: int) -> None:
        super().__init__(shape, taps)
        self.mask_embedding = nn.Embedding(steps, shape.hidden_size)
        self.previous = nn.Linear(shape.hidden_size, rank, bias=False)
        self.following = nn.Linear(rank, shape.hidden_size, bias=False)
        nn.init.zeros_(self.mask_embedding.weight)
        nn.init.normal_(self.previous.weight, std=shape.hidden_size**-0.5)
        nn.init.zeros_(self.following.weight)

    def unroll(self, features: Tensor, embedded: Tensor, roots: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """See `Eagle3.unroll`; all steps run at once."""
        text = self.read_text(features, embedded)
        stream, masks = text.stream.index_select(0, roots), self.mask_embedding.weight.to(features.dtype)
        stream = torch.cat([stream[:count] + mask for count, mask in zip(counts, masks, strict=False)])
        own = torch.cat([roots[:count] for count in counts])
        places = torch.cat([roots[:count] + step for step, count in enumerate(counts)])
        positions = text.positions(own) + places - own
        query, _, _ = self.before_attention(text.embedded[own], stream, positions, *text.tables)
        mixed = [text.attend(each, roots[: len(each)], (), ()) for each in query.split(list(counts))]
        _, normed = self.after_attention(stream, torch.cat(mixed))
        bias = project(project(text.embedded[places], self.previous), self.following)
        return list((normed + bias).split(list(counts)))
