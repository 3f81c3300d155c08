"""Report on the pair over held-out files: compression, agreement, overlap, and a few completions."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llama import Llama
from tokenization import END_OF_TEXT_ID
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 1024
TREE_WIDTH = 4


@torch.no_grad()
def measure_pair(target: Llama, draft: Llama, stream: Tensor, tokenizer: Tokenizer, max_windows: int) -> dict[str, Any]:
    """Means over the stream's first `max_windows` windows, in float32.

    `agreement` is the share of positions where both argmaxes coincide, `overlap` the mean of sum(min(p, q)). The
    `coupled` figures add the same Gumbel noise to both sides, as coupled sampling at temperature 1 does. `top4` asks
    whether the target's choice is among the draft's four best.
    """
    device = stream.device
    token_bytes = torch.tensor([_token_bytes(tokenizer, i) for i in range(tokenizer.get_vocab_size())], device=device)
    noise = torch.Generator(device).manual_seed(0)
    sums: dict[str, float] = {}
    windows = min(max_windows, (len(stream) - 1) // WINDOW_TOKENS)
    for index in range(windows):
        start = index * WINDOW_TOKENS
        labels = stream[start + 1 : start + WINDOW_TOKENS + 1].long()
        inputs = stream[start : start + WINDOW_TOKENS].long()
        inputs[0] = END_OF_TEXT_ID
        log_p, log_q = (model(inputs[None])[0].log_softmax(-1) for model in (target, draft))
        values = _window_sums(log_p, log_q, labels, noise)
        values["bytes"] = token_bytes[labels].sum().item()
        sums = {name: sums.get(name, 0.0) + value for name, value in values.items()}
    tokens, size = windows * WINDOW_TOKENS, sums.pop("bytes")
    report: dict[str, Any] = {"tokens": tokens, "bytes_per_token": round(size / tokens, 3)}
    for name, value in sums.items():
        per = size * math.log(2) if name.endswith("bits_per_byte") else tokens
        report[name] = round(value / per, 4)
    return report


def _token_bytes(tokenizer: Tokenizer, token: int) -> int:
    """Bytes of text that the token stands for: the byte-level alphabet has one letter for each."""
    return 0 if token == END_OF_TEXT_ID else len(tokenizer.id_to_token(token) or "")


def _window_sums(log_p: Tensor, log_q: Tensor, labels: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Sums over one window's positions; log_p and log_q are [T, V], labels [T]."""
    p, q = log_p.exp(), log_q.exp()
    uniform = torch.rand(log_p.shape, generator=generator, device=log_p.device).clamp_(1e-9, 1 - 1e-7)
    gumbel = -(-uniform.log()).log()
    choice, coupled_choice = log_p.argmax(-1, keepdim=True), (log_p + gumbel).argmax(-1, keepdim=True)
    ranked, coupled_ranked = log_q.topk(TREE_WIDTH).indices, (log_q + gumbel).topk(TREE_WIDTH).indices
    sums = {
        "target_bits_per_byte": -log_p.gather(-1, labels[:, None]).sum(),
        "draft_bits_per_byte": -log_q.gather(-1, labels[:, None]).sum(),
        "target_accuracy": (choice[:, 0] == labels).sum(),
        "draft_accuracy": (ranked[:, 0] == labels).sum(),
        "agreement": (ranked[:, :1] == choice).sum(),
        "top4_agreement": (ranked == choice).sum(),
        "overlap": torch.minimum(p, q).sum(),
        "coupled_agreement": (coupled_ranked[:, :1] == coupled_choice).sum(),
        "coupled_top4_agreement": (coupled_ranked == coupled_choice).sum(),
        "kl_nats": (p * (log_p - log_q)).sum(),
    }
    return {name: value.item() for name, value in sums.items()}


@torch.no_grad()
def complete(folder: Path, tokenizer: Tokenizer, prompts: Sequence[str], new_tokens: int) -> list[dict[str, str]]:
    """The target's greedy and temperature-1 continuation of each prompt, through transformers."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    completions = []
    for prompt in prompts:
        inputs = torch.tensor([tokenizer.encode(prompt).ids])
        entry = {"prompt": prompt}
        for name, sampled in (("greedy", False), ("temperature_1", True)):
            torch.manual_seed(0)
            options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": new_tokens}
            options |= {"temperature": 1.0, "top_k": 0} if sampled else {}
            output = model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
            entry[name] = tokenizer.decode(output[0, inputs.shape[1] :].tolist())
        completions.append(entry)
    return completions
