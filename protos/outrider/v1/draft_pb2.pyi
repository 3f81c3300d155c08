from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftCommands(_message.Message):
    __slots__ = ("incarnation", "opens", "commits", "close_session_ids", "close_epochs", "resend_session_ids", "resend_epochs")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    RESEND_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    RESEND_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    opens: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionOpen]
    commits: CommitBatch
    close_session_ids: _containers.RepeatedScalarFieldContainer[int]
    close_epochs: _containers.RepeatedScalarFieldContainer[int]
    resend_session_ids: _containers.RepeatedScalarFieldContainer[int]
    resend_epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[_common_pb2.SessionOpen, _Mapping]]] = ..., commits: _Optional[_Union[CommitBatch, _Mapping]] = ..., close_session_ids: _Optional[_Iterable[int]] = ..., close_epochs: _Optional[_Iterable[int]] = ..., resend_session_ids: _Optional[_Iterable[int]] = ..., resend_epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("session_ids", "epochs", "positions", "token_counts", "tokens")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftGrowth(_message.Message):
    __slots__ = ("session_ids", "epochs", "as_of", "node_counts", "node_ids", "parents", "tokens", "acceptance", "complete", "errors", "report", "distributions", "source", "forgot", "again")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    NODE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FORGOT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    as_of: _containers.RepeatedScalarFieldContainer[int]
    node_counts: _containers.RepeatedScalarFieldContainer[int]
    node_ids: bytes
    parents: bytes
    tokens: bytes
    acceptance: bytes
    complete: _containers.RepeatedScalarFieldContainer[bool]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SessionError]
    report: _common_pb2.StepReport
    distributions: _common_pb2.DraftDistributions
    source: _common_pb2.GrowthSource
    forgot: _containers.RepeatedScalarFieldContainer[bool]
    again: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., as_of: _Optional[_Iterable[int]] = ..., node_counts: _Optional[_Iterable[int]] = ..., node_ids: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., acceptance: _Optional[bytes] = ..., complete: _Optional[_Iterable[bool]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SessionError, _Mapping]]] = ..., report: _Optional[_Union[_common_pb2.StepReport, _Mapping]] = ..., distributions: _Optional[_Union[_common_pb2.DraftDistributions, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.GrowthSource, str]] = ..., forgot: _Optional[_Iterable[bool]] = ..., again: _Optional[_Iterable[bool]] = ...) -> None: ...
