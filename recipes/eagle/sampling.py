"""Text as the target writes it: continuations of pieces of source, drawn at several temperatures.

A head serves on text of the target, which at temperature 1 is not source code's, and at temperature 0 goes round in
circles: training on the source alone meets neither.

Shapes: N sequences, T tokens, H query heads, K key/value heads, D head size.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from llama import Llama, project, rotary_tables, rotate
from tokenization import END_OF_TEXT_ID
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How much is written: `rounds` of `sequences`, each of `tokens` that begin with a piece of source.

    `temperatures` are spread evenly over the sequences of a round.
    """

    rounds: int
    sequences: int
    tokens: int = 256
    prompt_tokens: int = 112
    temperatures: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0)
    seed: int = 5


def write_texts(target: Llama, stream: Tensor, config: SamplingConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two streams [rounds * sequences * tokens] int32: texts, each opened by the end-of-text token, and the hundredths
    of the temperatures at which they were chosen."""
    generator = torch.Generator(stream.device).manual_seed(config.seed)
    texts = []
    for number in range(config.rounds):
        starts = torch.randint(len(stream) - config.prompt_tokens, (config.sequences, 1), generator=generator,
                               device=stream.device)  # fmt: skip
        prompts = stream[starts + torch.arange(config.prompt_tokens, device=stream.device)].long()
        prompts[:, 0] = END_OF_TEXT_ID
        texts.append(_continue(target, prompts, config, generator, dtype).int().flatten())
        logger.info("round %d of %d written", number + 1, config.rounds)
    hundredths = (100 * _temperatures(config, stream.device)).round().int()
    return torch.cat(texts), hundredths.repeat_interleave(config.tokens).repeat(config.rounds)


def _temperatures(config: SamplingConfig, device: torch.device) -> Tensor:
    """[sequences] float32."""
    each = torch.tensor(config.temperatures, device=device)
    return each[torch.arange(config.sequences, device=device) % len(each)]


@torch.no_grad()
def _continue(
    target: Llama, prompts: Tensor, config: SamplingConfig, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """[N, tokens] int64, the prompts and what follows."""
    count, device, shape = len(prompts), prompts.device, target.shape
    tokens = torch.empty((count, config.tokens), dtype=torch.int64, device=device)
    tokens[:, : prompts.shape[1]] = prompts
    temperature = _temperatures(config, device)[:, None]
    cos, sin = (table.to(dtype) for table in rotary_tables(shape, config.tokens, device))
    size = (shape.num_hidden_layers, count, shape.num_key_value_heads, config.tokens, shape.head_dim)
    keys, values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
    begin = 0
    for end in range(prompts.shape[1], config.tokens):
        logits = _forward(target, tokens[:, begin:end], begin, (keys, values), (cos[begin:end], sin[begin:end]))
        noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
        tokens[:, end] = (logits + temperature * noise).argmax(-1)
        begin = end
    return tokens


def _forward(
    target: Llama, tokens: Tensor, begin: int, caches: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor]
) -> Tensor:
    """The last token's logits [N, V] float32; tokens [N, T] stand from `begin` on."""
    shape, end, dtype = target.shape, begin + tokens.shape[1], caches[0].dtype
    x = functional.embedding(tokens, target.model.embed_tokens.weight).to(dtype)
    layers: Any = target.model.layers
    for index, layer in enumerate(layers):
        normed, attention = layer.input_layernorm(x), layer.self_attn

        def heads(linear: torch.nn.Linear, normed: Tensor = normed) -> Tensor:
            return project(normed, linear).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

        query, key = rotate(heads(attention.q_proj), *tables), rotate(heads(attention.k_proj), *tables)
        caches[0][index, :, :, begin:end] = key
        caches[1][index, :, :, begin:end] = heads(attention.v_proj)
        held = caches[0][index, :, :, :end], caches[1][index, :, :, :end]
        mixed = _attend(query, *held, causal=tokens.shape[1] > 1)
        x = x + project(mixed.transpose(1, 2).flatten(2), attention.o_proj)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = target.model.norm(x[:, -1:])[:, 0]
    return functional.linear(last, target.model.embed_tokens.weight.to(dtype)).float()


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
