"""Rotary embeddings, as a config's `rope_parameters` describe them: frequencies, and a factor of cosine and sine.

    default        theta^(-2i / D) for pair i of D / 2
    linear         these divided by a factor
    proportional   those of the first pairs, the others do not turn
    llama3         long waves divided by a factor, short ones as they are, a blend between
    yarn           likewise, by how often a wave turns over the length of training; a factor for cosine and sine

Source: transformers' `modeling_rope_utils` (read in 5.23), whose float32 arithmetic is followed bit for bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_SERVED = "default, linear, llama3, proportional and yarn"
# Their frequencies depend on the longest sequence of the batch: no table can hold them.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class RotarySpec:
    """One kind of rotary embedding."""

    frequencies: tuple[float, ...]  # D / 2 of them, float32 values
    scaling: float  # factor of cosine and sine

    def table(self, positions: int) -> torch.Tensor:
        """Cosines and sines of the positions from 0 on, [positions, 2, D / 2] float32 on the CPU."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * torch.tensor(self.frequencies)
        table = torch.empty((positions, 2, len(self.frequencies)))
        torch.cos(angles, out=table[:, 0])
        torch.sin(angles, out=table[:, 1])
        return table if self.scaling == 1 else table.mul_(self.scaling)


def read_rotary(parameters: Mapping[str, Any], head_dim: int) -> RotarySpec:
    """Return what `rope_parameters` describe, with `rope_type`, `rope_theta` and the length of training filled in.

    Raises:
        ValueError: it cannot be served, with what can.
        KeyError: a parameter is missing.
    """
    kind, scaling = parameters["rope_type"], 1.0
    if kind in _LENGTH_DEPENDENT:
        raise ValueError(f"rope type {kind!r}, which depends on the length of the text, cannot be served; "
                         f"these can: {_SERVED}")  # fmt: skip
    if kind not in ("default", "linear", "llama3", "proportional", "yarn"):
        raise ValueError(f"rope type {kind!r} cannot be served; these can: {_SERVED}")
    rotated = head_dim if kind == "default" else int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if rotated != head_dim and kind != "proportional":
        raise ValueError(f"a rotary embedding of {rotated} of {head_dim} channels cannot be served; "
                         "these can: that of all")  # fmt: skip
    powers = parameters["rope_theta"] ** (torch.arange(0, 2 * (rotated // 2), 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / powers
    if kind == "linear":
        frequencies /= parameters["factor"]
    elif kind == "proportional":
        frequencies = torch.cat([frequencies, torch.zeros((head_dim - rotated) // 2)]) / parameters.get("factor", 1.0)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif kind == "yarn":
        frequencies, scaling = _yarn(powers, parameters, head_dim)
    return RotarySpec(tuple(frequencies.tolist()), float(scaling))


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    is_long, is_short = waves > trained / low, waves < trained / high
    scaled = torch.where(is_long, frequencies / factor, frequencies)
    share = (trained / waves - low) / (high - low)
    blend = (1 - share) * scaled / factor + share * scaled
    return torch.where(is_long | is_short, scaled, blend)


def _yarn(powers: torch.Tensor, parameters: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    theta, trained = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"]

    def pair_that_turns(times: float) -> float:
        return (head_dim * math.log(trained / (times * 2 * math.pi))) / (2 * math.log(theta))

    low, high = (pair_that_turns(parameters.get(name) or most) for name, most in (("beta_fast", 32), ("beta_slow", 1)))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - torch.clamp(ramp, 0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    if (scaling := parameters.get("attention_factor")) is None:
        numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if numerator and denominator:
            scaling = _magnitude(factor, numerator) / _magnitude(factor, denominator)
        else:
            scaling = _magnitude(factor, 1)
    return frequencies, scaling


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
