"""Weights that are made, not read: a model of any size without its files."""

from collections.abc import Callable, Mapping

import torch

from outrider.errors import CheckpointError


class FunctionSource:
    """Weights that a function makes, on any device; see `outrider.engine.weight_source.WeightSource`.

    Args:
        make: name to tensor, contiguous.
        place: what messages call it.
    """

    def __init__(self, make: Callable[[str], torch.Tensor], place: str = "the weights") -> None:
        self._make = make
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self.place = place

    def stores(self, name: str) -> bool:
        """False: what a model may lack is not made."""
        return False

    def factors(self, name: str) -> None:
        """None: what is made is whole."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Note the shapes; tensors are checked against them when they are made."""
        self._shapes = shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor that the function makes."""
        made, shape = self._make(name), self._shapes.get(name)
        if not made.is_floating_point() or shape not in (None, tuple(made.shape)):
            raise CheckpointError(f"{self.place}: {name}: {list(made.shape)} {made.dtype} given, "
                                  f"{list(shape or ())} floats needed")  # fmt: skip
        return made

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A view."""
        return self.tensor(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A view."""
        return self.tensor(name)[:, start:stop]
