"""Where an operator runs: plain torch or Triton.

One rule for every operator of this folder: CUDA tensors go to the Triton kernel, CPU tensors to the plain-torch
reference, unless Triton's interpreter was asked for (`TRITON_INTERPRET=1` when this module is first imported), which
runs the same kernels on CPU tensors. Kernel modules take `triton`, `tl` and `jit` from here, so that they import
where Triton is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    # Kernels are a language of their own: a type checker sees neither its functions nor the launches.
    triton: Any = None

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):  # noqa: D101, N801
        constexpr = int

    def jit(function: Any = None, **options: Any) -> Any:  # noqa: D103
        ...
elif importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton import jit
else:
    from types import SimpleNamespace

    triton = None
    tl = SimpleNamespace(constexpr=int)

    def jit(function=None, **_options):
        """Stand-in for `triton.jit`: the kernel is defined, and never launched."""
        return function if function is not None else (lambda inner: inner)


__all__ = ["HAS_TRITON", "INTERPRETED", "check_shape", "jit", "tl", "triton", "uses_triton"]

HAS_TRITON = triton is not None
# Read once: Triton itself decides when a kernel is decorated, so a later change of the variable could not be followed.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether an operator given `tensor` launches its Triton kernel (otherwise it runs its reference).

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
