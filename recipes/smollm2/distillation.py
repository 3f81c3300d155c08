"""The draft model, and its distillation on the target's logits at the answers' tokens.

The target is fixed, so it reads the text once: what its output layer reads stays on the device, and a step multiplies
that with the rows of the frequent tokens alone.

Shapes: N sequences, T tokens, R rows (places whose next token is predicted), C hidden channels of the draft, H of the
target, V vocabulary, B bins (frequent tokens, and last all others together).
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conversations import NO_ANSWER
from llama import Llama
from optimisation import TrainingClock, build_optimisers, set_learning_rate
from torch import Tensor
from training import compute_dtype, row_temperatures
from vocabulary import EmbeddingRows, choose_rows

logger = logging.getLogger(__name__)

_STATE_FILE = "draft.pt"
_SAVE_S = 60.0
# Rows whose logits are in memory at a time: of 12,288 bins some 400 MB a copy in bfloat16.
_CHUNK_ROWS = 16_384
# Sequences that the target reads at a time: their logits are 1.6 GB of bfloat16.
_TARGET_SEQUENCES = 16
# What a step needs of a GPU's memory.
_STEP_BYTES = 14 << 30
_EMBEDDING_STD = 0.02  # that of fresh ones, which the learning rates are for


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Settings of the loop.

    Attributes:
        seconds: from its start to its end; learning rates follow the clock, and are zero then.
        batch_sequences: of a step. 64 are twice what the pair's recipe takes: a step of so small a draft is otherwise
            short beside the launches of its optimiser.
        row_share: of all rows that are judged; about as many predict answers.
        matrix_lr: highest learning rate of Muon.
        other_lr: highest learning rate of AdamW.
        weight_decay: of the matrices.
        decay_share: of the time, in which learning rates fall.
        seed: of fresh weights and of the batches.
        compile: layers and judge run as compiled code.
    """

    seconds: float = 540.0
    batch_sequences: int = 64
    row_share: float = 0.6
    matrix_lr: float = 0.02
    other_lr: float = 0.004
    weight_decay: float = 0.02
    decay_share: float = 0.6
    seed: int = 2
    compile: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Lessons:
    """A text, and what the target says of the next tokens.

    Attributes:
        tokens: [N, T].
        chosen_at: [N, T] hundredths, as `write_conversations` gives them.
        hidden: [N, T - 1, H], what the target's output layer reads.
        shared: [N, T - 1, 2] float32, logarithm of the sum of the rare tokens' exponentials: of their logits, and of
            their logits divided by the row's temperature.
    """

    tokens: Tensor
    chosen_at: Tensor
    hidden: Tensor
    shared: Tensor

    def take(self, sequences: Tensor) -> "Lessons":
        """Return some sequences, by their numbers [N']."""
        return Lessons(
            tokens=self.tokens[sequences].long(),
            chosen_at=self.chosen_at[sequences].long(),
            hidden=self.hidden[sequences],
            shared=self.shared[sequences],
        )


@torch.no_grad()
def prepare_lessons(
    target: Llama, tokens: Tensor, chosen_at: Tensor, rows: EmbeddingRows, *, compiled: bool, deadline_s: float
) -> Lessons | None:
    """Have the target read a text; return None where that does not end in time.

    Only the beginning of a text whose rows have no room on the GPU is taken.

    Args:
        target: fixed.
        tokens: [N, T].
        chosen_at: [N, T].
        rows: of the draft.
        compiled: by `torch.compile`.
        deadline_s: on the clock of `time.perf_counter`.

    Raises:
        ValueError: no conversation has room on the device.
    """
    dtype, device, length = compute_dtype(tokens.device), tokens.device, tokens.shape[1] - 1
    width = target.shape.hidden_size
    row_bytes = width * dtype.itemsize + 2 * torch.float32.itemsize
    count = max(0, min(len(tokens), _room(device) // (length * row_bytes)))
    if not count:
        raise ValueError(f"none of {len(tokens)} conversations has room on the device")
    if count < len(tokens):
        logger.warning("%d of %d conversations have room on the device", count, len(tokens))
    tokens, chosen_at = tokens[:count], chosen_at[:count]
    hidden = torch.empty((count, length, width), dtype=dtype, device=device)
    shared = torch.empty((count, length, 2), device=device)
    output, is_rare = target.model.embed_tokens.weight.to(dtype), rows.row_of == rows.row_of.max()
    summed = torch.compile(sums_at_temperatures, dynamic=False) if compiled else sums_at_temperatures
    if compiled:
        target.compile_layers()
    size = min(_TARGET_SEQUENCES, count)
    for begin in range(0, count, size):
        if time.perf_counter() >= deadline_s:
            return None
        # The last ones overlap those before: what is compiled is so for one size.
        first = min(begin, count - size)
        own = slice(first, first + size)
        hidden[own] = target.hidden(tokens[own, :-1].long(), dtype)
        # Logits of rare tokens would do, but a product with a multiple of eight columns takes half the time.
        logits = hidden[own].flatten(0, 1) @ output.mT
        shared[own] = summed(logits, is_rare, _temperatures(chosen_at[own])).unflatten(0, (size, -1))
    return Lessons(tokens=tokens, chosen_at=chosen_at, hidden=hidden, shared=shared)


def _room(device: torch.device) -> int:
    """Bytes for what the target has read."""
    if device.type != "cuda":
        return 1 << 62
    return torch.cuda.mem_get_info(device)[0] - _STEP_BYTES


def _temperatures(chosen_at: Tensor) -> Tensor:
    """Temperatures [N * (T - 1), 1] at which rows of sequences [N, T] are judged: 1 where they predict no answer."""
    at = chosen_at[:, 1:]
    return row_temperatures(torch.where(at == NO_ANSWER, 100, at))


def sums_at_temperatures(logits: Tensor, is_rare: Tensor, temperature: Tensor) -> Tensor:
    """Return logsumexp of the rare tokens' logits at temperature 1 and at `temperature`, [R, 2] float32.

    Args:
        logits: [R, V].
        is_rare: [V] bool.
        temperature: [R, 1], above 0.
    """
    logits = torch.where(is_rare, logits.float(), -torch.inf)
    return torch.stack((logits.logsumexp(-1), (logits / temperature).logsumexp(-1)), -1)


def judge_bins(
    drafted: Tensor, wanted: Tensor, shared: Tensor, temperature: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far a draft's rows, whose rare tokens share a logit, are from the target's, and the gradient.

    The divergence of the bins and that of the V tokens differ by what no draft of this kind can change, and so have
    one gradient. The variation counts no rare token as overlap: the draft spreads its mass over tens of thousands of
    them, and hits the target's with next to none of it.

    Args:
        drafted: [R, B] of the draft; last the logit of each rare token.
        wanted: [R, B] of the target; the last is not read.
        shared: [R, 2] of the target's rare tokens, as `Lessons` has them.
        temperature: [R, 1], above 0.
        bias: [B], of `EmbeddingRows`. A temperature divides each token's logit, so that the bias is added afterwards.

    Returns:
        [R] KL divergence of the distributions in nats, [R] their total variation at the temperatures, and the gradient
        of the sum of both by `drafted`, [R, B] in its dtype.
    """
    is_shared = bias > 0
    z, t = drafted.float(), wanted.float()
    log_q = (z + bias).log_softmax(-1)
    log_p = torch.where(is_shared, shared[:, :1], t).log_softmax(-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    q_there = (z / temperature + bias).softmax(-1)
    p_there = torch.where(is_shared, shared[:, 1:], t / temperature).softmax(-1)
    surplus = q_there - torch.where(is_shared, 0.0, p_there)
    sign = 0.5 * torch.sign(surplus)
    variation = (sign * surplus + torch.where(is_shared, 0.5 * p_there, 0.0)).sum(-1)
    centred = sign - (q_there * sign).sum(-1, keepdim=True)
    gradient = log_q.exp() - p + q_there * centred / temperature
    return divergence, variation, gradient.to(drafted.dtype)


@torch.no_grad()
def start_embedding(draft: Llama, target: Llama, rows: EmbeddingRows) -> None:
    """Begin with the draft's embedding as the principal components of the target's: it knows which tokens are alike."""
    table = target.model.embed_tokens.weight.float()
    table = table - table.mean(0)
    _, vectors = torch.linalg.eigh(table.mT @ table)
    principal = table @ vectors[:, -draft.shape.hidden_size :]
    principal = principal * (_EMBEDDING_STD / principal.std())
    own, rare = principal[rows.frequent], principal[rows.sharing].mean(0, keepdim=True)
    draft.model.embed_tokens.weight.copy_(torch.cat((own, rare)))


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
    draft: Llama,
    output: Tensor,
    lessons: Lessons,
    rows: EmbeddingRows,
    bias: Tensor,
    *,
    row_share: float,
    judge: Callable[..., Any],
) -> dict[str, Tensor]:
    """Return mean KL divergence and mean total variation over answers' rows, and as "loss" their sum, with gradient.

    Args:
        draft: learns.
        output: [B, H] of `output_rows`.
        lessons: of the step.
        rows: of the draft.
        bias: of `rows`.
        row_share: of all rows that are judged.
        judge: `judge_bins`, perhaps compiled.
    """
    tokens, dtype = lessons.tokens, output.dtype
    count = max(1, int(row_share * tokens[:, 1:].numel()))
    # Of one size, for which the judge is compiled once.
    size = count // -(-count // _CHUNK_ROWS)
    places = answer_rows(lessons.chosen_at, count - count % size)
    temperature, shared = (
        each[places] for each in (_temperatures(lessons.chosen_at), lessons.shared.flatten(0, 1))
    )  # fmt: skip
    wanted = lessons.hidden.flatten(0, 1)[places]
    # Unlike indexing, whose backward pass sorts.
    drafted = draft.hidden(rows.row_of[tokens[:, :-1]], dtype).flatten(0, 1).index_select(0, places)
    with torch.no_grad():
        reads = draft.model.embed_tokens.weight.to(dtype)
        towards, of_output = torch.empty_like(drafted), torch.zeros(reads.shape, device=reads.device)
        kl = variation = torch.zeros((), device=tokens.device)
        # In chunks, each with its gradient: all rows' logits, kept for a backward pass, would take most of a GPU.
        for begin in range(0, len(places), size):
            chunk = slice(begin, begin + size)
            own_kl, own_variation, gradient = judge(
                drafted[chunk] @ reads.mT, wanted[chunk] @ output.mT, shared[chunk], temperature[chunk], bias
            )
            kl, variation = kl + own_kl.sum(), variation + own_variation.sum()
            towards[chunk] = gradient @ reads
            of_output += gradient.mT @ drafted[chunk]
        kl, variation = kl / len(places), variation / len(places)
    made = with_gradient(drafted, towards) + with_gradient(draft.model.embed_tokens.weight, of_output)
    loss = made / len(places)
    return {"loss": loss + (kl + variation - loss.detach()), "kl": kl, "variation": variation}


def with_gradient(values: Tensor, gradient: Tensor) -> Tensor:
    """Return a number whose gradient by `values` is `gradient`, which was made without autograd's graph."""
    return (values * gradient).float().sum()


def output_rows(target: Llama, rows: EmbeddingRows, dtype: torch.dtype) -> Tensor:
    """Return the target's output layer for the frequent tokens, and zeros for the others, [B, H]."""
    own = target.model.embed_tokens.weight.detach()[rows.frequent].to(dtype)
    return torch.cat((own, torch.zeros_like(own[:1])))


def drawn_sequences(count: int, batch: int, *, seed: int, begin: int, device: torch.device) -> Iterator[Tensor]:
    """Endless batches [batch] of sequences' numbers; a loop that goes on at step `begin` draws other ones.

    Raises:
        ValueError: there are fewer sequences than one batch has.
    """
    if count < batch:
        raise ValueError(f"{count} conversations, at least {batch} needed for one batch")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + begin)
    while True:
        order = torch.randperm(count, generator=generator).to(device)
        for first in range(0, count - batch + 1, batch):
            yield order[first : first + batch]


@dataclass(kw_only=True, eq=False)
class LoopState:
    """State that a loop goes on with.

    Attributes:
        draft: that learns.
        rows: of its embedding.
        optimisers: of `build_optimisers`.
        steps: that are done.
        progress: share of the time that is over.
    """

    draft: Llama
    rows: EmbeddingRows
    optimisers: list[torch.optim.Optimizer]
    steps: int = 0
    progress: float = 0.0

    def save(self, file: Path) -> None:
        """Write the state, all or nothing."""
        unfinished = file.with_suffix(".unfinished")
        held = {
            "steps": self.steps,
            "progress": self.progress,
            "row_of": self.rows.row_of,
            "draft": self.draft.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        torch.save(held, unfinished)
        unfinished.rename(file)


def _first_state(
    draft: Llama, target: Llama, tokens: Tensor, config: DistillationConfig, *, always: Sequence[int], file: Path
) -> LoopState:
    """Return the state that was saved, otherwise that of a fresh draft."""
    optimisers = build_optimisers(
        draft, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay
    )
    if not file.exists():
        rows = choose_rows(tokens, vocab_size=target.shape.vocab_size, rows=draft.shape.vocab_size, always=always)
        start_embedding(draft, target, rows)
        return LoopState(draft=draft, rows=rows, optimisers=optimisers)
    held = _saved_state(file, tokens.device)
    draft.load_state_dict(held["draft"])
    for optimiser, state in zip(optimisers, held["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    logger.info("going on after %d steps, %.0f %% of the time", held["steps"], 100 * held["progress"])
    return LoopState(
        draft=draft,
        rows=EmbeddingRows(held["row_of"]),
        optimisers=optimisers,
        steps=held["steps"],
        progress=held["progress"],
    )


def _saved_state(file: Path, device: torch.device) -> dict[str, Any]:
    """Return what `LoopState.save` has written."""
    held = torch.load(file, map_location=device, weights_only=True)
    if not held.keys() >= {"progress", "row_of"}:
        raise ValueError(f"{file} was written by an older version of this recipe: remove it")
    return held


def distil(
    draft: Llama,
    target: Llama,
    tokens: Tensor,
    chosen_at: Tensor,
    config: DistillationConfig,
    *,
    always: Sequence[int],
    work: Path,
    deadline_s: float,
) -> bool:
    """Train the draft on conversations, going on where an earlier call has stopped; return whether it is done.

    Args:
        draft: changed; its vocabulary are the rows of its embedding.
        target: fixed.
        tokens: [N, T].
        chosen_at: [N, T].
        config: of the loop.
        always: tokens that have a row of their own.
        work: folder that keeps the state of the loop.
        deadline_s: on the clock of `time.perf_counter`; after it no step begins.

    Raises:
        ValueError: there are fewer conversations than one batch has or the device has room for, or the state is an
            older version's.
        FloatingPointError: the loss is not finite.
    """
    begin_s, file = time.perf_counter(), work / _STATE_FILE
    if begin_s >= deadline_s:
        return False
    torch.set_float32_matmul_precision("high")
    state = _first_state(draft, target, tokens, config, always=always, file=file)
    if state.progress >= 1:
        return True
    first_step = state.steps
    covered = (state.rows.bias[state.rows.row_of[tokens.long()]] == 0).float().mean().item()
    logger.info("%.2f %% of the text are tokens with a row of their own", 100 * covered)
    lessons = prepare_lessons(target, tokens, chosen_at, state.rows, compiled=config.compile, deadline_s=deadline_s)
    if lessons is not None:
        logger.info("the target has read the text after %.0f s", time.perf_counter() - begin_s)
        output = output_rows(target, state.rows, compute_dtype(tokens.device))
        clock = TrainingClock(config.seconds, begin_s=begin_s, progress=state.progress)
        _run_loop(state, lessons, output, config, clock=clock, deadline_s=deadline_s, file=file)
        state.save(file)
    if state.progress < 1 and state.steps < first_step + 2:
        # The same command would do the same again.
        logger.warning(
            "no progress in %.0f s: --minutes must be longer than reading the text and compiling take",
            time.perf_counter() - begin_s,
        )
    return state.progress >= 1


def _run_loop(
    state: LoopState,
    lessons: Lessons,
    output: Tensor,
    config: DistillationConfig,
    *,
    clock: TrainingClock,
    deadline_s: float,
    file: Path,
) -> None:
    """Train until progress is 1, when learning rates are zero, or until `deadline_s`."""
    # What is compiled is small and used often: the judge makes one pass over logits of what would be a dozen, and all
    # layers of a model share their code.
    judge = torch.compile(judge_bins, dynamic=False) if config.compile else judge_bins
    if config.compile:
        state.draft.compile_layers()
    bias, first_step, device = state.rows.bias, state.steps, lessons.tokens.device
    shown_s = saved_s = time.perf_counter()
    shown_step = first_step
    for drawn in drawn_sequences(
        len(lessons.tokens), config.batch_sequences, seed=config.seed, begin=first_step, device=device
    ):
        if state.progress >= 1 or time.perf_counter() >= deadline_s:
            return
        set_learning_rate(state.optimisers, state.progress, decay_share=config.decay_share)
        batch = lessons.take(drawn)
        losses = distillation_loss(
            state.draft, output, batch, state.rows, bias, row_share=config.row_share, judge=judge
        )
        losses["loss"].backward()
        for optimiser in state.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        state.steps += 1
        if state.steps == first_step + 1 or time.perf_counter() - shown_s > config.seconds / 30:
            values = {name: round(value.item(), 4) for name, value in losses.items()}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"loss {values['loss']} at step {state.steps}")
            now = time.perf_counter()
            rate = (state.steps - shown_step) * batch.tokens.numel() / max(1e-9, now - shown_s) / 1e6
            logger.info("step %d, %.0f %%: %s, %.2f M tokens/s", state.steps, 100 * state.progress, values, rate)
            shown_s, shown_step = now, state.steps
        state.progress = clock.end_step()
        if time.perf_counter() - saved_s > _SAVE_S:
            state.save(file)
            saved_s = time.perf_counter()


def trained_draft(draft: Llama, work: Path, device: torch.device) -> tuple[Llama, EmbeddingRows]:
    """Return the draft with the weights of the last state saved, and its rows.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is an older version's.
    """
    state = _saved_state(work / _STATE_FILE, device)
    draft.load_state_dict(state["draft"])
    logger.info("draft after %d steps", state["steps"])
    return draft, EmbeddingRows(state["row_of"])


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
