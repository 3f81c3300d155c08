"""Batched generation by the recipe's Llama: a cache of keys and values, and the next token's logits.

Shapes: N sequences, T tokens, H query heads, K key/value heads, D head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from decode_attention import decode_attention
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
        mixed = _attend(query, cache.keys[index], cache.values[index], end)
        x = x + project(mixed.transpose(1, 2).flatten(2), attention.o_proj)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = model.model.norm(x[:, -1:])[:, 0]
    return functional.linear(last, model.model.embed_tokens.weight.to(dtype)).float()


def choose(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Return a token [N] for each row of logits [N, V], drawn at its temperature [N, 1]; 0 takes the most likely."""
    # Gumbel noise is minus the logarithm of exponential noise; in as few passes over all columns as torch needs.
    noise = torch.empty_like(logits).exponential_(generator=generator).log_()
    return torch.addcmul(logits, temperature, noise, value=-1).argmax(-1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, end: int) -> Tensor:
    """Causal attention of the last tokens before `end`, [N, H, T, D], to a layer's cache; all others stand before."""
    group = query.shape[1] // keys.shape[1]
    if query.shape[2] == 1:
        rows = query.squeeze(2).unflatten(1, (-1, group))
        return decode_attention(rows, keys, values, end).flatten(1, 2)[:, :, None]
    key, value = (cache[:, :, :end].repeat_interleave(group, 1) for cache in (keys, values))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
