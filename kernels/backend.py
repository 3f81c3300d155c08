"""Dispatch of operators to plain torch or Triton.

One rule for every operator of this folder: CUDA tensors go to the Triton kernel, CPU tensors to the plain-torch
reference, unless Triton's interpreter was asked for (`TRITON_INTERPRET=1` when this module is first imported), which
runs the same kernels on CPU tensors. Kernel modules take `triton`, `tl` and `jit` from here, so that they import
where Triton is not installed, and do without it where there is no GPU: reading a hundred kernels takes a quarter of a
second.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

# Read once: Triton itself decides when a kernel is decorated, so a later change of the variable could not be followed.
_INTERPRETS = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")

if TYPE_CHECKING:
    # Kernels are a language of their own: a type checker sees neither its functions nor the launches.
    triton: Any = None

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):  # noqa: D101, N801
        constexpr = int

    def jit(function: Any = None, **options: Any) -> Any:  # noqa: D103
        ...
elif importlib.util.find_spec("triton") is not None and (_INTERPRETS or torch.cuda.is_available()):
    import triton
    import triton.language as tl
    from triton import jit
else:
    from types import SimpleNamespace

    # What is planned without a device.
    triton = SimpleNamespace(
        cdiv=lambda size, block: -(-size // block), next_power_of_2=lambda size: 1 << (size - 1).bit_length()
    )
    tl = SimpleNamespace(constexpr=int)

    def jit(function=None, **_options):
        """Stand-in for `triton.jit`: the kernel is defined, and never launched."""
        return function if function is not None else (lambda inner: inner)


__all__ = ["HAS_TRITON", "INTERPRETED", "check_shape", "jit", "tl", "triton", "uses_triton"]

HAS_TRITON = hasattr(triton, "jit")
INTERPRETED = HAS_TRITON and _INTERPRETS


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return True if an operator given `tensor` launches its Triton kernel; otherwise it runs its reference.

    Raises:
        RuntimeError: a CUDA tensor where Triton is not installed.
    """
    if tensor.is_cuda:
        if not HAS_TRITON:
            raise RuntimeError("CUDA tensors need the triton package, which is not installed")
        return True
    return INTERPRETED


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    """Raise ValueError unless `tensor` has `shape`; a str entry names a size that may be anything."""
    given = tuple(tensor.shape)
    # By far the most common case, and the quickest to find out.
    if given == shape:
        return
    if len(given) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(given, shape, strict=True)
    ):
        return
    needed = "[" + ", ".join(str(size) for size in shape) + "]"
    raise ValueError(f"{name}: shape {list(given)} given, {needed} needed")
