"""Choice of the attention operator."""

from typing import Protocol

import torch

from outrider.engine.config import EngineConfig
from outrider.errors import CheckpointError
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention, tree_attention_reference


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


def attention_of(config: EngineConfig, head_dim: int) -> TreeAttention:
    """Return the configured attention; CheckpointError where it does not take heads of this size."""
    backend = config.attention_backend_name
    if backend == "flashinfer":
        # Imported here: an optional extra, and importing it is not free.
        from outrider.kernels.attention.flashinfer import FLASHINFER_HEAD_DIMS, tree_attention_flashinfer

        if head_dim not in FLASHINFER_HEAD_DIMS:
            fault = f"attention_backend: flashinfer takes head sizes {FLASHINFER_HEAD_DIMS}, not {head_dim}"
            raise CheckpointError(f"{config.model_path}: {fault}")
        return tree_attention_flashinfer
    return tree_attention if backend == "triton" else tree_attention_reference
