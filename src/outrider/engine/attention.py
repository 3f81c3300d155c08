"""The attention that transformers' models call here: it stores this step's keys and values in their slots, then runs
tree attention over the caches. Model code stays transformers'; it hands `step` through as an extra argument.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.engine.config import AttentionBackend
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference

ATTENTION_NAME = "outrider_tree"


class TreeAttention(Protocol):
    """An operator with the arguments and the answer of `tree_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: TreeAttentionBatch,
        *,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """[T, H, D]."""
        ...


def attention_operator(backend: AttentionBackend, head_dim: int) -> TreeAttention:
    """The operator that `backend` names.

    Raises:
        ValueError: `backend` does not take this head size.
    """
    if backend == "flashinfer":
        # Imported here: an optional extra, and importing it is not free.
        from outrider.kernels.tree_attention_flashinfer import FLASHINFER_HEAD_DIMS, tree_attention_flashinfer

        if head_dim not in FLASHINFER_HEAD_DIMS:
            raise ValueError(f"attention_backend: flashinfer takes head sizes {FLASHINFER_HEAD_DIMS}, not {head_dim}")
        return tree_attention_flashinfer
    return tree_attention if backend == "triton" else tree_attention_reference


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStep:
    """What every layer of one forward shares.

    Attributes:
        key_caches: per layer [num_slots, Hkv, D].
        value_caches: per layer [num_slots, Hkv, D].
        write_slots: [T] int64.
        batch: who sees what.
        attend: what computes the attention.
    """

    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    write_slots: torch.Tensor
    batch: TreeAttentionBatch
    attend: TreeAttention


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if cache.element_size() > 1:
        cache.index_copy_(0, slots, rows)
        return
    # Eight-bit floats are moved as bytes: not every device copies them by index. What is too large becomes the largest.
    most = torch.finfo(cache.dtype).max
    narrow = rows.clamp(-most, most).to(cache.dtype)
    cache.view(torch.uint8).index_copy_(0, slots, narrow.contiguous().view(torch.uint8))


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: AttentionStep,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The interface's signature: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    assert attention_mask is None, "transformers built a mask; its size is quadratic in the rows, and it is not used"
    key_cache, value_cache = step.key_caches[module.layer_idx], step.value_caches[module.layer_idx]
    _store(key_cache, step.write_slots, key[0].transpose(0, 1))
    _store(value_cache, step.write_slots, value[0].transpose(0, 1))
    out = step.attend(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        step.batch,
        scale=scaling,
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out[None], None


def register_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers' models."""
    # Imported here: it is half of what a worker would import, and one whose forward is the decoder needs none of it.
    from transformers import AttentionInterface

    # Only the attention: a name without a mask function of its own makes transformers build no mask at all.
    AttentionInterface.register(ATTENTION_NAME, _attention)
