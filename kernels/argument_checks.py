"""Host-side checks of operator arguments: every failure names the argument, what was given and what is needed.

`check_shape` of `outrider.kernels.backend` belongs to the same family. Nothing here looks at a tensor's values, so
nothing synchronises with a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.kernels.backend import check_shape

__all__ = [
    "FLOAT_DTYPES",
    "INDEX_DTYPES",
    "NeededTensor",
    "check_at_least",
    "check_columns",
    "check_dense",
    "check_dtype",
    "check_place",
    "check_tensors",
    "write_back",
]

INDEX_DTYPES = (torch.int32, torch.int64)
NeededTensor = tuple[torch.Tensor | None, tuple[int | str, ...], Sequence[torch.dtype]]
"""A tensor, the shape that it needs and the dtypes that it may have."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_at_least(name: str, given: int, needed: int) -> None:
    """Raise ValueError unless `given` (a size or an integer argument) reaches `needed`."""
    if given < needed:
        raise ValueError(f"{name}: {given} given, at least {needed} needed")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Raise ValueError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        needed = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: dtype {tensor.dtype} given, {needed} needed")


def check_place(name: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    """Raise ValueError unless `tensor` is on `device`, the one of the argument called `owner`."""
    if tensor.device != device:
        raise ValueError(f"{name}: device {tensor.device} given, {device} (that of {owner}) needed")


def check_tensors(**needed: NeededTensor) -> None:
    """Raise ValueError unless each tensor has its shape and one of its dtypes, on the device of the first.

    Each is given under its own name; None is left out. A size that has a name is the same for all that name it.
    """
    owner, (first, *_) = next(iter(needed.items()))
    assert first is not None
    sizes: dict[int | str, int] = {}
    device = first.device
    for name, (tensor, shape, dtypes) in needed.items():
        if tensor is None:
            continue
        # Lists are quicker than generators, and a step on a CPU has dozens of these calls.
        wanted = tuple([sizes.get(size, size) for size in shape])
        if tensor.shape != wanted:
            check_shape(name, tensor, wanted)
            sizes.update(zip(shape, tensor.shape, strict=True))
        if tensor.dtype not in dtypes:
            check_dtype(name, tensor, dtypes)
        if tensor.device != device:
            check_place(name, tensor, device, owner)


def check_dense(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless the entries of each tensor's last dimension are neighbours in memory."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: stride {tensor.stride(-1)} of the last dimension given, 1 needed")


def check_columns(owner: str, device: torch.device, columns: Mapping[str, tuple[torch.Tensor, int]]) -> None:
    """Raise ValueError unless every column is one-dimensional, of the size beside it or longer, and on `device`.

    A column called `.._mask` holds bool, every other one int32 or int64.
    """
    for name, (tensor, needed) in columns.items():
        check_shape(name, tensor, ("size",))
        check_at_least(f"{name} size", tensor.shape[0], needed)
        check_dtype(name, tensor, (torch.bool,) if name.endswith("_mask") else INDEX_DTYPES)
        check_place(name, tensor, device, owner)


def write_back(outputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """Copy what was written to contiguous stand-ins into the outputs that are not contiguous themselves."""
    for output, stand_in in zip(outputs, written, strict=True):
        if not output.is_contiguous():
            output.copy_(stand_in.view_as(output))
