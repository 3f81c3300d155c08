"""The head as it is trained: EAGLE-3's one layer over three of the target's layers (arXiv 2503.01840).

    entering[i]  = fc [features of i]                     or, drafting on, the head's own hidden row of i - 1
    x[i]         = [norm(embedding of token i + 1), norm(entering[i])]
    hidden[i]    = entering[i] + attention(x) ... + MLP          one decoder layer whose attention reads 2 C channels
    q(token i+2) = head's norm(hidden[i]), the target's output layer

Parameters carry the names of published checkpoints.

Shapes: N sequences, T rows, C hidden channels, F features (3 C), V vocabulary.
"""

from collections.abc import Sequence

import torch
from llama import GatedMLP, Llama, LlamaShape, RMSNorm, project, rotary_tables, rotate
from torch import Tensor, nn
from torch.nn import functional

# Entries of a row that matrix units read at once: 16 bytes.
_ALIGNED = 8


class HeadAttention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [N, H, T, D]; each query head has a copy of its key and value head."""
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads

        def split(linear: nn.Linear) -> Tensor:
            return project(x, linear).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        query, key, value = split(self.q_proj), split(self.k_proj), split(self.v_proj)
        key = rotate(key, cos, sin)
        return rotate(query, cos, sin), key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


class MidLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)


class Eagle3(nn.Module):
    """The head; embedding and output layer are the target's.

    Args:
        shape: of the layer; hidden size and vocabulary are the target's.
        taps: after how many of the target's layers the features are taken.
    """

    def __init__(self, shape: LlamaShape, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.taps = shape, taps
        self.fc = nn.Linear(len(taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def start_from(self, target: Llama) -> None:
        """Begins with what the target's output layer is used to: its norm, over the last features as they are.

        After 40 small steps the divergence of the embedded target's head is 4.5 nats, and 6.2 from a fresh product.
        """
        self.norm.weight.data.copy_(target.model.norm.weight)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight.data[:, -self.shape.hidden_size :])

    def unroll(
        self, features: Tensor, embedded: Tensor, steps: int, wanted: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Normed hidden rows of `steps` drafting steps, each on the hidden rows of the one before.

        Row i of each reads the token after position i + steps - 1: all steps look at the same places.

        At step s row r stands at position r + s: s tokens past the last whose features it knows. It sees the features'
        rows up to r, and of each step in between the row of its own chain.

        Args:
            features: [N, T, F] of the target.
            embedded: [N, T, C] of the tokens after the rows.
            steps: how many.
            wanted: those that are returned; None: all.

        Returns:
            For each wanted step [N, T + 1 - steps, C].
        """
        layer, dtype = self.midlayer, features.dtype
        length = features.shape[1]
        tables = [table.to(dtype) for table in rotary_tables(self.shape, length + steps, features.device)]
        entering = project(features, self.fc)
        keys, values, normed = [], [], []
        for step in range(steps):
            # Rows past the end of the text go on with anything: nobody else sees them, and matrices keep one shape.
            cos, sin = (table[step : step + length] for table in tables)
            embedding = layer.input_layernorm(embedded.roll(-step, 1))
            wide = torch.cat((embedding, layer.hidden_norm(entering)), dim=-1)
            query, key, value = layer.self_attn.heads(wide, cos, sin)
            keys.append(key)
            values.append(value)
            mixed = _attend(query, keys, values)
            hidden = entering + project(mixed.transpose(1, 2).flatten(2), layer.self_attn.o_proj)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            normed.append(self.norm(hidden[:, steps - 1 - step : length - step]))
            entering = hidden
        return normed if wanted is None else [normed[step] for step in wanted]


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Causal attention to the first keys, and to the row's own of the others; all [N, H, T, D]."""
    if len(keys) == 1:
        return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    length, query = query.shape[2], query * query.shape[3] ** -0.5
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    # These matrices are most of what a step moves: masked as they are made, never widened, and with rows of a length
    # that matrix units like.
    causal = torch.baddbmm(hidden, query.flatten(0, 1), keys[0].flatten(0, 1).mT).unflatten(0, query.shape[:2])
    scores = [causal, *((query * key).sum(-1, keepdim=True) for key in keys[1:])]
    padding = causal.new_full((), float("-inf")).expand(*causal.shape[:3], -(len(keys) - 1) % _ALIGNED)
    weights = torch.cat([*scores, padding], dim=-1).softmax(-1)
    mixed = weights[..., :length] @ values[0]
    for place, value in enumerate(values[1:]):
        mixed = mixed + weights[..., length + place, None] * value
    return mixed


@torch.no_grad()
def target_rows(target: Llama, tokens: Tensor, taps: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's features [N, T, F] and logits [N, T, V] at tokens [N, T]."""
    cos, sin = (table.to(dtype) for table in rotary_tables(target.shape, tokens.shape[1], tokens.device))
    x = functional.embedding(tokens, target.model.embed_tokens.weight).to(dtype)
    stream = [x]
    for layer in target.model.layers:
        x = layer(x, cos, sin)
        stream.append(x)
    logits = functional.linear(target.model.norm(x), target.model.embed_tokens.weight.to(dtype))
    return torch.cat([stream[tap] for tap in taps], dim=-1), logits
