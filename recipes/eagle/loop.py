"""The training loop: drafting steps unrolled on the head's own rows, held against the target's distribution.

Of every row two things are asked: that the head's distribution is the target's (KL divergence), and that the two
overlap at the temperature at which the row's text was chosen (total variation), which is what acceptance pays there.

Shapes: N windows of T tokens, R rows, C hidden channels, V vocabulary.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from head import Eagle3, target_rows
from llama import Llama
from optimisation import build_optimisers, set_learning_rate
from settings import Recipe
from torch import Tensor
from torch.nn import functional
from training import judge_rows, row_temperatures

logger = logging.getLogger(__name__)

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def run_loop(
    head: Eagle3,
    target: Llama,
    windows: Iterator[tuple[Tensor, Tensor]],
    *,
    recipe: Recipe,
    save: Callable[[], None],
) -> int:
    """Steps until the time is over; how many.

    Args:
        head: changed.
        target: fixed.
        windows: endless batches: tokens [N, T], and hundredths [N, T] of the temperatures at which the tokens after
            each were chosen.
        recipe: what to do.
        save: called now and then.
    """
    config = recipe.windows
    optimisers = build_optimisers(head, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay)
    judge = torch.compile(judge_rows, dynamic=False) if config.compile else judge_rows
    if config.compile:
        target.compile_layers()
    begin = saved = shown = time.perf_counter()
    for step, (tokens, chosen_at) in enumerate(windows):
        now = time.perf_counter() - begin
        set_learning_rate(optimisers, min(int(10_000 * now / recipe.seconds), 9_999), 10_000, config.decay_share)
        drawn = sorted(int(place) for place in torch.randperm(recipe.unroll)[: recipe.judged])
        losses = _learn(head, target, tokens, chosen_at, drawn=drawn, recipe=recipe, judge=judge)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if time.perf_counter() - shown > recipe.seconds / 30 or step == 0:
            shown = time.perf_counter()
            values = {place: [value.item() for value in pair] for place, pair in losses.items()}
            if not all(math.isfinite(value) for pair in values.values() for value in pair):
                raise FloatingPointError(f"losses {values} at step {step}")
            told = " ".join(f"{place}: {kl:.3f}/{variation:.3f}" for place, (kl, variation) in values.items())
            logger.info("%.0f s, step %d: kl/variation of each drafting step %s", now, step + 1, told)
        if time.perf_counter() - saved > 45:
            saved = time.perf_counter()
            save()
        if now > recipe.seconds:
            return step + 1
    raise AssertionError("the windows never end")


def _learn(
    head: Eagle3, target: Llama, tokens: Tensor, chosen_at: Tensor, *, drawn: list[int], recipe: Recipe, judge: Judge
) -> dict[int, tuple[Tensor, Tensor]]:
    """Adds to the gradients; mean KL and total variation of the drawn drafting steps, on windows [N, T].

    `chosen_at` [N, T] are the hundredths of the temperatures at which the tokens after each were chosen.
    """
    dtype, unroll = recipe.compute_dtype(tokens.device), recipe.unroll
    features, logits = target_rows(target, tokens, head.taps, dtype)
    logits, temperature = logits[:, unroll:].flatten(0, 1), row_temperatures(chosen_at[:, unroll:])
    embedding = target.model.embed_tokens.weight
    embedded = functional.embedding(tokens[:, 1:], embedding).to(dtype)
    output = embedding.to(dtype)
    total, losses = torch.zeros((), device=tokens.device), {}
    for place, normed in zip(drawn, head.unroll(features[:, :-1], embedded, unroll, drawn), strict=True):
        rows = normed.flatten(0, 1)
        with torch.no_grad():
            kl, variation, gradient = judge(functional.linear(rows, output), logits, temperature)
            towards = gradient @ output * (recipe.step_share**place / len(rows))
        # A product whose gradient is the one that has just been made: the vocabulary's rows are not kept.
        total = total + (rows * towards).float().sum()
        losses[place] = kl.mean(), variation.mean()
    total.backward()
    return losses


@torch.no_grad()
def measure(head: Eagle3, target: Llama, windows: Tensor, recipe: Recipe) -> dict[str, Any]:
    """Return what the head is worth on windows [N, T], on the text as it stands.

    Returns:
        Of each drafting step, how often the largest entries agree and the overlap; and the tokens of a round whose
        chain of `unroll` nodes is accepted as far as the largest entries agree.
    """
    dtype, unroll = recipe.compute_dtype(windows.device), recipe.unroll
    output = target.model.embed_tokens.weight.to(dtype)
    sums = torch.zeros(unroll, 2, device=windows.device)
    accepted = roots = 0
    # As many at a time as in the loop: what is compiled is so for that shape.
    for tokens in windows.long().split(recipe.windows.batch_sequences):
        features, logits = target_rows(target, tokens, head.taps, dtype)
        p = logits[:, unroll:].float()
        embedded = functional.embedding(tokens[:, 1:], target.model.embed_tokens.weight).to(dtype)
        agrees = []
        for step, rows in enumerate(head.unroll(features[:, :-1], embedded, unroll)):
            q = functional.linear(rows, output).float()
            agrees.append(q.argmax(-1) == p.argmax(-1))
            sums[step, 0] += agrees[-1].float().mean(-1).sum()
            sums[step, 1] += torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1).mean(-1).sum()
        # Steps look at the same places: those of one root stand one after the other.
        count = p.shape[1] + 1 - unroll
        chains = torch.stack([agree[:, step : step + count] for step, agree in enumerate(agrees)])
        accepted, roots = accepted + int(chains.cumprod(0).sum()), roots + len(p) * count
    means = (sums / len(windows)).tolist()
    return {
        "held_out": [{"agreement": round(agreement, 4), "overlap": round(overlap, 4)} for agreement, overlap in means],
        "acceptance_length": round(1 + accepted / roots, 3),
    }
