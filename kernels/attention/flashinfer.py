"""Tree attention through FlashInfer's FA2 kernels: the same arguments and answer as `tree_attention`.

Keys that every row of a session sees go through one pass without a mask, those that only some of its rows see through
one with a custom mask (`attention.split`). Each pass gives its result and the base-2 logarithm of its mass, and
FlashInfer merges the two. A mask over all keys would be read again for every tile of a long context and takes two to
three times as long (docs/kernels.md).

What depends on the batch alone is planned at the first layer of a step and kept for the others: planning builds the
mask on the device and waits for the host several times. The arrays of a batch must not change after its first use.

FlashInfer (arXiv 2501.01005) is an optional extra and is imported at the first call: importing it initialises CUDA,
and it compiles its kernels with nvcc when a head size or dtype is first used, which takes a minute.

Shapes: T query rows, S sessions, H query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.attention.batch import TreeAttentionBatch
from outrider.kernels.attention.split import split_keys
from outrider.kernels.tree_attention import check_arguments

__all__ = ["FLASHINFER_DTYPES", "FLASHINFER_HEAD_DIMS", "tree_attention_flashinfer"]

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
# Room for the partial results of a split context: 264 tiles of 128 rows need 128 MiB at 8 query heads of 128, and
# planning fails where it is short.
_WORKSPACE_BYTES = 384 << 20


def tree_attention_flashinfer(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`tree_attention` by FlashInfer.

    Args:
        query: [T, H, D] float16 or bfloat16 on CUDA, D of 64, 128 or 256.
        key_cache: [num_slots, Hkv, D], dtype of `query`.
        value_cache: [num_slots, Hkv, D], dtype of `query`.
        batch: who sees what; the same object for every layer of a step.
        scale: factor of the scores.
        sliding_window: tokens a row may look back on, itself included; 0 for no limit.
        softcap: bound of the scores; 0 for none.

    Returns:
        [T, H, D] in the dtype of `query`. A row that sees no key is zero.

    Raises:
        ValueError: a shape, dtype or device that does not fit or that FlashInfer does not take, naming the argument.
        ImportError: FlashInfer is not installed.
    """
    _check_arguments(query, key_cache, value_cache, batch, sliding_window)
    case = _Case(
        device=query.device,
        dtype=query.dtype,
        heads=query.shape[1],
        heads_kv=key_cache.shape[1],
        head_dim=query.shape[2],
        num_slots=key_cache.shape[0],
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return _passes(case).run(query, key_cache, value_cache, batch)


def _check_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: TreeAttentionBatch,
    sliding_window: int,
) -> None:
    check_arguments(query, key_cache, value_cache, batch, sliding_window)
    if query.shape[2] not in FLASHINFER_HEAD_DIMS:
        raise ValueError(f"query: head size {query.shape[2]} given, FlashInfer takes {FLASHINFER_HEAD_DIMS}")
    if query.dtype not in FLASHINFER_DTYPES:
        raise ValueError(f"query: dtype {query.dtype} given, FlashInfer takes torch.float16 and torch.bfloat16")
    if key_cache.dtype != query.dtype:
        raise ValueError(f"key_cache: dtype {key_cache.dtype} given, {query.dtype} (that of query) needed")
    if query.device.type != "cuda":
        raise ValueError(f"query: device {query.device} given, FlashInfer needs a CUDA device")


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Parameters of a plan besides the batch."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    heads_kv: int
    head_dim: int
    num_slots: int
    scale: float
    sliding_window: int
    softcap: float


@functools.cache
def _passes(case: _Case) -> _Passes:
    return _Passes(case)


@functools.cache
def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory of every pass on a device: they run one after the other."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Passes:
    """The two passes of one case, planned for the batch that was used last."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        self._planned: weakref.ref[TreeAttentionBatch] | None = None
        self._rows = 0
        self._runs: list[Any] = []
        make = functools.partial(
            _flashinfer().BatchPrefillWithPagedKVCacheWrapper, _workspace(case.device), "NHD", backend="fa2"
        )
        self._shared_pass, self._masked_pass = make(), make()

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: TreeAttentionBatch
    ) -> torch.Tensor:
        if self._planned is None or self._planned() is not batch:
            self._plan(batch)
            self._planned = weakref.ref(batch)
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if not self._runs:
            return out
        # Slots are pages of one token.
        query, caches = query[: self._rows], (key_cache[:, None], value_cache[:, None])
        if query.stride(2) != 1:
            query = query.contiguous()
        if len(self._runs) == 1:
            self._runs[0].run(query, caches, out=out[: self._rows])
            return out
        states = [wrapper.run(query, caches, return_lse=True) for wrapper in self._runs]
        out[: self._rows] = _flashinfer().merge_state(*states[0], *states[1])[0]
        return out

    def _plan(self, batch: TreeAttentionBatch) -> None:
        keys = split_keys(batch, num_slots=self._case.num_slots, sliding_window=self._case.sliding_window)
        self._rows, self._runs = keys.rows, []
        if keys.shared_slots.numel():
            self._plan_pass(self._shared_pass, keys.query_start, keys.shared_start, keys.shared_slots, None)
        if keys.mask.numel():
            self._plan_pass(self._masked_pass, keys.query_start, keys.masked_start, keys.masked_slots, keys.mask)

    def _plan_pass(
        self,
        wrapper: Any,
        query_start: torch.Tensor,
        key_start: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        case = self._case
        wrapper.plan(
            query_start,
            key_start,
            slots,
            # Tokens on a session's last page: 1 also for a session without keys, whose length comes out as 0.
            torch.ones_like(key_start[1:]),
            case.heads,
            case.heads_kv,
            case.head_dim,
            1,
            # As bools: a mask packed by the caller is read wrongly for more than one session.
            custom_mask=mask,
            causal=False,
            sm_scale=case.scale,
            logits_soft_cap=case.softcap if case.softcap > 0 else None,
            # Left out, float16 is assumed.
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )
        self._runs.append(wrapper)
