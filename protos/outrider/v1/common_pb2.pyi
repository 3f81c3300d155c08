from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_ASYNC: _ClassVar[SpeculationMode]
    SPECULATION_MODE_SYNC: _ClassVar[SpeculationMode]
    SPECULATION_MODE_OFF: _ClassVar[SpeculationMode]

class GrowthSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROWTH_SOURCE_UNSPECIFIED: _ClassVar[GrowthSource]
    GROWTH_SOURCE_MODEL: _ClassVar[GrowthSource]
    GROWTH_SOURCE_NGRAM: _ClassVar[GrowthSource]
    GROWTH_SOURCE_EAGLE: _ClassVar[GrowthSource]

class VerificationRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_RULE_UNSPECIFIED: _ClassVar[VerificationRule]
    VERIFICATION_RULE_COUPLED: _ClassVar[VerificationRule]
    VERIFICATION_RULE_TARGET_ONLY: _ClassVar[VerificationRule]
    VERIFICATION_RULE_REJECTION: _ClassVar[VerificationRule]
    VERIFICATION_RULE_SYNTHETIC: _ClassVar[VerificationRule]
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_ASYNC: SpeculationMode
SPECULATION_MODE_SYNC: SpeculationMode
SPECULATION_MODE_OFF: SpeculationMode
GROWTH_SOURCE_UNSPECIFIED: GrowthSource
GROWTH_SOURCE_MODEL: GrowthSource
GROWTH_SOURCE_NGRAM: GrowthSource
GROWTH_SOURCE_EAGLE: GrowthSource
VERIFICATION_RULE_UNSPECIFIED: VerificationRule
VERIFICATION_RULE_COUPLED: VerificationRule
VERIFICATION_RULE_TARGET_ONLY: VerificationRule
VERIFICATION_RULE_REJECTION: VerificationRule
VERIFICATION_RULE_SYNTHETIC: VerificationRule

class ModelInfo(_message.Message):
    __slots__ = ("name", "vocab_size", "tokenizer_hash", "dtype", "max_model_len", "eos_token_ids", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    tokenizer_hash: str
    dtype: str
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: Weights
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version", "path", "reloads")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    version: str
    path: str
    reloads: int
    def __init__(self, version: _Optional[str] = ..., path: _Optional[str] = ..., reloads: _Optional[int] = ...) -> None: ...

class SamplingState(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "seed", "choice_index", "stop_token_ids", "max_new_tokens", "min_new_tokens", "logprobs", "verification", "threshold_single", "threshold_acc", "synthetic_rates", "grammar", "grammar_end_ids", "forced_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_SINGLE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_ACC_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_RATES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_END_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    choice_index: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    min_new_tokens: int
    logprobs: int
    verification: VerificationRule
    threshold_single: float
    threshold_acc: float
    synthetic_rates: _containers.RepeatedScalarFieldContainer[float]
    grammar: str
    grammar_end_ids: _containers.RepeatedScalarFieldContainer[int]
    forced_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., verification: _Optional[_Union[VerificationRule, str]] = ..., threshold_single: _Optional[float] = ..., threshold_acc: _Optional[float] = ..., synthetic_rates: _Optional[_Iterable[float]] = ..., grammar: _Optional[str] = ..., grammar_end_ids: _Optional[_Iterable[int]] = ..., forced_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ADDITIONAL_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    json: str
    regex: str
    choice: ChoiceList
    grammar: str
    json_object: bool
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str
    def __init__(self, json: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[ChoiceList, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: bool = ..., disable_any_whitespace: bool = ..., disable_additional_properties: bool = ..., whitespace_pattern: _Optional[str] = ...) -> None: ...

class ChoiceList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class DraftDistributions(_message.Message):
    __slots__ = ("counts", "token_ids", "weights")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    weights: bytes
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class SpeculationLimits(_message.Message):
    __slots__ = ("mode", "max_live_nodes", "max_depth", "max_nodes", "sync_wait_ms")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_LIVE_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SYNC_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationMode
    max_live_nodes: int
    max_depth: int
    max_nodes: int
    sync_wait_ms: int
    def __init__(self, mode: _Optional[_Union[SpeculationMode, str]] = ..., max_live_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_nodes: _Optional[int] = ..., sync_wait_ms: _Optional[int] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("session_id", "epoch", "prompt", "output", "sampling", "limits", "sources", "traceparent", "weights")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    prompt: bytes
    output: bytes
    sampling: SamplingState
    limits: SpeculationLimits
    sources: _containers.RepeatedScalarFieldContainer[GrowthSource]
    traceparent: str
    weights: str
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., prompt: _Optional[bytes] = ..., output: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingState, _Mapping]] = ..., limits: _Optional[_Union[SpeculationLimits, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[GrowthSource, str]]] = ..., traceparent: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step_ns", "forward_ns", "plain_ns", "steps")
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    step_ns: int
    forward_ns: int
    plain_ns: int
    steps: int
    def __init__(self, step_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., plain_ns: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("sessions", "slots_used", "slots_total", "steps", "busy", "slots_cached", "calibration", "step_age_ms", "preparing", "coordinators", "weights")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_CACHED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    slots_used: int
    slots_total: int
    steps: int
    busy: float
    slots_cached: int
    calibration: CalibrationReport
    step_age_ms: int
    preparing: bool
    coordinators: int
    weights: Weights
    def __init__(self, sessions: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., steps: _Optional[int] = ..., busy: _Optional[float] = ..., slots_cached: _Optional[int] = ..., calibration: _Optional[_Union[CalibrationReport, _Mapping]] = ..., step_age_ms: _Optional[int] = ..., preparing: bool = ..., coordinators: _Optional[int] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class CalibrationReport(_message.Message):
    __slots__ = ("edges", "rules")
    EDGES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    edges: bytes
    rules: _containers.RepeatedCompositeFieldContainer[RuleReliability]
    def __init__(self, edges: _Optional[bytes] = ..., rules: _Optional[_Iterable[_Union[RuleReliability, _Mapping]]] = ...) -> None: ...

class RuleReliability(_message.Message):
    __slots__ = ("rule", "children", "predicted", "hits", "source")
    RULE_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    rule: str
    children: _containers.RepeatedScalarFieldContainer[int]
    predicted: bytes
    hits: _containers.RepeatedScalarFieldContainer[int]
    source: GrowthSource
    def __init__(self, rule: _Optional[str] = ..., children: _Optional[_Iterable[int]] = ..., predicted: _Optional[bytes] = ..., hits: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[GrowthSource, str]] = ...) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("session_id", "epoch", "code", "message")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    code: int
    message: str
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
