"""The training loop: chains of drafting steps on the head's own rows, held against the target's distribution.

Of every row two things are asked: that the head's distribution is the target's (KL divergence), and that the two
overlap at the temperature at which the row's text was chosen (total variation), which is what acceptance pays there.

A step of the loop draws chains, first of all those that begin in front of an answer's token, where a drafter is used,
and follows fewer of them with each drafting step. All rows that are computed are judged, and a drafting step counts as
much as it has rows: arithmetic goes where acceptance is decided.

Shapes: N windows of T tokens, M chains, R rows, C hidden channels, V vocabulary.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from conversations import NO_ANSWER
from distillation import judge_bins, with_gradient
from head import Eagle3, target_rows
from llama import Llama
from optimisation import TrainingClock, build_optimisers, set_learning_rate
from settings import Recipe
from torch import Tensor
from torch.nn import functional
from training import row_temperatures

logger = logging.getLogger(__name__)

Judge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

# Rows of a matrix that a GPU's matrix units take at a time, or a part of such a tile.
_TILE = 64


class TargetRows(NamedTuple):
    """Windows and what the target makes of them.

    Attributes:
        tokens: [N, T] int64.
        chosen_at: [N, T] int64, as `run_loop` has it.
        features: [N, T, F].
        last: [N, T, C] that the output layer reads.
    """

    tokens: Tensor
    chosen_at: Tensor
    features: Tensor
    last: Tensor


def run_loop(
    head: Eagle3,
    target: Llama,
    windows: Iterator[tuple[Tensor, Tensor]],
    *,
    recipe: Recipe,
    answer_share: float,
    save: Callable[[], None],
) -> int:
    """Step until the time is over; return how many steps there were.

    Args:
        head: changed.
        target: fixed.
        windows: endless batches: tokens [N, T], and hundredths [N, T] of the temperatures at which the tokens after
            each were chosen, NO_ANSWER where a drafter is not asked.
        recipe: what to do.
        answer_share: of all rows, that of chains in a step.
        save: called now and then.
    """
    config = recipe.windows
    optimisers = build_optimisers(head, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay)
    # Compiled twice: for the first count of rows, then for any, while the vocabulary's size stays a constant.
    judge = torch.compile(judge_rows) if config.compile else judge_rows
    if config.compile:
        target.compile_layers()
        head.compile_layer()
    begin_s = saved_s = shown_s = time.perf_counter()
    clock, shown_step = TrainingClock(recipe.seconds, begin_s=begin_s), 0
    for step, rows in enumerate(drawn_rows(target, windows, head.taps, recipe), start=1):
        set_learning_rate(optimisers, clock.progress, decay_share=config.decay_share)
        chains = int(answer_share * rows.tokens[:, recipe.unroll :].numel())
        losses = _learn(head, target, rows, chains=max(1, chains), recipe=recipe, judge=judge)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step == 1 or time.perf_counter() - shown_s > recipe.seconds / 30:
            values = [[value.item() for value in pair] for pair in losses]
            if not all(math.isfinite(value) for pair in values for value in pair):
                raise FloatingPointError(f"losses {values} at step {step}")
            told = " ".join(f"{kl:.3f}/{variation:.3f}" for kl, variation in values)
            now = time.perf_counter()
            rate = (step - shown_step) * rows.tokens.numel() / max(1e-9, now - shown_s) / 1e6
            logger.info(
                "%.0f s, step %d, %.2f M tokens/s: kl/variation by drafting step %s", now - begin_s, step, rate, told
            )
            shown_s, shown_step = now, step
        if clock.end_step() >= 1:
            return step
        if time.perf_counter() - saved_s > 45:
            saved_s = time.perf_counter()
            save()
    raise AssertionError("the windows never end")


def drawn_rows(
    target: Llama, windows: Iterator[tuple[Tensor, Tensor]], taps: tuple[int, ...], recipe: Recipe
) -> Iterator[TargetRows]:
    """Endless batches out of a pool of windows that the target has read, the oldest of which give way to new ones."""
    pool: TargetRows | None = None
    for number in count():
        tokens, chosen_at = next(windows)
        new = TargetRows(tokens, chosen_at, *target_rows(target, tokens, taps, recipe.compute_dtype(tokens.device)))
        if pool is None:
            pool = TargetRows(*(each.new_empty((recipe.pool_batches * len(each), *each.shape[1:])) for each in new))
        begin = number % recipe.pool_batches * len(tokens)
        for held, each in zip(pool, new, strict=True):
            held[begin : begin + len(tokens)] = each
        if number + 1 < recipe.pool_batches:
            continue
        for _ in range(recipe.uses):
            own = torch.randperm(len(pool.tokens), device=tokens.device)[: len(tokens)]
            yield TargetRows(*(each[own] for each in pool))


def draw_roots(chosen_at: Tensor, chains: int, unroll: int) -> Tensor:
    """Return [chains] int64 places among N * (T - 1) rows where chains of `unroll` steps begin, in no order.

    Those in front of answers' tokens come first; others fill up.

    Args:
        chosen_at: [N, T], as `run_loop` has it.
        chains: how many.
        unroll: a chain's steps, for which the rows behind its root have to suffice.
    """
    # The first step's row is held against the target's row after it.
    asked = (chosen_at[:, 1:] != NO_ANSWER).float()
    draw = asked + 0.5 * torch.rand(asked.shape, device=asked.device)
    draw[:, draw.shape[1] + 1 - unroll :] = -1
    roots = draw.flatten().topk(chains).indices
    return roots[torch.randperm(chains, device=roots.device)]


def chain_counts(chains: int, unroll: int, share: float) -> list[int]:
    """Return how many chains are followed to each step."""
    followed = [max(1, round(chains * share**step)) for step in range(unroll)]
    return [each - each % _TILE or each for each in followed]


def judge_rows(drafted: Tensor, wanted: Tensor, places: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`judge_bins` of [R, V] against the rows [R] of `wanted` [N * T, V]: every token is a bin, and none is shared."""
    shared, bias = (torch.zeros(shape, device=drafted.device) for shape in ((1, 2), drafted.shape[1:]))
    return judge_bins(drafted, wanted[places], shared, temperature, bias)


def _learn(
    head: Eagle3, target: Llama, text: TargetRows, *, chains: int, recipe: Recipe, judge: Judge
) -> list[tuple[Tensor, Tensor]]:
    """Add to the gradients; return mean KL and total variation of each drafting step."""
    tokens, chosen_at, features, last = text
    unroll, dtype = recipe.unroll, features.dtype
    # Where nobody chose, what is asked is what temperature 1 asks.
    temperature = row_temperatures(torch.where(chosen_at == NO_ANSWER, 100, chosen_at))
    embedding = target.model.embed_tokens.weight
    embedded = functional.embedding(tokens[:, 1:], embedding).to(dtype)
    output = embedding.to(dtype)
    wanted = functional.linear(last.flatten(0, 1), output)
    roots = draw_roots(chosen_at, chains, unroll)
    # The last token of a window has no row of its own here, but it has one of the target.
    places = roots + roots // (tokens.shape[1] - 1)
    counts = chain_counts(chains, unroll, recipe.step_share)
    total, losses = torch.zeros((), device=tokens.device), []
    for step, rows in enumerate(head.unroll(features[:, :-1], embedded, roots, counts)):
        with torch.no_grad():
            own = places[: len(rows)] + step + 1
            kl, variation, gradient = judge(functional.linear(rows, output), wanted, own, temperature[own])
            towards = gradient @ output / chains
        # The vocabulary's rows are not kept.
        total = total + with_gradient(rows, towards)
        losses.append((kl.mean(), variation.mean()))
    total.backward()
    return losses


@torch.no_grad()
def measure(head: Eagle3, target: Llama, windows: Tensor, chosen_at: Tensor, recipe: Recipe) -> dict[str, Any]:
    """Return what the head is worth on windows [N, T], on the text as it stands; `chosen_at` is as `run_loop` has it.

    Returns:
        Of each drafting step, how often the largest entries agree and the overlap; and the tokens of a round whose
        chain of `unroll` nodes is accepted as far as the largest entries agree: of chains everywhere, and of those that
        begin in front of an answer's token, None where there are none.
    """
    dtype, unroll = recipe.compute_dtype(windows.device), recipe.unroll
    output = target.model.embed_tokens.weight.to(dtype)
    sums = torch.zeros(unroll, 2, device=windows.device)
    accepted, asked = [], (chosen_at[:, 1 : chosen_at.shape[1] + 1 - unroll] != NO_ANSWER).flatten()
    # As many at a time as in the loop, whose shape the target's layers are compiled for.
    for tokens in windows.long().split(recipe.windows.batch_sequences):
        features, last = target_rows(target, tokens, head.taps, dtype)
        embedded = functional.embedding(tokens[:, 1:], target.model.embed_tokens.weight).to(dtype)
        length = embedded.shape[1]
        places = torch.arange(embedded[:, :, 0].numel(), device=tokens.device).view(-1, length)
        roots = places[:, : length + 1 - unroll].flatten()
        agrees = []
        for step, rows in enumerate(head.unroll(features[:, :-1], embedded, roots, unroll * [len(roots)])):
            own = last[:, step + 1 : step + 1 + length + 1 - unroll].flatten(0, 1)
            p, q = (functional.linear(each, output).float() for each in (own, rows))
            agrees.append(q.argmax(-1) == p.argmax(-1))
            sums[step, 0] += agrees[-1].sum()
            sums[step, 1] += torch.minimum(q.softmax(-1), p.softmax(-1)).sum()
        accepted.append(torch.stack(agrees).cumprod(0).sum(0))
    lengths = 1 + torch.cat(accepted).float()
    means = (sums / len(lengths)).tolist()
    return {
        "held_out": [{"agreement": round(agreement, 4), "overlap": round(overlap, 4)} for agreement, overlap in means],
        "acceptance_length": round(lengths.mean().item(), 3),
        "acceptance_length_in_answers": round(lengths[asked].mean().item(), 3) if asked.any() else None,
    }
