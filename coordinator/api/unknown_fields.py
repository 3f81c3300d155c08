"""Fields of a request that this protocol does not have: a misspelt one would otherwise be left out in silence."""

import itertools
from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

# In more than this, they are not looked for one by one, nor in more than so many messages of a list.
_MAX_UNKNOWN_BYTES = 16 << 10
_MAX_LOOKED_AT = 100


def unknown_fields(request: Message) -> list[tuple[str, str]]:
    """Where a request holds fields that this protocol does not have: (field, what to change)."""
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
