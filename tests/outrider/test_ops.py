from __future__ import annotations

import importlib
import inspect

import outrider.ops

# What other projects call by these names, and ours.
OPERATORS = {
    "apply_processors",
    "build_tree_kernel_efficient",
    "chain_speculative_sampling",
    "copy_and_expand_eagle_inputs",
    "coupled_choice",
    "coupled_topk",
    "create_config_for_draft_model",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "extend_all_queries_by_N",
    "reconstruct_indices_from_tree_mask",
    "segment_packbits",
    "tree_attention",
    "tree_speculative_sampling_target_only",
    "verify_coupled",
    "verify_tree_greedy",
}


def test_every_operator_is_exported() -> None:
    assert set(outrider.ops.__all__) >= OPERATORS


def test_names_are_those_of_the_operators_own_modules() -> None:
    assert outrider.ops.__all__ == sorted(outrider.ops.__all__)
    for name in outrider.ops.__all__:
        operator = getattr(outrider.ops, name)
        assert operator.__name__ == name
        assert operator.__module__.startswith(("outrider.kernels.", "outrider.engine."))
        home = importlib.import_module(operator.__module__)
        assert getattr(home, name) is operator


def test_every_operator_says_what_it_takes_and_raises() -> None:
    # The first makes a dataclass, the second is described by the operator whose scores it leaves out.
    for name in OPERATORS - {"create_config_for_draft_model", "coupled_topk"}:
        said = inspect.getdoc(getattr(outrider.ops, name)) or ""
        assert "Raises:" in said and "Args:" in said, name
