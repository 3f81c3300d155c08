"""Checkpoints whose matrices have 8 bits: which are served.

    compressed-tensors   format "float-quantized": float8_e4m3 weights, a factor a row ("channel") or one ("tensor"),
                         activations rounded per token where they are used; such as the *-FP8-dynamic checkpoints
    fp8                  one factor a matrix, activations likewise

On a GPU the decoder multiplies with the 8 bits (`outrider.kernels.linear.skinny`), on a CPU with what they stand for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

_SERVED = (
    "compressed-tensors in the format float-quantized (floats of 8 bits, strategy channel or tensor, activations "
    "dynamic per token), fp8 with one factor a matrix and activation_scheme dynamic; or give the float or bfloat16 "
    "checkpoint, which --quantization fp8 rounds while it is loaded"
)
# What may stand beside the weights' own description, and would change what is computed.
_FOREIGN = ("kv_cache_scheme", "sparsity_config", "transform_config")


def check_quantization(folder: Path, given: Any) -> None:
    """Raise CheckpointError for a `quantization_config` that is not served, with what works."""
    found = _unserved(given) if isinstance(given, Mapping) else f"quantization_config {given!r}"
    if found is not None:
        raise CheckpointError(f"{folder}: quantised weights with {found} are not served; these are: {_SERVED}")


def _unserved(given: Mapping[str, Any]) -> str | None:
    """Return the first unsupported part of a `quantization_config`; None if all is supported."""
    method = given.get("quant_method")
    if method == "fp8":
        return _unserved_fp8(given)
    if method != "compressed-tensors":
        return f"quant_method {method!r}"
    if given.get("format") != "float-quantized":
        return f"format {given.get('format')!r}"
    for name in _FOREIGN:
        scheme = given.get(name)
        if scheme and not (isinstance(scheme, Mapping) and scheme.get("format") == "dense"):
            return f"a {name}"
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return f"config_groups {groups!r}"
    return next((found for group in groups.values() if (found := _unserved_group(group)) is not None), None)


def _unserved_fp8(given: Mapping[str, Any]) -> str | None:
    if given.get("weight_block_size") is not None:
        return f"weight_block_size {given['weight_block_size']}"
    if given.get("fmt", "e4m3") != "e4m3":
        return f"fmt {given['fmt']!r}"
    scheme = given.get("activation_scheme")
    return None if scheme == "dynamic" else f"activation_scheme {scheme!r}"


def _unserved_group(group: Any) -> str | None:
    if not isinstance(group, Mapping):
        return f"the group {group!r}"
    if group.get("format") not in (None, "float-quantized"):
        return f"format {group['format']!r}"
    wanted = {
        "weights": {"strategy": ("channel", "tensor"), "dynamic": (False, None), "group_size": (None,)},
        "input_activations": {"strategy": ("token",), "dynamic": (True,), "group_size": (None,)},
    }
    common = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None)}
    for part, values in wanted.items():
        described = group.get(part)
        if not isinstance(described, Mapping):
            return f"{part} {described!r}"
        for name, allowed in (common | values).items():
            if described.get(name) not in allowed:
                return f"{part} of {name} {described.get(name)!r}"
    return f"output_activations {group['output_activations']!r}" if group.get("output_activations") else None
