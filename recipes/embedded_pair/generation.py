"""Batched generation by the recipe's Llama: a cache of keys and values, and the next token's logits.

Shapes: N sequences, T tokens, H query heads, K key/value heads, D head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from llama import Llama, project, rotary_tables, rotate
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """Keys and values of sequences of one length, [layers, N, K, T, D], and the rotary tables [T, D]."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def empty(cls, model: Llama, sequences: int, tokens: int, dtype: torch.dtype) -> "KvCache":
        """Return a cache for `sequences` of at most `tokens`."""
        shape, device = model.shape, model.model.embed_tokens.weight.device
        size = (shape.num_hidden_layers, sequences, shape.num_key_value_heads, tokens, shape.head_dim)
        keys, values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        cos, sin = (table.to(dtype) for table in rotary_tables(shape, tokens, device))
        return cls(keys=keys, values=values, cos=cos, sin=sin)


@torch.no_grad()
def next_logits(model: Llama, tokens: Tensor, begin: int, cache: KvCache) -> Tensor:
    """Return the logits [N, V], float32, of the token after `tokens` [N, T], which stand at `begin`.

    The cache holds everything before `begin`, and afterwards these tokens too.
    """
    shape, end, dtype = model.shape, begin + tokens.shape[1], cache.keys.dtype
    cos, sin = cache.cos[begin:end], cache.sin[begin:end]
    x = functional.embedding(tokens, model.model.embed_tokens.weight).to(dtype)
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        normed, attention = layer.input_layernorm(x), layer.self_attn

        def heads(linear: torch.nn.Linear, normed: Tensor = normed) -> Tensor:
            return project(normed, linear).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

        query, key = rotate(heads(attention.q_proj), cos, sin), rotate(heads(attention.k_proj), cos, sin)
        cache.keys[index, :, :, begin:end] = key
        cache.values[index, :, :, begin:end] = heads(attention.v_proj)
        held = cache.keys[index, :, :, :end], cache.values[index, :, :, :end]
        mixed = _attend(query, *held, causal=tokens.shape[1] > 1)
        x = x + project(mixed.transpose(1, 2).flatten(2), attention.o_proj)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = model.model.norm(x[:, -1:])[:, 0]
    return functional.linear(last, model.model.embed_tokens.weight.to(dtype)).float()


def choose(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token [N] for each row of logits [N, V], drawn at its temperature [N, 1]; 0 takes the most likely."""
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    return (logits + temperature * noise).argmax(-1)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """[N, H, T, D]; keys and values are [N, K, L, D]."""
    group = query.shape[1] // key.shape[1]
    if causal:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    # One row a sequence: the query heads of a key head are the rows of one product.
    rows = query.transpose(1, 2).unflatten(2, (-1, group)).squeeze(1)
    weights = (rows @ key.mT * key.shape[-1] ** -0.5).float().softmax(-1).to(query.dtype)
    return (weights @ value).flatten(1, 2)[:, :, None]
