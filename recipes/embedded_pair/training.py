"""The two training loops: next-token prediction for the target, distillation of the target into the draft."""

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


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One loop's settings; a step takes `batch_sequences` windows of `sequence_tokens` tokens."""

    steps: int
    batch_sequences: int = 64
    sequence_tokens: int = 2048
    matrix_lr: float = 0.02
    other_lr: float = 0.004
    weight_decay: float = 0.02
    decay_share: float = 0.6
    seed: int = 1
    compile: bool = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be positive, not {self.steps}")


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
    """Trains a Llama of this shape to predict the next token of the stream."""

    def loss_of(model: Llama, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = model(inputs, compute_dtype(inputs.device))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}

    return _train(shape, stream, config, loss_of)


def train_draft(
    shape: LlamaShape, target: Llama, stream: Tensor, config: TrainingConfig, overlap_weight: float = 1.0
) -> Llama:
    """Distils the target into a Llama of this shape: KL divergence plus `overlap_weight` times total variation.

    The divergence teaches the whole distribution early on. Total variation is what acceptance pays: under shared
    noise or rejection a proposal survives about as often as the two distributions overlap.
    """
    target.eval().requires_grad_(False)

    def loss_of(model: Llama, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        dtype = compute_dtype(inputs.device)
        with torch.no_grad():
            log_p = target(inputs, dtype).float().log_softmax(-1)
            p = log_p.exp()
        log_q = model(inputs, dtype).float().log_softmax(-1)
        divergence = (p * (log_p - log_q)).sum(-1).mean()
        variation = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
        return {"loss": divergence + overlap_weight * variation, "kl": divergence, "variation": variation}

    return _train(shape, stream, config, loss_of)


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device has matrix units for it, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _train(
    shape: LlamaShape,
    stream: Tensor,
    config: TrainingConfig,
    loss_of: Callable[[Llama, Tensor, Tensor], dict[str, Tensor]],
) -> Llama:
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(shape).to(stream.device)
    logger.info("%.3f M parameters, %s", sum(p.numel() for p in model.parameters()) / 1e6, config)
    optimisers = build_optimisers(
        model, matrix_lr=config.matrix_lr, other_lr=config.other_lr, decay=config.weight_decay
    )
    step_losses = torch.compile(loss_of, dynamic=False) if config.compile else loss_of
    windows = token_windows(stream, config)
    tokens_per_step = config.batch_sequences * config.sequence_tokens
    start, start_step = time.perf_counter(), 0
    for step in range(config.steps):
        set_learning_rate(optimisers, step, config.steps, config.decay_share)
        losses = step_losses(model, *next(windows))
        losses["loss"].backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step in (0, 20) or (step + 1) % max(1, config.steps // 20) == 0:
            values = {name: round(value.item(), 4) for name, value in losses.items()}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"loss {values['loss']} at step {step}")
            now = time.perf_counter()
            rate = (step - start_step) * tokens_per_step / max(1e-9, now - start) / 1e6
            logger.info("step %d of %d: %s, %.2f M tokens/s", step + 1, config.steps, values, rate)
            start, start_step = now, step
    return model
