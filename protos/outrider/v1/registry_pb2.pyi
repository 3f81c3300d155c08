from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InFlight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_UNSPECIFIED: _ClassVar[InFlight]
    IN_FLIGHT_FINISH: _ClassVar[InFlight]
    IN_FLIGHT_ABORT: _ClassVar[InFlight]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_DRAFT: _ClassVar[WorkerRole]
    WORKER_ROLE_TARGET: _ClassVar[WorkerRole]
IN_FLIGHT_UNSPECIFIED: InFlight
IN_FLIGHT_FINISH: InFlight
IN_FLIGHT_ABORT: InFlight
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_DRAFT: WorkerRole
WORKER_ROLE_TARGET: WorkerRole

class ReloadCommand(_message.Message):
    __slots__ = ("check", "hold", "swap")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    check: ReloadCheck
    hold: ReloadHold
    swap: ReloadSwap
    def __init__(self, check: _Optional[_Union[ReloadCheck, _Mapping]] = ..., hold: _Optional[_Union[ReloadHold, _Mapping]] = ..., swap: _Optional[_Union[ReloadSwap, _Mapping]] = ...) -> None: ...

class ReloadCheck(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ReloadHold(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: InFlight
    def __init__(self, in_flight: _Optional[_Union[InFlight, str]] = ...) -> None: ...

class ReloadSwap(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _common_pb2.Weights
    def __init__(self, weights: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ...) -> None: ...

class ReloadReport(_message.Message):
    __slots__ = ("running", "targets", "aborted")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    running: int
    targets: TargetReports
    aborted: int
    def __init__(self, running: _Optional[int] = ..., targets: _Optional[_Union[TargetReports, _Mapping]] = ..., aborted: _Optional[int] = ...) -> None: ...

class TargetReports(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[TargetReport]
    def __init__(self, targets: _Optional[_Iterable[_Union[TargetReport, _Mapping]]] = ...) -> None: ...

class TargetReport(_message.Message):
    __slots__ = ("worker_id", "name", "address", "found", "running", "error", "swap_ns")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SWAP_NS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    name: str
    address: str
    found: _common_pb2.Weights
    running: _common_pb2.Weights
    error: str
    swap_ns: int
    def __init__(self, worker_id: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., found: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ..., running: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ..., error: _Optional[str] = ..., swap_ns: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("introduction", "load", "draining")
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    introduction: WorkerIntroduction
    load: _common_pb2.WorkerLoad
    draining: bool
    def __init__(self, introduction: _Optional[_Union[WorkerIntroduction, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., draining: bool = ...) -> None: ...

class WorkerIntroduction(_message.Message):
    __slots__ = ("worker_id", "role", "address", "model", "limits", "version", "name", "sources", "wire_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    address: str
    model: _common_pb2.ModelInfo
    limits: WorkerLimits
    version: str
    name: str
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.GrowthSource]
    wire_version: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., limits: _Optional[_Union[WorkerLimits, _Mapping]] = ..., version: _Optional[str] = ..., name: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.GrowthSource, str]]] = ..., wire_version: _Optional[int] = ...) -> None: ...

class WorkerLimits(_message.Message):
    __slots__ = ("max_sessions",)
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    def __init__(self, max_sessions: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("incarnation", "heartbeat_interval_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    heartbeat_interval_ms: int
    def __init__(self, incarnation: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ...) -> None: ...
