"""What the checks of a request's fields share: wrong ones are collected, and named all at once."""

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

from outrider.errors import FieldViolation
from outrider.v1 import common_pb2, generation_pb2

# Of one list, this many wrong entries are named; the rest are counted.
_NAMED_ENTRIES = 3


class FieldChecks:
    """The violations of one request, and how they are found.

    A list that is longer than it may be is not looked into: what a request costs is bounded by what it may ask for, and
    not by how much fits into a message.
    """

    def __init__(self, params: generation_pb2.SamplingParams, model: common_pb2.ModelInfo) -> None:
        self.params = params
        self.model = model
        self.violations: list[FieldViolation] = []

    def wrong(self, field: str, description: str, *, code: str = "") -> None:
        """A field is wrong, and what to change."""
        self.violations.append(FieldViolation(field, description, code))

    def number(self, name: str, default: float, needed: str, fits: Callable[[float], bool]) -> float:
        """A sampling parameter that is a number; `needed` says what `fits`."""
        if not self.params.HasField(name):  # pyright: ignore[reportArgumentType] the generated stub lists the names
            return default
        value = getattr(self.params, name)
        if math.isfinite(value) and fits(value):
            return value
        self.wrong(f"sampling_params.{name}", f"{value:g} given, {needed} needed")
        return default

    def whole(self, name: str, *, default: Any, low: int, high: int | None = None) -> Any:
        """A sampling parameter that is a whole number from `low` to `high`."""
        if not self.params.HasField(name):  # pyright: ignore[reportArgumentType]
            return default
        value = getattr(self.params, name)
        if value < low or (high is not None and value > high):
            needed = f"{low} or more" if high is None else f"{low} to {high}"
            self.wrong(f"sampling_params.{name}", f"{value} given, {needed} needed")
            return low
        return value

    def token_id_list(self, name: str) -> tuple[int, ...]:
        """A sampling parameter that is a list of token ids, each once."""
        token_ids = getattr(self.params, name)
        if self.is_too_long(f"sampling_params.{name}", token_ids, "token ids"):
            return ()
        self.check_token_ids(f"sampling_params.{name}", token_ids)
        return tuple(dict.fromkeys(token_ids))

    def is_too_long(self, field: str, entries: Sized, what: str) -> bool:
        """Whether a list over the vocabulary has more entries than that."""
        most = self.model.vocab_size
        if len(entries) > most:
            self.wrong(field, f"{len(entries)} {what} given, at most {most} allowed: the vocabulary has no more")
        return len(entries) > most

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Names those that are outside the vocabulary."""
        vocab_size = self.model.vocab_size
        # The usual case costs one pass in C; which entries are wrong is asked only when some are.
        if not token_ids or max(token_ids) < vocab_size:
            return
        wrong = [
            (f"{field}[{position}]", f"token id {token_id} is outside the vocabulary: give 0 to {vocab_size - 1}")
            for position, token_id in enumerate(token_ids)
            if token_id >= vocab_size
        ]
        self.wrong_entries(field, wrong, "token ids outside the vocabulary")

    def wrong_entries(self, field: str, wrong: Sequence[tuple[str, str]], what: str) -> None:
        """Of many wrong entries (path, description) the first are named, and the others counted."""
        for path, description in wrong[:_NAMED_ENTRIES]:
            self.wrong(path, description)
        if len(wrong) > _NAMED_ENTRIES:
            self.wrong(field, f"{len(wrong) - _NAMED_ENTRIES} more {what}")
