"""Operators check what they are given: an error names the argument, what was given and what is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider import ops
from outrider.kernels.attention.rotary_store import rotary_store
from outrider.kernels.attention.slot_updates import gather_paths, gather_slot_rows, store_positions
from outrider.kernels.linear.gated_activation import gated_activation
from outrider.kernels.linear.paired_norm import paired_norm
from outrider.kernels.linear.residual_norm import residual_norm
from outrider.kernels.linear.scaled_rows import scale_rows
from outrider.kernels.linear.scaled_weight import quantised, scaled_weight
from outrider.kernels.linear.skinny import gated_linear, linear, linear_parts
from outrider.kernels.processors import apply_processors
from outrider.kernels.sampling.filtered_probs import filtered_probs
from outrider.kernels.sampling.grammar_mask import apply_grammar_masks


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def _longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _bools(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


_LINKS = {name: _longs(2, 4) for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
_WALK = {
    "candidates": _longs(2, 4), **_LINKS,
    "accept_index": _ints(2, 3), "accept_token_num": _ints(2), "predicts": _ints(8),
}  # fmt: skip
_FILTERS = {"temperature": _floats(8), "top_k": _ints(8), "top_p": _floats(8), "min_p": _floats(8)}
_SAMPLED = {"logits": _floats(8, 6), "seeds": _longs(8), "positions": _longs(8), **_FILTERS,
            "logit_bias": _floats(8, 6), "choice_index": _longs(8)}  # fmt: skip
_BATCH = {
    "slot_table": _ints(2, 8), "query_start": _ints(3), "tree_start": _ints(2), "prefix_len": _ints(3),
    "key_len": _ints(2), "tree_mask": _longs(3, 1), "max_query_len": 2, "max_key_len": 6, "positions": _ints(3),
    "slot_positions": _ints(16), "paths": _ints(3, 64),
}  # fmt: skip
_PROCESSED = {
    "row_session": _ints(3), "repetition_penalty": _floats(2), "presence_penalty": _floats(2),
    "frequency_penalty": _floats(2), "count_start": _ints(3), "count_tokens": _ints(5), "count_output": _ints(5),
    "path_start": _ints(4), "path_tokens": _ints(6), "bias_start": _ints(3), "bias_tokens": _ints(4),
    "bias_values": _floats(4), "allowed_start": _ints(3), "allowed_tokens": _ints(2), "banned_start": _ints(4),
    "banned_tokens": _ints(2),
}  # fmt: skip
_CACHES = {"key_cache": _floats(16, 2, 8), "value_cache": _floats(16, 2, 8)}

# Each operator with arguments that it takes.
_OPERATORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "build_tree": (ops.build_tree_kernel_efficient, {
        "parent_list": torch.tensor([[-1, 0, 1, 2]] * 2), "selected_index": torch.tensor([[0, 1, 3]] * 2),
        "verified_seq_len": torch.tensor([4, 5]), "tree_mask": _bools(32), "positions": _longs(8), **_LINKS,
        "topk": 3, "depth": 2, "draft_token_num": 4, "tree_mask_mode": 1,
    }),
    "reconstruct_indices": (ops.reconstruct_indices_from_tree_mask, {
        "tree_mask": _bools(32), "verified_seq_len": _longs(2), "positions": _longs(8), **_LINKS,
        "batch_size": 2, "draft_token_num": 4,
    }),
    "segment_packbits": (ops.segment_packbits, {
        "x": _bools(16), "input_indptr": torch.tensor([0, 8, 16]), "output_indptr": torch.tensor([0, 1, 2]),
        "y": torch.zeros(2, dtype=torch.uint8), "batch_size": 2,
    }),
    "verify_tree_greedy": (ops.verify_tree_greedy, {**_WALK, "target_predict": _longs(2, 4)}),
    "verify_coupled": (ops.verify_coupled, {**_SAMPLED, **_WALK}),
    "coupled_choice": (ops.coupled_choice, _SAMPLED),
    "coupled_topk": (ops.coupled_topk, {**_SAMPLED, "k": 2}),
    "filtered_probs": (filtered_probs, {"logits": _floats(8, 6), **_FILTERS}),
    "tree_sampling": (ops.tree_speculative_sampling_target_only, {
        **_WALK, "uniform_samples": _floats(2, 4), "uniform_samples_for_final_sampling": _floats(2),
        "target_probs": _floats(2, 4, 5), "draft_probs": _floats(2, 4, 5),
    }),
    "chain_sampling": (ops.chain_speculative_sampling, {
        "draft_probs": _floats(2, 3, 5), "draft_token_ids": _longs(2, 3), "target_probs": _floats(2, 4, 5),
        "maybe_output_accepted_token_num": _ints(2), "maybe_output_emitted_draft_token_num": _ints(2),
        "seed": _longs(2), "offset": _longs(2),
    }),
    "eagle_step": (ops.eagle_step_update_slot_mapping_and_metadata, {
        "positions_1d": _longs(3), "block_table_tensor": _ints(3, 2), "seq_lens": _longs(3), "block_size": 4,
        "max_model_len": 8, "out_clamped_positions": _longs(3), "out_slot_mapping": _longs(3), "input_batch_size": 3,
    }),
    "prepare_inputs": (ops.eagle_prepare_inputs_padded, {
        "cu_num_draft_tokens": _longs(2), "valid_sampled_tokens_count": _longs(2), "query_start_loc": _longs(3),
        "token_indices_to_sample": _longs(2), "num_rejected_tokens": _longs(2),
    }),
    "prepare_next_token": (ops.eagle_prepare_next_token_padded, {
        "sampled_token_ids": _longs(2, 3), "discard_request_mask": _bools(2), "backup_next_token_ids": _longs(2),
        "next_token_ids": _longs(2), "valid_sampled_tokens_count": _longs(2), "vocab_size": 9,
    }),
    "expand_inputs": (ops.copy_and_expand_eagle_inputs, {
        "target_token_ids": _longs(5), "target_positions": _longs(5), "next_token_ids": _longs(2),
        "query_start_loc": torch.tensor([0, 3, 5]), "query_end_loc": torch.tensor([1, 4]), "padding_token_id": 0,
        "parallel_drafting_token_id": 0, "num_padding_slots_per_request": 3, "shift_input_ids": True,
        "out_input_ids": _longs(9), "out_positions": _longs(9), "out_is_rejected_token_mask": _bools(9),
        "out_is_masked_token_mask": _bools(9), "out_new_token_indices": _longs(6),
        "out_hidden_state_mapping": _longs(5),
    }),
    "extend_queries": (
        lambda **given: ops.extend_all_queries_by_N(
            ops.QueryMetadata(
                query_start_loc=torch.tensor([0, 3, 5]), seq_lens=torch.tensor([3, 2]), num_actual_tokens=5,
                max_query_len=3, max_seq_len=3, slot_mapping=torch.arange(5),
            ), **given,
        ),
        {"N": 1, "arange": torch.arange(3), "new_slot_mapping": torch.arange(7)},
    ),
    "philox_uint32": (ops.philox_uint32, {
        "seeds": _longs(2), "positions": _longs(2), "vocab_ids": _longs(2, 5), "choice_index": _longs(2),
    }),
    "gumbel_noise": (ops.gumbel_noise, {"seeds": _longs(2), "positions": _longs(2), "vocab": 5}),
    "processor_batch": (ops.ProcessorBatch, _PROCESSED),
    "apply_processors": (apply_processors, {"logits": _floats(3, 9), "batch": ops.ProcessorBatch(**_PROCESSED)}),
    "grammar_masks": (apply_grammar_masks, {"logits": _floats(2, 8), "rows": _ints(1), "masks": _ints(1, 1)}),
    "attention_batch": (ops.TreeAttentionBatch, _BATCH),
    "tree_attention": (ops.tree_attention, {
        "query": _floats(3, 4, 8), **_CACHES, "batch": ops.TreeAttentionBatch(**_BATCH), "scale": 1.0,
        "sliding_window": 4,
    }),
    "residual_norm": (residual_norm, {
        "hidden": _floats(2, 8), "addend": _floats(1, 2, 8), "weight": _floats(8), "addend_weight": _floats(8),
        "eps": 1e-5,
    }),
    "paired_norm": (paired_norm, {
        "hidden": _floats(2, 8), "token_ids": _longs(2), "table": _floats(11, 8), "table_weight": _floats(8),
        "hidden_weight": _floats(8), "eps": 1e-5,
    }),
    "gated_activation": (gated_activation, {"gate_up": _floats(2, 4), "activation": "silu"}),
    "rotary_store": (rotary_store, {
        "qkv": _floats(1, 3, 56), "cos_sin": _floats(20, 2, 4), "positions": _longs(3), "write_slots": _longs(3),
        **_CACHES, "heads": 3, "bias": _floats(56), "q_norm": _floats(8), "k_norm": _floats(8), "eps": 1e-6,
    }),
    "linear": (linear, {"rows": _floats(2, 8), "weight": _floats(6, 8)}),
    "linear_parts": (linear_parts, {"rows": _floats(2, 8), "weight": _floats(6, 8)}),
    "gated_linear": (gated_linear, {"rows": _floats(2, 8), "weight": _floats(6, 8), "activation": "silu"}),
    "scale_rows": (scale_rows, {"rows": _floats(2, 8)}),
    "scaled_weight": (scaled_weight, {"values": _floats(3, 64).to(torch.float8_e4m3fn), "scales": _floats(3)}),
    "gather_slot_rows": (gather_slot_rows, {
        "table": _ints(4, 3), "rows": _ints(2), "key_len": _ints(2), "out": _ints(2, 3),
    }),
    "store_positions": (store_positions, {
        "slot_positions": _ints(5), "write_slots": _longs(2), "positions": _longs(2),
    }),
    "gather_paths": (gather_paths, {
        "slot_table": _ints(2, 3), "sessions": _ints(3), "tree_start": _ints(2), "key_len": _ints(2),
        "tree_mask": _longs(3, 1), "paths": _ints(3, 64),
    }),
}  # fmt: skip

# Arguments whose number of dimensions, or whose first size, nothing else decides: buffers may hold more than is used.
_ANY_RANK = {"reconstruct_indices tree_mask"} | {
    f"{name} predicts" for name in ("verify_tree_greedy", "verify_coupled", "tree_sampling")
}
_ANY_SIZE = {
    "segment_packbits x", "paired_norm table", "rotary_store cos_sin",
    "linear weight", "linear_parts weight", "gather_slot_rows table", "store_positions slot_positions",
    "gated_activation gate_up", "scale_rows rows", "linear rows", "linear_parts rows", "gated_linear rows",
    "attention_batch slot_positions", "grammar_masks logits", "chain_sampling seed", "chain_sampling offset",
    "eagle_step positions_1d", "prepare_inputs cu_num_draft_tokens", "prepare_next_token sampled_token_ids",
    "expand_inputs next_token_ids", "processor_batch path_tokens", "processor_batch allowed_tokens",
    "processor_batch banned_tokens",
}  # fmt: skip
_TENSORS = [
    (operator, name)
    for operator, (_, given) in _OPERATORS.items()
    for name, value in given.items()
    if isinstance(value, torch.Tensor)
]


def _copies(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize("operator", _OPERATORS)
def test_good_arguments_are_taken(operator: str) -> None:
    call, given = _OPERATORS[operator]
    call(**_copies(given))


@pytest.mark.parametrize(("operator", "name"), _TENSORS)
def test_tensors_that_do_not_fit_are_named(operator: str, name: str) -> None:
    call, given = _OPERATORS[operator]
    names, tensor = "|".join(given), given[name]
    of_another_type = tensor.to(torch.complex64)
    with pytest.raises(ValueError, match=f"^{name}: dtype torch.complex64 given, .* needed"):
        call(**{**_copies(given), name: of_another_type})
    if f"{operator} {name}" not in _ANY_RANK:
        with pytest.raises(ValueError, match=rf"^(batch\.|metadata\.)?({names})\b.* given, .*needed"):
            call(**{**_copies(given), name: tensor[None]})
    if f"{operator} {name}" not in _ANY_SIZE:
        with pytest.raises(ValueError, match=rf"^(batch\.|metadata\.)?({names})\b.* given, .*needed"):
            call(**{**_copies(given), name: tensor[:-1]})
    if sum(isinstance(value, torch.Tensor) for value in given.values()) > 1:
        with pytest.raises(ValueError, match=f"^({names}): device (meta|cpu) given, (meta|cpu) .*needed"):
            call(**{**_copies(given), name: tensor.to("meta")})


def _batch_without(*names: str) -> Any:
    return ops.TreeAttentionBatch(**{**_BATCH, **dict.fromkeys(names)})


_OUTPUTS_OF_65 = {name: _longs(2, 65) for name in ("positions", *_LINKS)}


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        ("build_tree", {"parent_list": _longs(2, 3)}, "parent_list columns: 3 given, at least 4 needed"),
        ("build_tree", {"parent_list": _longs(2, 0)}, "parent_list columns: 0 given, at least 4 needed"),
        ("build_tree", {"tree_mask": _bools(2, 5, 5)}, r"tree_mask: shape \[2, 5, 5\] given, \[bs, 4, 4\] needed"),
        ("build_tree", {"tree_mask_mode": 2}, "tree_mask: dtype torch.bool given, torch.uint8 or"),
        (
            "build_tree",
            {"tree_mask": torch.zeros(7, dtype=torch.uint8), "tree_mask_mode": 2},
            "tree_mask size: 7 given",
        ),
        ("build_tree", {"tree_mask_mode": 0}, "tree_mask size: 32 given, at least 68 needed"),
        ("build_tree", {"tree_mask_mode": 3}, "tree_mask_mode: 3 given"),
        ("build_tree", {"retrive_next_token": _longs(2, 3)}, "retrive_next_token columns: 3 given, at least 4 needed"),
        ("build_tree", {"topk": 0}, "topk: 0 given"),
        ("build_tree", {"depth": 0}, "depth: 0 given"),
        ("build_tree", {"draft_token_num": 1025}, "draft_token_num: 1025 given, 1 to 1024 needed"),
        (
            "build_tree",
            {**_OUTPUTS_OF_65, "selected_index": _longs(2, 64), "draft_token_num": 65, "tree_mask_mode": 2},
            "draft_token_num: 65 given, at most 64 fit a packed mask",
        ),
        (
            "reconstruct_indices",
            {"retrive_next_token": _longs(2, 3)},
            "retrive_next_token columns: 3 given, at least 4",
        ),
        ("reconstruct_indices", {"batch_size": -1}, "batch_size: -1 given"),
        ("reconstruct_indices", {"draft_token_num": 0}, "draft_token_num: 0 given"),
        ("segment_packbits", {"batch_size": -1}, "batch_size: -1 given"),
        ("verify_tree_greedy", {"accept_index": _ints(2, 0)}, "accept_index columns: 0 given, at least 1 needed"),
        ("coupled_choice", {"seeds": _ints(8)}, "seeds: dtype torch.int32 given, torch.int64 needed"),
        ("coupled_choice", {"logits": _floats(8, 0), "logit_bias": None}, "logits vocabulary: 0 given"),
        ("coupled_topk", {"k": 0}, "k: 0 given, 1 to V = 6 needed"),
        ("coupled_topk", {"k": 7}, "k: 7 given, 1 to V = 6 needed"),
        ("tree_sampling", {"target_probs": _floats(2, 4, 0), "draft_probs": None}, "target_probs vocabulary: 0 given"),
        ("tree_sampling", {"draft_probs": _floats(2, 4, 5).bfloat16()}, "draft_probs: dtype torch.bfloat16 given"),
        ("chain_sampling", {"target_probs": _floats(2, 3, 5)}, r"target_probs: shape .* given, \[2, 4, V\] needed"),
        ("chain_sampling", {"target_probs": _floats(2, 4, 0), "draft_probs": _floats(2, 3, 0)}, "target_probs vocab"),
        ("chain_sampling", {"seed": _longs(3)}, r"seed: shape \[3\] given, \[1\] or \[2\] needed"),
        ("eagle_step", {"block_table_tensor": _ints(3, 0)}, "block_table_tensor columns: 0 given"),
        ("eagle_step", {"input_batch_size": 4}, "out_slot_mapping size: 3 given, at least 4 needed"),
        ("eagle_step", {"input_batch_size": 2}, "input_batch_size: 2 given, at least 3 needed"),
        ("eagle_step", {"block_size": 0}, "block_size: 0 given"),
        ("eagle_step", {"max_model_len": 0}, "max_model_len: 0 given"),
        ("prepare_next_token", {"vocab_size": 0}, "vocab_size: 0 given, at least 1 needed"),
        ("expand_inputs", {"num_padding_slots_per_request": 0}, "num_padding_slots_per_request: 0 given, at least 1"),
        ("expand_inputs", {"out_hidden_state_mapping": None}, "out_hidden_state_mapping: None given"),
        ("extend_queries", {"N": -1}, "N: -1 given, at least 0 needed"),
        ("gumbel_noise", {"vocab": 0}, "vocab: 0 given, at least 1 needed"),
        ("gumbel_noise", {"vocab": _floats(2, 5)}, "vocab: dtype torch.float32 given"),
        ("gumbel_noise", {"stream": -1}, "stream: -1 given"),
        ("processor_batch", {"bias_values": None}, "bias_values: None given"),
        ("apply_processors", {"logits": _floats(3, 9).double()}, "logits: dtype torch.float64 given"),
        ("attention_batch", {"max_key_len": 9}, "max_key_len: 9 given, at most 8 needed"),
        ("attention_batch", {"split_keys": 0}, "split_keys: 0 given"),
        ("tree_attention", {"query": _floats(3, 3, 8)}, "query: 3 heads given, a multiple of Hkv = 2 needed"),
        ("tree_attention", {"batch": _batch_without("positions")}, "no positions or slot_positions given"),
        ("residual_norm", {"addend": _floats(0, 2, 8)}, "addend parts: 0 given"),
        ("residual_norm", {"addend": None}, "addend_weight: given without an addend"),
        ("residual_norm", {"hidden": _floats(8, 2).t()}, "hidden: stride 2"),
        ("paired_norm", {"table": _floats(11, 8).bfloat16()}, "table: dtype torch.bfloat16 given"),
        ("paired_norm", {"hidden_weight": _floats(16)[::2]}, "hidden_weight: stride 2"),
        ("gated_activation", {"gate_up": _floats(2, 3)}, "gate_up: 3 columns given, an even number needed"),
        ("gated_activation", {"gate_up": _floats(4, 4)[:, ::2]}, "gate_up: stride 2"),
        ("gated_activation", {"activation": "relu"}, "activation: 'relu' given, one of silu, gelu_tanh"),
        ("rotary_store", {"qkv": _floats(0, 3, 56)}, "qkv parts: 0 given"),
        ("rotary_store", {"cos_sin": _floats(0, 2, 4)}, "cos_sin positions: 0 given"),
        ("rotary_store", {"key_cache": _floats(16, 2, 16)[..., ::2]}, "key_cache: stride 2"),
        ("rotary_store", {"query_dtype": torch.int32}, "query_dtype: torch.int32 given"),
        ("linear", {"weight": _floats(6, 8).bfloat16()}, "weight: dtype torch.bfloat16 given, torch.float32 needed"),
        ("linear", {"weight": quantised(_floats(6, 7))}, r"weight: shape \[6, 7\] given, \[N, 8\] needed"),
        ("gated_linear", {"weight": _floats(5, 8)}, "weight: 5 rows given, an even number"),
        ("gated_linear", {"activation": "relu"}, "activation: 'relu' given"),
        ("gather_paths", {"paths": _ints(64, 3).t()}, "paths: strides .* given, a contiguous tensor needed"),
    ],
)
def test_values_that_do_not_fit_are_named(operator: str, changes: dict[str, Any], message: str) -> None:
    call, given = _OPERATORS[operator]
    with pytest.raises(ValueError, match=message):
        call(**{**_copies(given), **changes})


def test_a_full_mask_without_room_for_the_prefix_is_told_its_size() -> None:
    # The well-known usage example: 12 nodes, 128 committed tokens, a mask of 12 x 12.
    outputs = [_longs(1, 12) for _ in range(4)]
    build_tree: Any = ops.build_tree_kernel_efficient
    with pytest.raises(ValueError, match="tree_mask size: 144 given, at least 1680 needed"):
        build_tree(
            _longs(1, 9), torch.arange(11)[None], torch.tensor([128]), _bools(12, 12), *outputs, 4, 3, 12, 0
        )  # fmt: skip
