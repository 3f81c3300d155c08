"""Text as the target writes it: continuations of pieces of source, drawn at several temperatures.

A head serves on text of the target, which at temperature 1 is not source code's, and at temperature 0 goes round in
circles: training on the source alone meets neither.

Shapes: N sequences, T tokens.
"""

import logging
from dataclasses import dataclass

import torch
from generation import KvCache, choose, next_logits
from llama import Llama
from tokenization import END_OF_TEXT_ID
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Amount of text to write: `rounds` of `sequences`, each of `tokens` that begin with a piece of source.

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
    count = len(prompts)
    tokens = torch.empty((count, config.tokens), dtype=torch.int64, device=prompts.device)
    tokens[:, : prompts.shape[1]] = prompts
    temperature = _temperatures(config, prompts.device)[:, None]
    cache = KvCache.empty(target, count, config.tokens, dtype)
    begin = 0
    for end in range(prompts.shape[1], config.tokens):
        tokens[:, end] = choose(next_logits(target, tokens[:, begin:end], begin, cache), temperature, generator)
        begin = end
    return tokens
