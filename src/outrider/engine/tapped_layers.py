"""Hidden states of chosen layers, kept beside the forward of transformers' own model code.

Shapes: T rows, L layers, N hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class TappedLayers:
    """Notes what passes between layers while a model runs.

    Args:
        model: with `layers` and `norm`, as transformers' decoder models have them.
        taps: i is the residual stream after i layers, 0 the embeddings, L before the last norm; -1 what that returns.
    """

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)
        self._noted: dict[int, torch.Tensor] = {}
        for tap in self._taps:
            if tap < 0:
                model.norm.register_forward_hook(self._note_output(tap))
            else:
                modules = [*model.layers, model.norm]
                modules[tap].register_forward_pre_hook(self._note_input(tap), with_kwargs=True)

    def features(self) -> torch.Tensor:
        """[T, len(taps) * N] of the last forward."""
        return torch.cat([self._noted[tap] for tap in self._taps], dim=-1)

    def _note_input(self, tap: int) -> Any:
        def note(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._noted[tap] = (arguments[0] if arguments else named["hidden_states"])[0]

        return note

    def _note_output(self, tap: int) -> Any:
        def note(_module: nn.Module, _arguments: tuple[Any, ...], output: torch.Tensor) -> None:
            self._noted[tap] = output[0]

        return note
