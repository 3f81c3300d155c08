"""Messages that nobody should send: made from the protocol's own descriptors, the same for the same seed.

    example  ->  fields changed (a boundary, a wrong length, a cleared or a doubled column)
             ->  bytes changed (cut, flipped, doubled, spliced, unknown fields, broken UTF-8, endless varints)
    nothing  ->  fields filled in at random

Nothing here knows a field by name: what is new in a .proto is fuzzed from its first day.
"""

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS = (0, 1, 2, 3, 4, 5, 7, 31, 63, 64, 127, 128, 255, 256, 257, 1 << 16, (1 << 31) - 1)
_INTS_32 = (1 << 31, (1 << 32) - 2, (1 << 32) - 1)
_INTS_64 = ((1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-30, 3.4e38, -3.4e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "def f(x):\n",
    "\0",
    "a\0b",
    "\ufffd",
    "é" * 300,
    "😀" * 40,
    "x" * 5000,
    "\u202e\u200b",
    "127.0.0.1:1",
)
_BROKEN_UTF8 = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82")
_LENGTHS = (0, 1, 1, 2, 2, 3, 4, 8, 33)
_MANY = 3000
_DEEPEST = 4
_SIGNED = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}
_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


class MessageFuzzer:
    """An endless supply of messages of one type.

    Args:
        message_type: what the receiver expects.
        seed: of all that is decided here.
    """

    def __init__(self, message_type: type[Message], *, seed: int | str) -> None:
        self._type = message_type
        self.random = random.Random(seed)

    def message(self, examples: Sequence[Message]) -> bytes:
        """One message; `examples` are such as a receiver would take."""
        kind = self.random.random()
        if kind < 0.2:
            message = self._type()
            self._fill(message, 0)
            return message.SerializeToString()
        example = self._type()
        example.CopyFrom(self.random.choice(examples))
        if kind < 0.75:
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                self._change(example)
        data = example.SerializeToString()
        if kind < 0.65:
            return data
        return self._change_bytes(data, [other.SerializeToString() for other in examples])

    # --------------------------------------------------------------------------------------------------------- fields

    def _fill(self, message: Message, depth: int) -> None:
        for field in _fields(message):
            if self.random.random() < 0.4:
                self._set(message, field, depth)

    def _change(self, message: Message) -> None:
        """One field of the message, or of a message within, is not what it was."""
        holders = list(_messages_within(message))
        holder = self.random.choice(holders)
        if not (everything := _fields(holder)):
            return
        present: Sequence[Any] = [field for field, _ in holder.ListFields()]
        field = self.random.choice(present if present and self.random.random() < 0.7 else everything)
        if self.random.random() < 0.15:
            holder.ClearField(field.name)
        elif field.is_repeated and not _is_map(field) and self.random.random() < 0.7:
            self._change_list(holder, field)
        else:
            self._set(holder, field, 1)

    def _change_list(self, holder: Message, field: FieldDescriptor) -> None:
        entries: Any = getattr(holder, field.name)
        change = self.random.randrange(5)
        if change == 0 and entries:
            del entries[self.random.randrange(len(entries))]
        elif change == 1 and entries:
            entries.extend(list(entries))
        elif change == 2 and entries and field.message_type is None:
            entries[self.random.randrange(len(entries))] = self._scalar(field)
        elif change == 3 and len(entries) > 1 and field.message_type is None:
            entries[:] = list(entries)[::-1]
        else:
            self._append(entries, field, 1)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if _is_map(field):
            assert field.message_type is not None
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(self.random.choice(_LENGTHS)):
                getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            message.ClearField(field.name)
            many = field.message_type is None and self.random.random() < 0.03
            for _ in range(_MANY if many else self.random.choice(_LENGTHS)):
                self._append(getattr(message, field.name), field, depth)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            if depth < _DEEPEST:
                self._fill(getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _append(self, entries: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is None:
            entries.append(self._scalar(field))
        elif depth < _DEEPEST:
            self._fill(entries.add(), depth + 1)

    def _scalar(self, field: FieldDescriptor) -> Any:
        kind, choice = field.cpp_type, self.random.choice
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return choice((False, True))
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return choice(_FLOATS) if self.random.random() < 0.7 else self.random.uniform(-3, 3)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return self._bytes() if field.type == FieldDescriptor.TYPE_BYTES else choice(_TEXTS)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return choice((0, 1, 2, 3, 4, 5, 77, -1, (1 << 31) - 1))
        bits = 64 if kind in _WIDE else 32
        number = choice(_INTS + _INTS_32 + (_INTS_64 if bits == 64 else ()))
        return number - (1 << bits) if kind in _SIGNED and number >= 1 << (bits - 1) else number

    def _bytes(self) -> bytes:
        choice = self.random.randrange(4)
        if choice == 0:
            return self.random.randbytes(self.random.choice((0, 1, 3, 5, 7, 13)))
        if choice == 1:
            return struct.pack("<3f", *(self.random.choice(_FLOATS) for _ in range(3)))
        count = self.random.choice((1, 2, 3, 8, 70, 4000))
        most = self.random.choice((4, 60, 1 << 31))
        return b"".join(struct.pack("<I", self.random.randrange(most)) for _ in range(count))

    # ---------------------------------------------------------------------------------------------------------- bytes

    def _change_bytes(self, data: bytes, others: Sequence[bytes]) -> bytes:
        if self.random.random() < 0.5:
            return data + self._tail(others)
        at = self.random.randrange(len(data) + 1)
        end = min(len(data), at + self.random.randrange(1, 12))
        change = self.random.randrange(4)
        if change == 0:
            return data[:at]
        if change == 1:
            return data[:at] + data[at:end] * self.random.randrange(2, 20) + data[end:]
        if change == 2:
            return data[:at] + self.random.randbytes(end - at) + data[end:]
        flipped = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8)) if data else 0):
            flipped[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(flipped)

    def _tail(self, others: Sequence[bytes]) -> bytes:
        """Return bytes that must not follow a message."""
        number = self.random.randrange(1, 15)
        broken = self.random.choice(_BROKEN_UTF8)
        return self.random.choice(
            (
                # Two messages, one after the other, are one message to a parser: a oneof's members collide.
                self.random.choice(others),
                _tag(self.random.choice((15, 200, 5000, (1 << 29) - 1)), 2) + b"\x03abc",
                _tag(number, 2) + bytes([len(broken)]) + broken,
                # A varint of ten bytes, as negative numbers have, or of eleven, as nothing has.
                _tag(number, 0) + b"\xff" * self.random.choice((9, 10)) + b"\x01",
                _tag(number, self.random.randrange(8)) + self.random.randbytes(6),
            )
        )


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _fields(message: Message) -> Sequence[FieldDescriptor]:
    return list(message.DESCRIPTOR.fields)  # pyright: ignore[reportReturnType] the stubs have two of each descriptor


def _messages_within(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or _is_map(field):
            continue
        for entry in [value] if isinstance(value, Message) else value:
            yield from _messages_within(entry)
