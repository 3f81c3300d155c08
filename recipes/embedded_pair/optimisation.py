"""Muon for matrices, AdamW for the rest, the schedule of both, and the clock of trainings that end in time.

Muon (Keller Jordan, 2024; scaling as in arXiv 2502.16982) steps along the orthogonalised momentum. In models of
this size it needs clearly fewer steps than AdamW for the same loss.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of each matrix's singular value decomposition, [B, R, C], by a quintic Newton-Schulz iteration."""
    x = matrices.bfloat16()
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape take their step together, in a few batched products."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    # It returns no loss, unlike the base class's.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; `closure` is there for the base class and must be None."""
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = group["params"]
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            state = self.state[parameters[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradients))
            momentum.lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp(momentum, group["momentum"]))
            rows, columns = update.shape[-2:]
            lr = group["lr"]
            scale = lr * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(parameters, update.float().unbind(), strict=True):
                parameter.mul_(1 - lr * group["weight_decay"]).add_(change, alpha=-scale)


def build_optimisers(
    model: nn.Module, *, matrix_lr: float, other_lr: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    fused: dict[str, Any] = {"fused": others[0].is_cuda}
    adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, **fused)
    muon = Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=decay)
    for optimiser in (adam, muon):
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return [adam, muon]


def set_learning_rate(
    optimisers: list[torch.optim.Optimizer], progress: float, *, decay_share: float, warm_up_share: float = 0.01
) -> None:
    """Linear warm-up, a plateau, then a linear descent to zero.

    Args:
        optimisers: of `build_optimisers`.
        progress: share of the training that is over, 0 before its first step.
        decay_share: of the training, at its end.
        warm_up_share: of the training, at its beginning.
    """
    # The first step takes a hundredth of the rate, not nothing.
    warm = min(1.0, 0.01 + progress / warm_up_share)
    left = min(1.0, (1 - progress) / max(1e-9, decay_share))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * min(warm, left)


class TrainingClock:
    """Progress of a training that takes a given time.

    The first step compiles. The time up to its end is no progress: it would be all of the warm-up. A training that goes
    on has such a time again, and the same pace after it.

    Args:
        seconds: of a training without a break, from its beginning on.
        begin_s: when this part of it began, by `time.perf_counter`.
        progress: where it goes on.
    """

    def __init__(self, seconds: float, *, begin_s: float, progress: float = 0.0) -> None:
        self.progress = self._begin_at = progress
        self._seconds, self._begin_s = seconds, begin_s
        self._first_step_s: float | None = None

    def end_step(self) -> float:
        """Return the share of the time that is over, after each step; 1: the training is."""
        now = time.perf_counter()
        if self._first_step_s is None:
            self._first_step_s = now
            self._seconds -= now - self._begin_s
            if self._seconds <= 0:
                logger.warning(
                    "no more is learned: training was to end %.0f s before its first step did; give it more time",
                    -self._seconds,
                )
        over = (now - self._first_step_s) / max(1e-9, self._seconds)
        self.progress = min(1.0, self._begin_at + over)
        return self.progress
