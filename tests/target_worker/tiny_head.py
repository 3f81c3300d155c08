"""A head or block drafter of a tiny random target, trained on what it will be asked for: there it is often right."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.outrider.engine.random_eagle import write_random_eagle
from torch.nn import functional
from transformers import PreTrainedModel

TAPS = (1, 1, 2)
_TOKENS, _STEPS, _LEARNING_RATE = 48, 300, 0.01

Weights = dict[str, torch.Tensor]


def write_tiny_head(
    folder: Path,
    target: Path,
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    *,
    block_size: int | None = None,
) -> Path:
    """Train a head or block drafter on texts, each continued by the target, and write it.

    Args:
        folder: made where it is missing.
        target: checkpoint folder of the target.
        model: the target.
        texts: of up to 48 tokens.
        block_size: positions of a block drafter; None: a head.

    Returns:
        `folder`.
    """
    write_random_eagle(folder, target, taps=TAPS, block_size=block_size)
    tokens = torch.cat([_continued(model, text) for text in texts])
    states, logits = hidden_states(model, tokens)
    given = load_file(folder / "model.safetensors")
    with torch.inference_mode(mode=False), torch.enable_grad():
        weights = {name: value.clone().requires_grad_() for name, value in given.items()}
        optimizer = torch.optim.Adam(weights.values(), lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=_STEPS)
        wanted = logits[:, 1:].softmax(-1)
        for _ in range(_STEPS):
            entering, loss = states[:, :-1] @ weights["fc.weight"].T, torch.zeros(())
            # A head's second time is on its own rows, as below the first node of a tree.
            for step in range(block_size or 2):
                mask = None if block_size is None else weights["mask_embedding.weight"][step]
                hidden = _layer(weights, model, entering, tokens[:, 1:], mask=mask, step=step)
                rows, place = _norm(hidden, weights["norm.weight"]), 0
                if block_size is None:
                    entering = torch.cat((entering[:, :1], hidden[:, :-1]), dim=1)
                else:
                    place = step
                    before = model.model.embed_tokens.weight.detach()[tokens[:, 1 + step :]]
                    bias = before @ weights["previous.weight"].T @ weights["following.weight"].T
                    rows = rows[:, : rows.shape[1] - step] + bias
                found = rows @ model.lm_head.weight.detach().T
                loss = loss - (wanted[:, place:] * found.log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def hidden_states(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a head of `TAPS` reads of these tokens [B, T], and the target's logits: [B, T, taps N], [B, T, V]."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output))
        for layer in model.model.layers
    ]
    logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return torch.cat([found[tap - 1] for tap in TAPS], dim=-1), logits


@torch.no_grad()
def _continued(model: PreTrainedModel, text: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([text[:_TOKENS]])
    while tokens.shape[1] < _TOKENS:
        tokens = torch.cat((tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _layer(
    weights: Weights,
    model: PreTrainedModel,
    entering: torch.Tensor,
    tokens: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    step: int,
) -> torch.Tensor:
    """The head's hidden rows [B, T, N] where `entering` [B, T, N] stands before `tokens` [B, T].

    With a mask [N], those of a block drafter, `step` positions on.
    """
    own = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    embedded = model.model.embed_tokens.weight.detach()[tokens]
    dim, length = model.config.head_dim, tokens.shape[1]
    queried = entering if mask is None else entering + mask

    def heads(stream: torch.Tensor, name: str) -> torch.Tensor:
        wide = torch.cat(
            (_norm(embedded, own["input_layernorm.weight"]), _norm(stream, own["hidden_norm.weight"])), dim=-1
        )
        return (wide @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(1, 2)

    def turned(rows: torch.Tensor, first: int) -> torch.Tensor:
        angles = torch.arange(first, first + length)[:, None] * 10_000.0 ** -(torch.arange(dim // 2) * 2 / dim)
        halves = torch.complex(rows[..., : dim // 2], rows[..., dim // 2 :])
        halves = halves * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((halves.real, halves.imag), dim=-1)

    query = turned(heads(queried, "q"), 0 if mask is None else step)
    key, value = turned(heads(entering, "k"), 0), heads(entering, "v")
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    stream = queried + mixed.transpose(1, 2).flatten(2) @ own["self_attn.o_proj.weight"].T
    rows = _norm(stream, own["post_attention_layernorm.weight"])
    gated = functional.silu(rows @ own["mlp.gate_proj.weight"].T) * (rows @ own["mlp.up_proj.weight"].T)
    return stream + gated @ own["mlp.down_proj.weight"].T
