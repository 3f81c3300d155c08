from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import registry_pb2 as _registry_pb2
from outrider.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling_params", "speculation", "received", "trace", "record_tree", "weights")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    RECORD_TREE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling_params: SamplingParams
    speculation: SpeculationParams
    received: _containers.RepeatedCompositeFieldContainer[Received]
    trace: bool
    record_tree: bool
    weights: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., received: _Optional[_Iterable[_Union[Received, _Mapping]]] = ..., trace: bool = ..., record_tree: bool = ..., weights: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("index", "token_ids", "text_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_bytes: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text_bytes: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "seed", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "structured_outputs", "forced_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    logprobs: int
    structured_outputs: _common_pb2.StructuredOutputs
    forced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., structured_outputs: _Optional[_Union[_common_pb2.StructuredOutputs, _Mapping]] = ..., forced_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("mode", "max_nodes", "max_depth", "verification", "threshold_single", "threshold_acc", "synthetic_rates", "sources")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_SINGLE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_ACC_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_RATES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.SpeculationMode
    max_nodes: int
    max_depth: int
    verification: _common_pb2.VerificationRule
    threshold_single: float
    threshold_acc: float
    synthetic_rates: _containers.RepeatedScalarFieldContainer[float]
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.GrowthSource]
    def __init__(self, mode: _Optional[_Union[_common_pb2.SpeculationMode, str]] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., verification: _Optional[_Union[_common_pb2.VerificationRule, str]] = ..., threshold_single: _Optional[float] = ..., threshold_acc: _Optional[float] = ..., synthetic_rates: _Optional[_Iterable[float]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.GrowthSource, str]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "round", "tree")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    round: Round
    tree: TreeLines
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., tree: _Optional[_Union[TreeLines, _Mapping]] = ...) -> None: ...

class TreeLines(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "token_ids", "text", "offset", "text_offset", "logprobs", "weights")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    offset: int
    text_offset: int
    logprobs: _target_pb2.Logprobs
    weights: str
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., offset: _Optional[int] = ..., text_offset: _Optional[int] = ..., logprobs: _Optional[_Union[_target_pb2.Logprobs, _Mapping]] = ..., weights: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("choices", "usage", "speculation", "timings", "weights")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    usage: Usage
    speculation: SpeculationStats
    timings: Timings
    weights: str
    def __init__(self, choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., weights: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "finish_reason", "stop_token_id", "stop_string", "completion_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: FinishReason
    stop_token_id: int
    stop_string: str
    completion_tokens: int
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("verify_steps", "spec_draft_tokens", "spec_accepted_tokens", "acceptance_length", "sources")
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEC_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    verify_steps: int
    spec_draft_tokens: int
    spec_accepted_tokens: int
    acceptance_length: float
    sources: _containers.RepeatedCompositeFieldContainer[SourceStats]
    def __init__(self, verify_steps: _Optional[int] = ..., spec_draft_tokens: _Optional[int] = ..., spec_accepted_tokens: _Optional[int] = ..., acceptance_length: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[SourceStats, _Mapping]]] = ...) -> None: ...

class SourceStats(_message.Message):
    __slots__ = ("source", "drafted_tokens", "submitted_tokens", "accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.GrowthSource
    drafted_tokens: int
    submitted_tokens: int
    accepted_tokens: int
    def __init__(self, source: _Optional[_Union[_common_pb2.GrowthSource, str]] = ..., drafted_tokens: _Optional[int] = ..., submitted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "ttft_ms", "tpot_ms", "total_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("index", "step", "length", "result_ns", "step_ns", "forward_ns", "selected", "accepted", "emitted_token_ids", "growth")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    RESULT_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    index: int
    step: int
    length: int
    result_ns: int
    step_ns: int
    forward_ns: int
    selected: int
    accepted: int
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    growth: _containers.RepeatedCompositeFieldContainer[GrowthArrival]
    def __init__(self, index: _Optional[int] = ..., step: _Optional[int] = ..., length: _Optional[int] = ..., result_ns: _Optional[int] = ..., step_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., selected: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted_token_ids: _Optional[_Iterable[int]] = ..., growth: _Optional[_Iterable[_Union[GrowthArrival, _Mapping]]] = ...) -> None: ...

class GrowthArrival(_message.Message):
    __slots__ = ("worker_id", "arrived_ns", "as_of", "nodes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    arrived_ns: int
    as_of: int
    nodes: int
    def __init__(self, worker_id: _Optional[str] = ..., arrived_ns: _Optional[int] = ..., as_of: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "max_new_tokens_default")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    max_new_tokens_default: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_new_tokens_default: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("incarnation", "version", "uptime_s", "running_sessions", "waiting_requests", "workers", "requests_total", "emitted_tokens_total", "speculation", "dropped_nodes_total", "steps_total", "refused_total", "draft_demand", "weights", "address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_NODES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DEMAND_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: str
    uptime_s: float
    running_sessions: int
    waiting_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    requests_total: int
    emitted_tokens_total: int
    speculation: SpeculationStats
    dropped_nodes_total: int
    steps_total: int
    refused_total: int
    draft_demand: DraftDemand
    weights: _common_pb2.Weights
    address: str
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., running_sessions: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., requests_total: _Optional[int] = ..., emitted_tokens_total: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., dropped_nodes_total: _Optional[int] = ..., steps_total: _Optional[int] = ..., refused_total: _Optional[int] = ..., draft_demand: _Optional[_Union[DraftDemand, _Mapping]] = ..., weights: _Optional[_Union[_common_pb2.Weights, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class DraftDemand(_message.Message):
    __slots__ = ("sessions", "undrafted_sessions", "rounds_total", "tokens_total", "missed_rounds_total", "starved_rounds_total", "target_ns_total", "plain_ns_total", "draft_steps_total", "draft_ns_total", "grown_sessions_total", "expanded_nodes_total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISSED_ROUNDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STARVED_ROUNDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_NS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PLAIN_NS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GROWN_SESSIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXPANDED_NODES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    undrafted_sessions: int
    rounds_total: int
    tokens_total: int
    missed_rounds_total: int
    starved_rounds_total: int
    target_ns_total: int
    plain_ns_total: int
    draft_steps_total: int
    draft_ns_total: int
    grown_sessions_total: int
    expanded_nodes_total: int
    def __init__(self, sessions: _Optional[int] = ..., undrafted_sessions: _Optional[int] = ..., rounds_total: _Optional[int] = ..., tokens_total: _Optional[int] = ..., missed_rounds_total: _Optional[int] = ..., starved_rounds_total: _Optional[int] = ..., target_ns_total: _Optional[int] = ..., plain_ns_total: _Optional[int] = ..., draft_steps_total: _Optional[int] = ..., draft_ns_total: _Optional[int] = ..., grown_sessions_total: _Optional[int] = ..., expanded_nodes_total: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("introduction", "load", "state", "lease_age_ms")
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    introduction: _registry_pb2.WorkerIntroduction
    load: _common_pb2.WorkerLoad
    state: str
    lease_age_ms: float
    def __init__(self, introduction: _Optional[_Union[_registry_pb2.WorkerIntroduction, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., state: _Optional[str] = ..., lease_age_ms: _Optional[float] = ...) -> None: ...
