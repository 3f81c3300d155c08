"""Cases of the benchmark: an operator at a shape, alternatives to compare it with, and the least that it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds that the hardware reached in this run.

    Attributes:
        name: of the device.
        copy_bytes_per_s: bytes read plus bytes written by a kernel that writes 1 GiB from another.
        flops_per_s: of a bfloat16 matrix product of 8192 x 8192 x 8192.
        launch_us: what the smallest kernel adds to a graph.
    """

    name: str
    copy_bytes_per_s: float
    flops_per_s: float
    launch_us: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Least work of an operator.

    Attributes:
        bytes_moved: bytes that must come from memory or go there, each once.
        flops: floating-point operations on the matrix units.
    """

    bytes_moved: int
    flops: int = 0

    def floor_us(self, machine: Machine) -> float:
        """The larger of the two times that this work takes at the machine's measured rates."""
        return 1e6 * max(self.bytes_moved / machine.copy_bytes_per_s, self.flops / machine.flops_per_s)

    def bound(self, machine: Machine) -> str:
        """Return which of the two bounds the operator: "bytes" or "FLOPs"."""
        by_flops = self.flops / machine.flops_per_s > self.bytes_moved / machine.copy_bytes_per_s
        return "FLOPs" if by_flops else "bytes"


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A case with its tensors: what runs.

    Attributes:
        ours: the operator; waits for nothing, so that a graph can hold it.
        work: what it must at least move and compute.
        reference: the plain-torch reference, where it takes CUDA tensors; may wait for the host.
        flashinfer: FlashInfer's operator of the same answer.
        beside: other things to compare with, by the heading of their column; each fits into a graph.
        restore: undoes what the operator has changed, before every run and outside the time that is taken.
    """

    ours: Run
    work: Work
    reference: Run | None = None
    flashinfer: Run | None = None
    beside: Mapping[str, Run] = field(default_factory=dict)
    restore: Run | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the benchmark; building it takes the device and imports what it measures.

    Attributes:
        operator: name in `outrider.ops`, or `pool.` and the name of an operator of the candidate pool.
        shape: in words, unique within the operator.
        target: key in `targets.TARGETS`, None for an operator without one.
        build: makes the tensors; its second argument is FlashInfer, or None where it is not installed.
    """

    operator: str
    shape: str
    build: Callable[[torch.device, Any], Subject]
    target: str | None = None


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
