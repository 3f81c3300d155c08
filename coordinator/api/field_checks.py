"""Common checks of request fields; violations are collected and reported together."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import FieldViolation, InvalidRequest
from outrider.rpc import abort_with
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire import MOST_NODES

# Of one list, this many wrong entries are named; the rest are counted.
_NAMED_ENTRIES = 3
# In more bytes than this unknown fields are not looked for one by one, nor in more than so many messages of a list.
_MAX_UNKNOWN_BYTES = 16 << 10
_MAX_LOOKED_AT = 100


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds of what a request may ask for, and its defaults.

    Attributes:
        default_max_new_tokens: cut to the room that is left where the prompt is long.
        max_nodes: most nodes verified for a choice in one step, and the default in async mode.
        max_depth: deepest node, and the default in async mode.
        allow_synthetic: whether a request may be judged by the synthetic rule, whose output means nothing.
    """

    default_max_new_tokens: int = 128
    max_nodes: int = MOST_NODES
    max_depth: int = 16
    allow_synthetic: bool = False


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
        """Note that a field is wrong, and what to change."""
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
        if not self.params.HasField(name):  # pyright: ignore[reportArgumentType] as above
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
        """Return True, and note a violation, if a list over the vocabulary has more entries than that."""
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
        """Report the first of many wrong entries (path, description) and the number of the rest."""
        for path, description in wrong[:_NAMED_ENTRIES]:
            self.wrong(path, description)
        if len(wrong) > _NAMED_ENTRIES:
            self.wrong(field, f"{len(wrong) - _NAMED_ENTRIES} more {what}")


def unknown_fields(request: Message) -> list[tuple[str, str]]:
    """Return fields unknown to this protocol, as (field, fix).

    A misspelt one would otherwise be left out in silence.
    """
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    unknown_bytes = request.ByteSize() - known.ByteSize()
    if unknown_bytes > _MAX_UNKNOWN_BYTES:
        return [("request", f"{unknown_bytes} bytes of fields that this protocol does not have: remove them")]
    return list(_fields(request, "")) if unknown_bytes else []


def _fields(message: Message, path: str) -> Iterator[tuple[str, str]]:
    name = message.DESCRIPTOR.full_name
    for unknown in UnknownFieldSet(message):
        number = unknown.field_number
        yield f"{path}{number}", f"{name} has no field {number}: remove it"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if isinstance(value, Message):
            yield from _fields(value, f"{path}{field.name}.")
        else:
            for position, entry in enumerate(itertools.islice(value, _MAX_LOOKED_AT)):
                yield from _fields(entry, f"{path}{field.name}[{position}].")


async def abort_unless_known(request: Message, context: Any) -> None:
    """End a call whose request has unknown fields; for requests that have no other checks."""
    if violations := [FieldViolation(*each) for each in unknown_fields(request)]:
        await abort_with(context, InvalidRequest(violations))
