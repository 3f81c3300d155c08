from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_DEFERRED: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
    OUTCOME_ENDED: _ClassVar[Outcome]

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
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_DEFERRED: Outcome
OUTCOME_ERROR: Outcome
OUTCOME_ENDED: Outcome
PLACE_CHANGE_UNSPECIFIED: PlaceChange
PLACE_CHANGE_TAKEN: PlaceChange
PLACE_CHANGE_LEFT: PlaceChange
PLACE_CHANGE_RESENT: PlaceChange
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish

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

class VerifyRequest(_message.Message):
    __slots__ = ("incarnation", "step", "opens", "close_session_ids", "close_epochs", "trees", "addition")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    ADDITION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionOpen]
    close_session_ids: _containers.RepeatedScalarFieldContainer[int]
    close_epochs: _containers.RepeatedScalarFieldContainer[int]
    trees: TreeBatch
    addition: TreeAddition
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[_common_pb2.SessionOpen, _Mapping]]] = ..., close_session_ids: _Optional[_Iterable[int]] = ..., close_epochs: _Optional[_Iterable[int]] = ..., trees: _Optional[_Union[TreeBatch, _Mapping]] = ..., addition: _Optional[_Union[TreeAddition, _Mapping]] = ...) -> None: ...

class TreeAddition(_message.Message):
    __slots__ = ("step", "node_counts", "tokens", "parents", "values")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    node_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, step: _Optional[int] = ..., node_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class TreeBatch(_message.Message):
    __slots__ = ("session_ids", "epochs", "lengths", "node_counts", "tokens", "parents", "distributions", "resident", "follows", "values", "least_value", "max_nodes", "max_depths", "max_total_nodes")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LEAST_VALUE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_NODES_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    node_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    distributions: _common_pb2.DraftDistributions
    resident: _containers.RepeatedScalarFieldContainer[bool]
    follows: int
    values: bytes
    least_value: float
    max_nodes: _containers.RepeatedScalarFieldContainer[int]
    max_depths: _containers.RepeatedScalarFieldContainer[int]
    max_total_nodes: int
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., node_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., distributions: _Optional[_Union[_common_pb2.DraftDistributions, _Mapping]] = ..., resident: _Optional[_Iterable[bool]] = ..., follows: _Optional[int] = ..., values: _Optional[bytes] = ..., least_value: _Optional[float] = ..., max_nodes: _Optional[_Iterable[int]] = ..., max_depths: _Optional[_Iterable[int]] = ..., max_total_nodes: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("step", "session_ids", "epochs", "outcomes", "accepted_counts", "accepted_nodes", "token_counts", "tokens", "logprobs", "errors", "report", "load", "cached_tokens", "growth", "drafted_counts", "verified_counts", "ahead_ns", "additions")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_NS_FIELD_NUMBER: _ClassVar[int]
    ADDITIONS_FIELD_NUMBER: _ClassVar[int]
    step: int
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    accepted_counts: _containers.RepeatedScalarFieldContainer[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionError]
    report: _common_pb2.StepReport
    load: _common_pb2.WorkerLoad
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    growth: _draft_pb2.DraftGrowth
    drafted_counts: _containers.RepeatedScalarFieldContainer[int]
    verified_counts: _containers.RepeatedScalarFieldContainer[int]
    ahead_ns: int
    additions: int
    def __init__(self, step: _Optional[int] = ..., session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., accepted_counts: _Optional[_Iterable[int]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., report: _Optional[_Union[_common_pb2.StepReport, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., growth: _Optional[_Union[_draft_pb2.DraftGrowth, _Mapping]] = ..., drafted_counts: _Optional[_Iterable[int]] = ..., verified_counts: _Optional[_Iterable[int]] = ..., ahead_ns: _Optional[int] = ..., additions: _Optional[int] = ...) -> None: ...

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
    node_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    acceptance: bytes
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.GrowthSource]
    distributions: _common_pb2.DraftDistributions
    complete: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., as_of: _Optional[_Iterable[int]] = ..., node_counts: _Optional[_Iterable[int]] = ..., node_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., acceptance: _Optional[bytes] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.GrowthSource, str]]] = ..., distributions: _Optional[_Union[_common_pb2.DraftDistributions, _Mapping]] = ..., complete: _Optional[_Iterable[bool]] = ...) -> None: ...

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
    __slots__ = ("session_ids", "epochs", "token_counts", "tokens", "accepted_counts", "selected_counts", "accepted_sources", "finishes", "cached_tokens", "lost", "logprobs", "errors", "report", "load")
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
    LOAD_FIELD_NUMBER: _ClassVar[int]
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
    load: _common_pb2.WorkerLoad
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted_counts: _Optional[_Iterable[int]] = ..., selected_counts: _Optional[_Iterable[int]] = ..., accepted_sources: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[Finish, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., report: _Optional[_Union[_common_pb2.StepReport, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...
