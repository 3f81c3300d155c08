"""The training loop: drafting steps unrolled on the head's own rows, held against the target's distribution.

Shapes: N windows of T tokens, R rows, C hidden channels, V vocabulary.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from head import Eagle3, target_rows
from llama import Llama
from optimisation import build_optimisers, set_learning_rate
from settings import Recipe
from torch import Tensor
from torch.nn import functional
from training import compute_dtype, token_windows

logger = logging.getLogger(__name__)


def run_loop(head: Eagle3, target: Llama, stream: Tensor, recipe: Recipe, save: Callable[[], None]) -> int:
    """Steps until the time is over; how many."""
    config = recipe.windows
    optimisers = build_optimisers(head, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay)
    divergence = torch.compile(_divergence, dynamic=True) if config.compile else _divergence
    shares = [recipe.step_share**step for step in range(recipe.unroll)]
    begin = saved = shown = time.perf_counter()
    for step, (tokens, _) in enumerate(token_windows(stream, config)):
        now = time.perf_counter() - begin
        set_learning_rate(optimisers, min(int(10_000 * now / recipe.seconds), 9_999), 10_000, config.decay_share)
        drawn = sorted(int(place) for place in torch.randperm(recipe.unroll)[: recipe.judged])
        losses = _losses(head, target, tokens, unroll=recipe.unroll, drawn=drawn, divergence=divergence)
        total = sum(shares[place] * (kl + variation) for place, (kl, variation) in zip(drawn, losses, strict=True))
        assert isinstance(total, Tensor)
        total.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if time.perf_counter() - shown > recipe.seconds / 30 or step == 0:
            shown = time.perf_counter()
            pairs = zip(drawn, losses, strict=True)
            values = " ".join(f"{place}: {kl.item():.3f}/{variation.item():.3f}" for place, (kl, variation) in pairs)
            if not math.isfinite(total.item()):
                raise FloatingPointError(f"loss {total.item()} at step {step}")
            logger.info("%.0f s, step %d: kl/variation of each drafting step %s", now, step + 1, values)
        if time.perf_counter() - saved > 45:
            saved = time.perf_counter()
            save()
        if now > recipe.seconds:
            return step + 1
    raise AssertionError("the windows never end")


def _losses(
    head: Eagle3,
    target: Llama,
    tokens: Tensor,
    *,
    unroll: int,
    drawn: Sequence[int],
    divergence: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """KL and total variation of the drawn ones of `unroll` drafting steps, on windows [N, T]."""
    dtype = compute_dtype(tokens.device)
    features, logits = target_rows(target, tokens, head.taps, dtype)
    embedding = target.model.embed_tokens.weight
    embedded = functional.embedding(tokens[:, 1:], embedding).to(dtype)
    normed = head.unroll(features[:, :-1], embedded, unroll)
    output = embedding.to(dtype)
    log_p = logits[:, unroll:].flatten(0, 1).float().log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1).mean()
    p = p.to(dtype)
    losses = [divergence(rows.flatten(0, 1), output, p) for rows in (normed[place] for place in drawn)]
    return [(cross_entropy - entropy, variation) for cross_entropy, variation in losses]


def _divergence(rows: Tensor, output: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of q under p in nats, and mean total variation; rows [R, C], output [V, C], p [R, V]."""
    log_q = functional.linear(rows, output).float().log_softmax(-1)
    return -(p * log_q).sum(-1).mean(), 0.5 * (p - log_q.exp()).abs().sum(-1).mean()


@torch.no_grad()
def measure(head: Eagle3, target: Llama, stream: Tensor, recipe: Recipe) -> list[dict[str, float]]:
    """Of each drafting step on source that was not trained on: how often the largest entries agree, and the overlap."""
    length, dtype = recipe.windows.sequence_tokens, compute_dtype(stream.device)
    output = target.model.embed_tokens.weight.to(dtype)
    sums = torch.zeros(recipe.unroll, 2, device=stream.device)
    for index in range(recipe.measured):
        tokens = stream[None, index * length : (index + 1) * length].long().clone()
        tokens[:, 0] = 0
        features, logits = target_rows(target, tokens, head.taps, dtype)
        embedded = functional.embedding(tokens[:, 1:], target.model.embed_tokens.weight).to(dtype)
        for step, rows in enumerate(head.unroll(features[:, :-1], embedded, recipe.unroll)):
            q, p = functional.linear(rows, output).float(), logits[:, recipe.unroll :].float()
            sums[step, 0] += (q.argmax(-1) == p.argmax(-1)).float().mean()
            sums[step, 1] += torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1).mean()
    means = (sums / recipe.measured).tolist()
    return [{"agreement": round(agreement, 4), "overlap": round(overlap, 4)} for agreement, overlap in means]
