"""Every operator under its own name: `from outrider.ops import verify_tree_greedy`.

The operators live in `outrider.kernels`, each beside its plain-torch reference.
"""

from outrider.kernels.coupled_sampling import coupled_choice, coupled_topk, coupled_topk_scored
from outrider.kernels.noise import gumbel_noise, philox_uint32
from outrider.kernels.processors import ProcessorBatch, apply_processors
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention
from outrider.kernels.verify_tree import verify_tree_greedy

__all__ = [
    "ProcessorBatch",
    "TreeAttentionBatch",
    "apply_processors",
    "coupled_choice",
    "coupled_topk",
    "coupled_topk_scored",
    "gumbel_noise",
    "philox_uint32",
    "tree_attention",
    "verify_tree_greedy",
]
