"""The head as it is trained: EAGLE-3's one layer over three of the target's layers (arXiv 2503.01840).

    entering[i]  = fc [features of i]                     or, drafting on, the head's own hidden row of i - 1
    x[i]         = [norm(embedding of token i + 1), norm(entering[i])]
    hidden[i]    = entering[i] + attention(x) ... + MLP          one decoder layer whose attention reads 2 C channels
    q(token i+2) = head's norm(hidden[i]), the target's output layer

Parameters carry the names of published checkpoints.

A chain of drafting steps can begin at every row, its root. Queries, keys and values are computed for all rows;
attention and what follows it for chosen chains alone.

Shapes: N sequences, T rows, M chains, R rows of any kind; C hidden channels, F features (3 C), V vocabulary; H query
heads, K key and value heads, D channels of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from chain_attention import attend
from llama import GatedMLP, Llama, LlamaShape, RMSNorm, project, rotary_tables, rotate
from torch import Tensor, nn
from torch.nn import functional


class HeadAttention(nn.Module):
    """Projections of grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [R, H, D], key and value [R, K, D] of [R, 2 C]; cos and sin are [R, 1, D]."""
        query, key, value = (
            project(x, linear).unflatten(1, (-1, self.shape.head_dim))
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class MidLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """Rows of texts that chains read: those of step 0.

    Attributes:
        embedded: [N * T, C] of the tokens after the rows.
        stream: [N * T, C] that enters the layer.
        query: [N * T, H, D].
        key, value: [N, H, T, D]; each query head has a copy of its key and value head, which every kernel takes.
        tables: cosines and sines, each [T, D].
    """

    embedded: Tensor
    stream: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    tables: tuple[Tensor, Tensor]

    def positions(self, places: Tensor) -> Tensor:
        """Positions of places among the N * T rows."""
        return places % self.key.shape[2]

    def attend(self, query: Tensor, roots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """See `chain_attention.attend`; the chains' own rows are given by step, [M, K, D] each."""
        none = query.new_empty((0, len(query), 1, query.shape[2]))
        own_key, own_value = (torch.stack(tuple(each)) if each else none for each in (keys, values))
        return attend(query, self.key, self.value, roots=roots, own_key=own_key, own_value=own_value)


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
        # Where `compile_layer` puts compiled code.
        self.before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._before_attention
        self.after_attention: Callable[..., tuple[Tensor, Tensor]] = self._after_attention
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def start_from(self, target: Llama) -> None:
        """Begin with what the target's output layer is used to: its norm, over the last features as they are.

        After 40 small steps the divergence of the embedded target's head is 4.5 nats, and 6.2 from a fresh product.
        """
        self.norm.weight.data.copy_(target.model.norm.weight)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight.data[:, -self.shape.hidden_size :])

    def compile_layer(self) -> None:
        """Have the layer run as compiled code around its attention, made once for any number of rows."""
        self.before_attention = torch.compile(self._before_attention, dynamic=True)
        self.after_attention = torch.compile(self._after_attention, dynamic=True)

    def _before_attention(
        self, embedded: Tensor, stream: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [R, H, D], key and value [R, K, D] of embeddings and residual stream, [R, C], at positions [R].

        cos and sin are the tables of all positions.
        """
        layer = self.midlayer
        wide = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(stream)), dim=-1)
        return layer.self_attn.heads(wide, cos[positions, None], sin[positions, None])

    def _after_attention(self, stream: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden rows and normed hidden rows, [R, C], of the residual stream [R, C] and what was mixed, [R, H, D]."""
        layer = self.midlayer
        hidden = stream + project(mixed.flatten(1), layer.self_attn.o_proj)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, self.norm(hidden)

    def read_text(self, features: Tensor, embedded: Tensor) -> TextRows:
        """The rows of features [N, T, F] and embeddings [N, T, C]."""
        sequences, length, _ = features.shape
        cos, sin = (table.to(features.dtype) for table in rotary_tables(self.shape, length, features.device))
        embedded, stream = embedded.flatten(0, 1), project(features.flatten(0, 1), self.fc)
        places = torch.arange(length, device=features.device).repeat(sequences)
        query, *shared = self.before_attention(embedded, stream, places, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        key, value = (
            each.repeat_interleave(group, 1).unflatten(0, (sequences, length)).transpose(1, 2) for each in shared
        )
        return TextRows(embedded=embedded, stream=stream, query=query, key=key, value=value, tables=(cos, sin))

    def unroll(self, features: Tensor, embedded: Tensor, roots: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Normed hidden rows of chains: of all their drafting steps, each on the hidden row of the one before.

        At step s the row of a chain from row r on stands at position r + s and reads the token after that place: s
        tokens past the last whose features it knows. It sees the features' rows up to r, and its own chain's.

        Args:
            features: [N, T, F] of the target.
            embedded: [N, T, C] of the tokens after the rows.
            roots: [M] int64 places among the N * T rows where chains begin, none twice, each in front of as many rows
                of its text as there are steps.
            counts: by step how many of the chains, the first ones, are followed to it; never more than before.

        Returns:
            For each step [counts of the step, C].
        """
        text = self.read_text(features, embedded)
        query, stream = text.query.index_select(0, roots), text.stream.index_select(0, roots)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        found = []
        for step, count in enumerate(counts):
            own = roots[:count]
            if step:
                stream = stream[:count]
                query, key, value = self.before_attention(
                    text.embedded[own + step], stream, text.positions(own) + step, *text.tables
                )
                own_keys, own_values = ([*(each[:count] for each in held), last] for held, last in
                                        ((own_keys, key), (own_values, value)))  # fmt: skip
            mixed = text.attend(query[:count], own, own_keys, own_values)
            stream, normed = self.after_attention(stream[:count], mixed)
            found.append(normed)
        return found


@torch.no_grad()
def target_rows(target: Llama, tokens: Tensor, taps: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's features [N, T, F] at tokens [N, T], and what its output layer reads, [N, T, C]."""
    cos, sin = (table.to(dtype) for table in rotary_tables(target.shape, tokens.shape[1], tokens.device))
    x = functional.embedding(tokens, target.model.embed_tokens.weight).to(dtype)
    stream = [x]
    for layer in target.model.layers:
        x = layer(x, cos, sin)
        stream.append(x)
    return torch.cat([stream[tap] for tap in taps], dim=-1), target.model.norm(x)
