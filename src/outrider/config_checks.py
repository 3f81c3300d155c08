"""Bounds of numbers in configurations; a value of None is not checked (torch-free)."""

import math
from collections.abc import Callable


def check_at_least_one(config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is below 1."""
    _check(config, names, "at least 1", lambda value: value >= 1)


def check_not_negative(config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is below 0, or not finite."""
    _check(config, names, "0 or more", lambda value: 0 <= value < math.inf)


def check_positive(config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not above 0, or not finite."""
    _check(config, names, "more than 0", lambda value: 0 < value < math.inf)


def check_between(config: object, low: int, high: int, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not from `low` to `high`."""
    _check(config, names, f"{low} to {high}", lambda value: low <= value <= high)


def _check(config: object, names: tuple[str, ...], needed: str, fits: Callable[[float], bool]) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise ValueError(f"{name}: {value} given, {needed} needed")
