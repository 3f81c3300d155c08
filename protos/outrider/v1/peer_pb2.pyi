from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FindRequest(_message.Message):
    __slots__ = ("incarnation", "caller", "request_id")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    caller: str
    request_id: str
    def __init__(self, incarnation: _Optional[int] = ..., caller: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("is_live", "seed")
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    is_live: bool
    seed: int
    def __init__(self, is_live: bool = ..., seed: _Optional[int] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("incarnation", "caller", "request_ids", "reason")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    caller: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, incarnation: _Optional[int] = ..., caller: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class EndResponse(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...
