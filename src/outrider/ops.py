"""Every operator under its own name: `from outrider.ops import verify_tree_greedy`.

The operators live in `outrider.kernels`, each beside its plain-torch reference.
"""

from outrider.engine.config import create_config_for_draft_model
from outrider.kernels.build_tree import TreeMaskMode, build_tree_kernel_efficient
from outrider.kernels.chain_sampling import chain_speculative_sampling
from outrider.kernels.coupled_sampling import coupled_choice, coupled_topk, coupled_topk_scored
from outrider.kernels.draft_inputs import (
    QueryMetadata,
    copy_and_expand_eagle_inputs,
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    eagle_step_update_slot_mapping_and_metadata,
    extend_all_queries_by_N,
)
from outrider.kernels.noise import gumbel_noise, philox_uint32
from outrider.kernels.processors import ProcessorBatch, apply_processors
from outrider.kernels.sampling.filtered_probs import filtered_probs
from outrider.kernels.tree_attention import TreeAttentionBatch, tree_attention
from outrider.kernels.tree_mask import reconstruct_indices_from_tree_mask, segment_packbits
from outrider.kernels.tree_sampling import tree_speculative_sampling_target_only
from outrider.kernels.verify_coupled import verify_coupled
from outrider.kernels.verify_tree import verify_tree_greedy

__all__ = [
    "ProcessorBatch",
    "QueryMetadata",
    "TreeAttentionBatch",
    "TreeMaskMode",
    "apply_processors",
    "build_tree_kernel_efficient",
    "chain_speculative_sampling",
    "copy_and_expand_eagle_inputs",
    "coupled_choice",
    "coupled_topk",
    "coupled_topk_scored",
    "create_config_for_draft_model",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "extend_all_queries_by_N",
    "filtered_probs",
    "gumbel_noise",
    "philox_uint32",
    "reconstruct_indices_from_tree_mask",
    "segment_packbits",
    "tree_attention",
    "tree_speculative_sampling_target_only",
    "verify_coupled",
    "verify_tree_greedy",
]
