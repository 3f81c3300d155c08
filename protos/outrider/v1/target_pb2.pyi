from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaceChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACE_CHANGE_UNSPECIFIED: _ClassVar[PlaceChange]
    PLACE_CHANGE_TAKEN: _ClassVar[PlaceChange]
    PLACE_CHANGE_LEFT: _ClassVar[PlaceChange]
    PLACE_CHANGE_RESENT: _ClassVar[PlaceChange]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class TreeEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TREE_END_UNSPECIFIED: _ClassVar[TreeEnd]
    TREE_END_COVERED: _ClassVar[TreeEnd]
    TREE_END_MISSED: _ClassVar[TreeEnd]
    TREE_END_STARVED: _ClassVar[TreeEnd]
PLACE_CHANGE_UNSPECIFIED: PlaceChange
PLACE_CHANGE_TAKEN: PlaceChange
PLACE_CHANGE_LEFT: PlaceChange
PLACE_CHANGE_RESENT: PlaceChange
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
TREE_END_UNSPECIFIED: TreeEnd
TREE_END_COVERED: TreeEnd
TREE_END_MISSED: TreeEnd
TREE_END_STARVED: TreeEnd

class ReloadRequest(_message.Message):
    __slots__ = ("path", "swap")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    path: str
    swap: _common_pb2.Weights
    def __init__(self, path: _Optional[str] = ..., swap: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("found", "running", "swap_ns")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SWAP_NS_FIELD_NUMBER: _ClassVar[int]
    found: _common_pb2.Weights
    running: _common_pb2.Weights
    swap_ns: int
    def __init__(self, found: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ..., running: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ..., swap_ns: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("row", "token_logprobs", "top_count", "top_token_ids", "top_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_logprobs: bytes
    top_count: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: bytes
    def __init__(self, row: _Optional[int] = ..., token_logprobs: _Optional[bytes] = ..., top_count: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RoundCommands(_message.Message):
    __slots__ = ("incarnation", "opens", "places", "growth", "bounds", "close_session_ids", "close_epochs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionOpen]
    places: PlaceChanges
    growth: RelayedGrowth
    bounds: SessionBounds
    close_session_ids: _containers.RepeatedScalarFieldContainer[int]
    close_epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[_common_pb2.SessionOpen, _Mapping]]] = ..., places: _Optional[_Union[PlaceChanges, _Mapping]] = ..., growth: _Optional[_Union[RelayedGrowth, _Mapping]] = ..., bounds: _Optional[_Union[SessionBounds, _Mapping]] = ..., close_session_ids: _Optional[_Iterable[int]] = ..., close_epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class PlaceChanges(_message.Message):
    __slots__ = ("session_ids", "epochs", "places", "changes")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    changes: _containers.RepeatedScalarFieldContainer[PlaceChange]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., changes: _Optional[_Iterable[_Union[PlaceChange, str]]] = ...) -> None: ...

class RelayedGrowth(_message.Message):
    __slots__ = ("session_ids", "epochs", "places", "as_of", "node_counts", "node_ids", "parents", "tokens", "acceptance", "sources", "distributions", "complete")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    as_of: _containers.RepeatedScalarFieldContainer[int]
    node_counts: _containers.RepeatedScalarFieldContainer[int]
    node_ids: bytes
    parents: bytes
    tokens: bytes
    acceptance: bytes
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.GrowthSource]
    distributions: _common_pb2.DraftDistributions
    complete: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., as_of: _Optional[_Iterable[int]] = ..., node_counts: _Optional[_Iterable[int]] = ..., node_ids: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., acceptance: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.GrowthSource, str]]] = ..., distributions: _Optional[_Union[_common_pb2.DraftDistributions, _Mapping]] = ..., complete: _Optional[_Iterable[bool]] = ...) -> None: ...

class SessionBounds(_message.Message):
    __slots__ = ("session_ids", "epochs", "allow", "alone")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    allow: _containers.RepeatedScalarFieldContainer[int]
    alone: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., allow: _Optional[_Iterable[int]] = ..., alone: _Optional[_Iterable[bool]] = ...) -> None: ...

class RoundResults(_message.Message):
    __slots__ = ("session_ids", "epochs", "token_counts", "tokens", "accepted_counts", "selected_counts", "accepted_sources", "finishes", "cached_tokens", "lost", "logprobs", "errors", "report", "selected_by_source", "tree_ends", "grown_by_source")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_SOURCES_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SELECTED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    TREE_ENDS_FIELD_NUMBER: _ClassVar[int]
    GROWN_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_counts: _containers.RepeatedScalarFieldContainer[int]
    selected_counts: _containers.RepeatedScalarFieldContainer[int]
    accepted_sources: _containers.RepeatedScalarFieldContainer[int]
    finishes: _containers.RepeatedScalarFieldContainer[Finish]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionError]
    report: _common_pb2.StepReport
    selected_by_source: _containers.RepeatedScalarFieldContainer[int]
    tree_ends: _containers.RepeatedScalarFieldContainer[TreeEnd]
    grown_by_source: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted_counts: _Optional[_Iterable[int]] = ..., selected_counts: _Optional[_Iterable[int]] = ..., accepted_sources: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[Finish, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., report: _Optional[_Union[_common_pb2.StepReport, _Mapping]] = ..., selected_by_source: _Optional[_Iterable[int]] = ..., tree_ends: _Optional[_Iterable[_Union[TreeEnd, str]]] = ..., grown_by_source: _Optional[_Iterable[int]] = ...) -> None: ...
