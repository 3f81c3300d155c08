"""KV caches, and how many slots fit a device."""

import math
import mmap
from dataclasses import dataclass

import torch

from outrider.engine.config import EngineConfig
from outrider.engine.decoder_spec import DecoderSpec
from outrider.errors import CheckpointError

# Rows of the largest step for whose logits memory is left free of KV.
_MOST_LOGIT_ROWS = 512
_CPU_KV_BYTES = 1 << 30
# Rows of the largest prefill for which memory is left free of KV.
_LARGEST_PREFILL = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class KvCaches:
    """Keys and values of all layers, and which position the token in each slot has."""

    # keys, values: per layer [num_slots, Hkv, D].
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor  # [num_slots] int32


@dataclass(frozen=True, kw_only=True)
class KvNeighbour:
    """Memory that another model on the same device needs."""

    fixed_bytes: int = 0  # whatever the number of slots: its weights and its steps
    bytes_per_slot: int = 0  # of its KV, for each slot of this model


class KvShape:
    """The shape of one rank's caches."""

    def __init__(self, spec: DecoderSpec, config: EngineConfig) -> None:
        self.layers = len(spec.layers)  # each has keys and values
        self.heads = spec.kv_heads // config.tensor_parallel_size  # of keys and values, on this rank
        self.head_dim = spec.head_dim  # numbers of each
        self.dtype: torch.dtype = getattr(torch, config.dtype_name)
        if config.kv_cache_dtype == "fp8_e4m3":
            self.dtype = torch.float8_e4m3fn
        self._place = str(config.model_path)

    @property
    def bytes_per_slot(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def caches(self, num_slots: int, device: torch.device) -> KvCaches:
        """Allocate empty caches; CheckpointError where the device has no room."""
        free = "" if device.type == "cpu" else f", {torch.cuda.mem_get_info(device)[0] / 1e9:.2f} GB are free"
        try:
            # Zeros, not empty: what lies in a slot never written is multiplied by a weight of 0, and 0 * NaN is NaN.
            shape = (num_slots, self.heads, self.head_dim)
            keys, values = ([_zeros(shape, self.dtype, device) for _ in range(self.layers)] for _ in range(2))
            positions = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # torch's own OutOfMemoryError is a RuntimeError, but on a CPU it is none; the system's refusals are the others.
        except (RuntimeError, OSError, OverflowError) as error:
            raise CheckpointError(
                f"{self._place}: no room on {device} for KV: {num_slots} slots take "
                f"{num_slots * self.bytes_per_slot / 1e9:.2f} GB{free}. Lower kv_cache_memory_fraction, kv_bytes or "
                "num_slots, take kv_cache_dtype fp8_e4m3, or free the memory that others hold"
            ) from error
        return KvCaches(keys=keys, values=values, positions=positions)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, of pages allocated when written: a worker starts sooner, and holds what it uses."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def step_bytes(config: EngineConfig, spec: DecoderSpec, *, features: int = 0) -> int:
    """About what the largest step needs beside weights and KV: a prefill's activations, logits and their processors.

    Args:
        features: numbers of each row that are handed on to a head.
    """
    itemsize = getattr(torch, config.dtype_name).itemsize
    row = 4 * spec.hidden_size + 3 * spec.intermediate_size // config.tensor_parallel_size + features
    return _LARGEST_PREFILL * row * itemsize + 3 * _MOST_LOGIT_ROWS * spec.vocab_size * 4


def fitting_slots(
    config: EngineConfig, *, bytes_per_slot: int, most: int, device: torch.device, bytes_beside: int
) -> int:
    """Return the number of KV slots: as configured, else as many as fit into memory.

    Args:
        most: more are of no use.
        bytes_beside: what else the device has to hold from now on.

    Raises:
        CheckpointError: not even one fits.
    """
    if config.num_slots is not None:
        return config.num_slots
    kv_bytes = config.kv_bytes
    if kv_bytes is None:
        kv_bytes = _CPU_KV_BYTES
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] - bytes_beside
            kv_bytes = int(free * config.kv_cache_memory_fraction)
    num_slots = min(kv_bytes // bytes_per_slot, most)
    if num_slots < 1:
        raise CheckpointError(f"{config.model_path}: {kv_bytes} bytes of KV memory hold no token, "
                              f"{bytes_per_slot} needed for each")  # fmt: skip
    return num_slots
