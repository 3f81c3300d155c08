"""The draft model, and its distillation on the target's logits at the answers' tokens.

Shapes: N sequences, T tokens, R rows (places whose next token is predicted), C hidden channels, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from conversations import NO_ANSWER
from llama import Llama
from optimisation import build_optimisers
from torch import Tensor
from training import TrainingConfig, compute_dtype, judge_rows, row_temperatures, run_steps

logger = logging.getLogger(__name__)

_STATE_FILE = "draft.pt"
# Rows whose logits are in memory at a time: of 49,152 tokens some 400 MB a copy in bfloat16.
_CHUNK_ROWS = 4096
_EMBEDDING_STD = 0.02  # that of fresh ones, which the learning rates are for


@torch.no_grad()
def start_embedding(draft: Llama, target: Llama) -> None:
    """Begin with the draft's embedding as the principal components of the target's: it knows which tokens are alike."""
    table = target.model.embed_tokens.weight.float()
    table = table - table.mean(0)
    _, vectors = torch.linalg.eigh(table.mT @ table)
    principal = table @ vectors[:, -draft.shape.hidden_size :]
    draft.model.embed_tokens.weight.copy_(principal * (_EMBEDDING_STD / principal.std()))


def answer_rows(chosen_at: Tensor, count: int) -> Tensor:
    """Return [count] int64 places among N * (T - 1) rows, in order: those that predict answers' tokens come first.

    Args:
        chosen_at: [N, T], of the tokens themselves.
        count: rows to take; where answers have fewer, others fill up.
    """
    predicts = (chosen_at[:, 1:] != NO_ANSWER).flatten()
    return (
        (predicts.float() + 0.5 * torch.rand(len(predicts), device=predicts.device)).topk(count).indices.sort().values
    )


def distillation_loss(
    draft: Llama, target: Llama, tokens: Tensor, chosen_at: Tensor, *, row_share: float, judge: Callable[..., Any]
) -> dict[str, Tensor]:
    """Return mean KL divergence and mean total variation over answers' rows, and as "loss" their sum, with gradient.

    Args:
        draft: learns.
        target: fixed.
        tokens: [N, T].
        chosen_at: [N, T] hundredths, as `write_conversations` gives them.
        row_share: of all rows that are judged.
        judge: `judge_rows`, perhaps compiled.
    """
    dtype = compute_dtype(tokens.device)
    count = max(1, int(row_share * tokens[:, 1:].numel()))
    # Of one size, for which the judge is compiled once.
    size = count // -(-count // _CHUNK_ROWS)
    rows = answer_rows(chosen_at, count - count % size)
    at = chosen_at[:, 1:].flatten()[rows]
    temperature = row_temperatures(torch.where(at == NO_ANSWER, 100, at))
    with torch.no_grad():
        wanted = target.hidden(tokens[:, :-1], dtype).flatten(0, 1)[rows]
    drafted = draft.hidden(tokens[:, :-1], dtype).flatten(0, 1)[rows]
    with torch.no_grad():
        output, reads = (model.model.embed_tokens.weight.to(dtype) for model in (target, draft))
        towards, of_output = torch.empty_like(drafted), torch.zeros(reads.shape, device=reads.device)
        kl = variation = torch.zeros((), device=tokens.device)
        # By hand, in chunks: logits of all rows at once, kept for a backward pass, would take most of a GPU's memory.
        for begin in range(0, len(rows), size):
            chunk = slice(begin, begin + size)
            own_kl, own_variation, gradient = judge(
                drafted[chunk] @ reads.mT, wanted[chunk] @ output.mT, temperature[chunk]
            )
            kl, variation = kl + own_kl.sum(), variation + own_variation.sum()
            towards[chunk] = gradient @ reads
            of_output += gradient.mT @ drafted[chunk]
        kl, variation = kl / len(rows), variation / len(rows)
    # A number whose gradients are those that have just been made.
    made = (drafted * towards).float().sum() + (draft.model.embed_tokens.weight * of_output).sum()
    loss = made / len(rows)
    return {"loss": loss + (kl + variation - loss.detach()), "kl": kl, "variation": variation}


def batches(
    tokens: Tensor, chosen_at: Tensor, config: TrainingConfig, *, begin: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of whole conversations [N, T]; a loop that goes on at step `begin` draws other ones."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + begin)
    while True:
        order = torch.randperm(len(tokens), generator=generator).to(tokens.device)
        for first in range(0, len(order) - config.batch_sequences + 1, config.batch_sequences):
            own = order[first : first + config.batch_sequences]
            yield tokens[own].long(), chosen_at[own].long()


def distil(
    draft: Llama,
    target: Llama,
    tokens: Tensor,
    chosen_at: Tensor,
    config: TrainingConfig,
    *,
    row_share: float,
    work: Path,
    deadline_s: float,
) -> bool:
    """Train the draft on conversations, going on where an earlier call has stopped; return whether all steps are done.

    Args:
        draft: changed.
        target: fixed.
        tokens: [N, T].
        chosen_at: [N, T].
        config: of the loop.
        row_share: of all rows that are judged.
        work: folder that keeps the state of the loop.
        deadline_s: on the clock of `time.perf_counter`.

    Raises:
        ValueError: there are fewer conversations than one batch has.
    """
    if len(tokens) < config.batch_sequences:
        raise ValueError(f"{len(tokens)} conversations, at least {config.batch_sequences} needed for one batch")
    optimisers = build_optimisers(
        draft, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay
    )
    begin, file = 0, work / _STATE_FILE
    if file.exists():
        state = torch.load(file, map_location=tokens.device, weights_only=True)
        begin = state["steps"]
        draft.load_state_dict(state["draft"])
        for optimiser, held in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(held)
        logger.info("going on after %d steps", begin)
    else:
        start_embedding(draft, target)
    # What is compiled is small and used often: the judge makes one pass over logits of what would be a dozen, and all
    # layers of a model share their code.
    judge = torch.compile(judge_rows, dynamic=False) if config.compile else judge_rows
    if config.compile:
        draft.compile_layers()
        target.compile_layers()

    def losses(tokens: Tensor, chosen_at: Tensor) -> dict[str, Tensor]:
        return distillation_loss(draft, target, tokens, chosen_at, row_share=row_share, judge=judge)

    def save(steps: int) -> None:
        unfinished = file.with_suffix(".unfinished")
        states = [optimiser.state_dict() for optimiser in optimisers]
        torch.save({"steps": steps, "draft": draft.state_dict(), "optimisers": states}, unfinished)
        unfinished.rename(file)

    windows = batches(tokens, chosen_at, config, begin=begin)
    done = run_steps(losses, optimisers, windows, config, begin=begin, deadline_s=deadline_s, save=save)
    return done == config.steps


def trained_draft(draft: Llama, work: Path, device: torch.device) -> Llama:
    """Return the draft with the weights of the last state saved.

    Raises:
        FileNotFoundError: there is none.
    """
    state = torch.load(work / _STATE_FILE, map_location=device, weights_only=True)
    draft.load_state_dict(state["draft"])
    logger.info("draft after %d steps", state["steps"])
    return draft


@torch.no_grad()
def measure_overlap(draft: Llama, target: Llama, tokens: Tensor, chosen_at: Tensor) -> dict[str, float]:
    """Return over answers' tokens of held-out conversations [N, T]: rows, and shares by temperature.

    `agreement` is the share of rows where both largest logits are one token's, at temperature 0; `overlap` the mean of
    sum(min(p, q)) at temperature 1.
    """
    dtype, sums = compute_dtype(tokens.device), {0: [0.0, 0], 100: [0.0, 0]}
    for row, at in zip(tokens.long(), chosen_at[:, 1:], strict=True):
        log_p, log_q = (model(row[None, :-1], dtype)[0].float() for model in (target, draft))
        for hundredths, held in sums.items():
            own = at == hundredths
            p, q = log_p[own], log_q[own]
            if hundredths == 0:
                held[0] += (p.argmax(-1) == q.argmax(-1)).sum().item()
            else:
                held[0] += torch.minimum(p.softmax(-1), q.softmax(-1)).sum().item()
            held[1] += int(own.sum())
    return {
        "agreement": round(sums[0][0] / max(1, sums[0][1]), 4),
        "overlap": round(sums[100][0] / max(1, sums[100][1]), 4),
        "tokens at temperature 0": int(sums[0][1]),
        "tokens at temperature 1": int(sums[100][1]),
    }
