"""The training loops: next-token prediction, distillation, and both at once."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from llama import Llama, LlamaShape
from optimisation import build_optimisers, set_learning_rate
from tokenization import END_OF_TEXT_ID
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

# What stands for temperature 0: soft enough that a wrong choice still says how to become right.
_GREEDY = 0.25


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One loop's settings; a step takes `batch_sequences` windows of `sequence_tokens` tokens."""

    steps: int
    batch_sequences: int = 32
    sequence_tokens: int = 2048
    matrix_lr: float = 0.02
    other_lr: float = 0.004
    weight_decay: float = 0.02
    decay_share: float = 0.6
    seed: int = 1
    stream_tokens: int | None = None  # only the stream's first so many tokens; None: all
    compile: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be positive, not {self.steps}")


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """Joint training: `pull` weighs the two divergences against the target's own loss.

    The target's learning rates are `target_lr_share` of the loop's.
    """

    loop: TrainingConfig
    pull: float = 0.5
    target_lr_share: float = 0.25


def token_windows(stream: Tensor, config: TrainingConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, labels), each [N, T] int64: every epoch cuts the stream at a new phase and shuffles the windows.

    The first input of a window is the end-of-text token, as in every prompt: the model then knows texts that start
    in the middle.
    """
    length = config.sequence_tokens
    generator = torch.Generator().manual_seed(config.seed)
    offsets = torch.arange(length + 1, device=stream.device)
    while True:
        phase = int(torch.randint(length, (1,), generator=generator))
        windows = (len(stream) - phase - 1) // length
        order = torch.randperm(windows, generator=generator).to(stream.device) * length + phase
        for first in range(0, windows - config.batch_sequences + 1, config.batch_sequences):
            starts = order[first : first + config.batch_sequences]
            tokens = stream[starts[:, None] + offsets].long()
            inputs = tokens[:, :-1].clone()
            inputs[:, 0] = END_OF_TEXT_ID
            yield inputs, tokens[:, 1:]


def load_stream(path: str, device: torch.device) -> Tensor:
    """A token file as an int32 tensor on the device."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)


def train_target(shape: LlamaShape, stream: Tensor, config: TrainingConfig) -> Llama:
    """Train a Llama of this shape to predict the next token of the stream."""
    model = new_model(shape, stream.device, config.seed)

    def losses(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": next_token_loss(model(inputs, compute_dtype(inputs.device)), labels)}

    _train(losses, _optimisers(model, config), stream, config)
    return model


def distil(target: Llama, draft: Llama, stream: Tensor, config: TrainingConfig) -> None:
    """Train the draft towards the whole next-token distribution of the target, which stays as it is."""
    target.requires_grad_(False)

    def losses(inputs: Tensor, _labels: Tensor) -> dict[str, Tensor]:
        dtype = compute_dtype(inputs.device)
        kl, variation = divergences(target(inputs, dtype), draft(inputs, dtype))
        return {"loss": kl + variation, "kl": kl, "variation": variation}

    _train(losses, _optimisers(draft, config), stream, config)


def train_jointly(target: Llama, draft: Llama, stream: Tensor, config: JointConfig) -> None:
    """Go on with the distillation while the target, too, is pulled towards the draft.

    The target gives up a little compression where the draft cannot follow it anyway; the pair agrees far more often.
    """
    target.requires_grad_(True)

    def losses(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        dtype = compute_dtype(inputs.device)
        logits = target(inputs, dtype)
        kl, variation = divergences(logits, draft(inputs, dtype))
        # Both optimisers ignore a loss's scale, so that `pull` weakens nothing for the draft.
        next_token = next_token_loss(logits, labels)
        return {
            "loss": next_token + config.pull * (kl + variation),
            "next_token": next_token,
            "kl": kl,
            "variation": variation,
        }

    optimisers = _optimisers(draft, config.loop) + _optimisers(target, config.loop, share=config.target_lr_share)
    _train(losses, optimisers, stream, config.loop)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats; logits [N, T, V], labels [N, T]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def divergences(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mean KL(p || q) in nats and mean total variation of [N, T, V] logits.

    The divergence teaches the whole distribution early on. Total variation is what acceptance pays: under shared
    noise or rejection a proposal survives about as often as the two distributions overlap.
    """
    log_p = target_logits.float().log_softmax(-1)
    log_q = draft_logits.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1).mean(), 0.5 * (p - log_q.exp()).abs().sum(-1).mean()


def row_temperatures(hundredths: Tensor) -> Tensor:
    """[R, 1] float32 of [N, T] hundredths, what stands for 0 in its place."""
    temperature = hundredths.flatten()[:, None].float() / 100
    return torch.where(temperature == 0, _GREEDY, temperature)


def new_model(shape: LlamaShape, device: torch.device, seed: int) -> Llama:
    """Fresh weights of this shape."""
    torch.manual_seed(seed)
    model = Llama(shape).to(device)
    logger.info("%.3f M parameters: %s", sum(p.numel() for p in model.parameters()) / 1e6, shape)
    return model


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has matrix units for it, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _optimisers(model: Llama, config: TrainingConfig, share: float = 1.0) -> list[torch.optim.Optimizer]:
    return build_optimisers(
        model, matrix_lr=share * config.matrix_lr, other_lr=share * config.other_lr, decay=config.weight_decay
    )


def _train(
    losses_of: Callable[[Tensor, Tensor], dict[str, Tensor]],
    optimisers: list[torch.optim.Optimizer],
    stream: Tensor,
    config: TrainingConfig,
) -> None:
    torch.set_float32_matmul_precision("high")
    logger.info("%s", config)
    step_losses = torch.compile(losses_of, dynamic=False) if config.compile else losses_of
    windows = token_windows(stream[: config.stream_tokens], config)
    tokens_per_step = config.batch_sequences * config.sequence_tokens
    start, start_step = time.perf_counter(), 0
    warm_up_share = min(0.1, 100 / config.steps)
    for step in range(config.steps):
        progress = step / config.steps
        set_learning_rate(optimisers, progress, decay_share=config.decay_share, warm_up_share=warm_up_share)
        losses = step_losses(*next(windows))
        losses["loss"].backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        done = step + 1
        if done in (1, 21) or done % max(1, config.steps // 15) == 0:
            values = {name: round(value.item(), 4) for name, value in losses.items()}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"loss {values['loss']} at step {done}")
            now = time.perf_counter()
            rate = (done - start_step) * tokens_per_step / max(1e-9, now - start) / 1e6
            logger.info("step %d of %d: %s, %.2f M tokens/s", done, config.steps, values, rate)
            start, start_step = now, done
