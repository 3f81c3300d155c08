"""The GPUs of this machine, as NVIDIA's management library tells of them: without PyTorch, and without a context."""

import ctypes
import os
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its name, and its memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; none where there is no driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if library.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        found = [gpu for index in range(count.value) if (gpu := _read(library, index)) is not None]
    finally:
        library.nvmlShutdown()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return found
    words = [word.strip() for word in asked.split(",") if word.strip()]
    # Whoever names them otherwise than by number has them told apart by CUDA: here only how many counts.
    if all(word.isdecimal() for word in words):
        return [found[int(word)] for word in words if int(word) < len(found)]
    return found[: sum(not word.startswith("-") for word in words)]


def _read(library: ctypes.CDLL, index: int) -> Gpu | None:
    device, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    library.nvmlDeviceGetName(device, name, _NAME_BYTES)
    return Gpu(name=name.value.decode(errors="replace"), total_bytes=memory.total, free_bytes=memory.free)
