"""Muon for matrices, AdamW for the rest, and the schedule of both.

Muon (Keller Jordan, 2024; scaling as in arXiv 2502.16982) steps along the orthogonalised momentum. In models of
this size it needs clearly fewer steps than AdamW for the same loss.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

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


def set_learning_rate(optimisers: list[torch.optim.Optimizer], step: int, steps: int, decay_share: float) -> None:
    """Short linear warm-up, a plateau, then a linear descent to zero over the last `decay_share` of the steps."""
    warm = min(1.0, (step + 1) / max(1, min(100, steps // 10)))
    left = min(1.0, (steps - step) / max(1.0, decay_share * steps))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * min(warm, left)
