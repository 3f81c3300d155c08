"""The block drafter as it is trained: all drafting steps at once, in one pass over the target's features.

    entering[i]     = fc [features of i]
    x[i, s]         = [norm(embedding of token i + 1), norm(entering[i] + mask[s])]
    hidden[i, s]    = entering[i] + mask[s] + attention(x[i, s]) ... + MLP      the head's layer, at position i + s
    z[i, s]         = head's norm(hidden[i, s]) + following previous(embedding of token i + 1 + s)
    q(token i+2+s)  = z[i, s], the target's output layer

Step s reads the target's features up to i and, of what was drafted, the token before alone: through a product of low
rank, which is a bias of every token given the one before it. All steps attend to the rows of step 0, none to another
step's: with one layer, keys of masks could tell nothing that is not in the mask itself.

Shapes: N sequences, T rows, C hidden channels, F features (3 C), K rank.
"""

from collections.abc import Sequence

import torch
from head import Eagle3
from llama import LlamaShape, project, rotary_tables
from torch import Tensor, nn
from torch.nn import functional


class Block(Eagle3):
    """The block drafter; embedding and output layer are the target's.

    Args:
        shape: of the layer; hidden size and vocabulary are the target's.
        taps: after how many of the target's layers the features are taken.
        steps: drafting steps of a pass.
        rank: K.
    """

    def __init__(self, shape: LlamaShape, taps: tuple[int, ...], *, steps: int, rank: int) -> None:
        super().__init__(shape, taps)
        self.mask_embedding = nn.Embedding(steps, shape.hidden_size)
        self.previous = nn.Linear(shape.hidden_size, rank, bias=False)
        self.following = nn.Linear(rank, shape.hidden_size, bias=False)
        nn.init.zeros_(self.mask_embedding.weight)
        nn.init.normal_(self.previous.weight, std=shape.hidden_size**-0.5)
        nn.init.zeros_(self.following.weight)

    def unroll(
        self, features: Tensor, embedded: Tensor, steps: int, wanted: Sequence[int] | None = None
    ) -> list[Tensor]:
        """See `Eagle3.unroll`; only the wanted steps are computed."""
        layer, dtype, length = self.midlayer, features.dtype, features.shape[1]
        tables = [table.to(dtype) for table in rotary_tables(self.shape, length + steps, features.device)]
        entering = project(features, self.fc)
        embedding = layer.input_layernorm(embedded)
        bias = project(project(embedded[:, steps - 1 :], self.previous), self.following)

        def heads(stream: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
            wide = torch.cat((embedding, layer.hidden_norm(stream)), dim=-1)
            return layer.self_attn.heads(wide, *(table[step : step + length] for table in tables))

        masks = self.mask_embedding.weight.to(dtype)
        _, key, value = heads(entering, 0)
        found = []
        for step in range(steps) if wanted is None else wanted:
            stream = entering + masks[step]
            query = heads(stream, step)[0]
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            # All steps look at the same places, and a step's rows stand at its own roots.
            own = slice(steps - 1 - step, length - step)
            hidden = stream[:, own] + project(mixed.transpose(1, 2).flatten(2)[:, own], layer.self_attn.o_proj)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.norm(hidden) + bias)
        return found
