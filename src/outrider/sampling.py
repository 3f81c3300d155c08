"""The rule by which a request's tokens are chosen, as plain data (torch-free), and its form on the wire."""

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from outrider.v1 import common_pb2


class VerificationRule(StrEnum):
    """Verification rule; see the enum of the same name in common.proto."""

    COUPLED = "coupled"
    """One choice a node, with noise that the draft shares; greedy at temperature 0."""
    TARGET_ONLY = "target_only"
    """Coins against the cumulative probability of a node's children."""
    REJECTION = "rejection"
    """min(1, p / q) along a chain."""
    SYNTHETIC = "synthetic"
    """Coins of given rates, whatever was drafted: for benchmarks alone."""


class SpeculationMode(StrEnum):
    """Speculation mode; see the enum of the same name in common.proto."""

    ASYNC = "async"
    """Drafts grow without being asked; a round verifies whatever has been grown by then."""
    SYNC = "sync"
    """One whole tree of fixed size a round."""
    OFF = "off"
    """Never: every round is a plain step."""


RULE_NUMBERS = {
    VerificationRule.COUPLED: common_pb2.VERIFICATION_RULE_COUPLED,
    VerificationRule.TARGET_ONLY: common_pb2.VERIFICATION_RULE_TARGET_ONLY,
    VerificationRule.REJECTION: common_pb2.VERIFICATION_RULE_REJECTION,
    VerificationRule.SYNTHETIC: common_pb2.VERIFICATION_RULE_SYNTHETIC,
}
MODE_NUMBERS = {
    SpeculationMode.ASYNC: common_pb2.SPECULATION_MODE_ASYNC,
    SpeculationMode.SYNC: common_pb2.SPECULATION_MODE_SYNC,
    SpeculationMode.OFF: common_pb2.SPECULATION_MODE_OFF,
}
_RULES = {number: rule for rule, number in RULE_NUMBERS.items()} | {
    common_pb2.VERIFICATION_RULE_UNSPECIFIED: VerificationRule.COUPLED
}
_MODES = {number: mode for mode, number in MODE_NUMBERS.items()} | {
    common_pb2.SPECULATION_MODE_UNSPECIFIED: SpeculationMode.ASYNC
}


def rule_from_proto(number: common_pb2.VerificationRule) -> VerificationRule:
    """Return the rule of this number; ValueError where there is none."""
    if number not in _RULES:
        raise ValueError(f"{number} given, 1 (coupled), 2 (target_only), 3 (rejection) or 4 (synthetic) needed")
    return _RULES[number]


def mode_from_proto(number: common_pb2.SpeculationMode) -> SpeculationMode:
    """Return the mode of this number; ValueError where there is none."""
    if number not in _MODES:
        raise ValueError(f"{number} given, 1 (async), 2 (sync) or 3 (off) needed")
    return _MODES[number]


SCORED_ALONE = "as many as max_new_tokens needed, and nothing beside them that changes or ends the output"
"""Requirement of an output that has only to be scored."""

_MOST_BIAS = 1e4
# What float32 bears, with room to spare; what users may ask for is the coordinator's to say. NaN is in no range.
_RANGES = {
    "temperature": (0.0, 3.5e38),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-30, 1e6),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
}


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """Sampling parameters with every default filled in; see `SamplingState` in common.proto for the meaning of each.

    Applied in this order: penalties, bias, allowed tokens, grammar, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    logprobs: int | None = None
    verification: VerificationRule = VerificationRule.COUPLED
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    synthetic_rates: tuple[float, ...] = ()
    grammar: str = ""
    grammar_end_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()

    @property
    def rule(self) -> VerificationRule:
        """The rule by which choices are made: at temperature 0 there is one choice, whatever was asked for.

        Under the synthetic rule they are the coupled rule's: only what is accepted is decided otherwise.
        """
        chooses = self.temperature > 0 and not self.is_synthetic
        return self.verification if chooses else VerificationRule.COUPLED

    @property
    def is_synthetic(self) -> bool:
        """True if acceptance is drawn from given rates."""
        return self.verification is VerificationRule.SYNTHETIC

    @property
    def has_penalties(self) -> bool:
        """True if a choice depends on counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def bans_stops(self) -> bool:
        """True if stop tokens may not be chosen at first."""
        return self.min_new_tokens > 0 and bool(self.stop_token_ids)

    @property
    def has_processors(self) -> bool:
        """True if anything but a grammar changes the logits before the choice."""
        return bool(self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bans_stops)

    @functools.cached_property
    def reads_logits(self) -> bool:
        """True if anything but the coupled choice reads or changes the logits."""
        changed = self.has_processors or self.grammar
        return bool(self.rule is not VerificationRule.COUPLED or self.logprobs is not None or changed)

    @property
    def is_scored(self) -> bool:
        """True if the output is known: forced tokens alone, as many as there are to be."""
        is_changed = self.has_processors or self.stop_token_ids or self.grammar or self.temperature > 0
        is_whole = len(self.forced_token_ids) == self.max_new_tokens
        return bool(self.forced_token_ids) and is_whole and not (is_changed or self.is_synthetic)

    @functools.cached_property
    def record(self) -> bytes:
        """Parameters of a choice, packed: seed, temperature, top_p, min_p, top_k, choice_index as `<Qfffii4x`.

        A step reads it for every session: made once, it costs a step a tenth of six columns made value by value.
        """
        top_k = min(max(self.top_k, -1), (1 << 31) - 1)
        numbers = (self.seed & (1 << 64) - 1, self.temperature, self.top_p, self.min_p, top_k, self.choice_index)
        return struct.pack("<Qfffii4x", *numbers)

    def fault(self, vocab_size: int | None) -> str | None:
        """Return why no valid request could have these values, for a worker to refuse; None if one could.

        A number that is none would become everyone's who shares the step.

        Args:
            vocab_size: of the target's model; None does not look at token ids, of which a draft may know fewer.
        """
        named = (
            *self.allowed_token_ids,
            *self.stop_token_ids,
            *self.logit_bias,
            *self.grammar_end_ids,
            *self.forced_token_ids,
        )
        if vocab_size is not None and named and not 0 <= min(named) <= max(named) < vocab_size:
            return f"token ids from 0 to {vocab_size - 1} needed"
        if self.grammar and not self.grammar_end_ids:
            return "grammar_end_ids: empty, at least one needed with a grammar"
        if not 0 <= self.choice_index < 1 << 31:
            return f"choice_index: {self.choice_index} given, 0 to {(1 << 31) - 1} needed"
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                return f"{name}: {value:g} given, {low:g} to {high:g} needed"
        if not all(abs(value) <= _MOST_BIAS for value in self.logit_bias.values()):
            return f"logit_bias: {-_MOST_BIAS:g} to {_MOST_BIAS:g} needed"
        return None if self.is_scored or not self.forced_token_ids else f"forced_token_ids: {SCORED_ALONE}"

    def to_proto(self) -> common_pb2.SamplingState:
        """The message that opens a session at a worker."""
        values: dict[str, Any] = {own.name: getattr(self, own.name) for own in fields(self)}
        values["verification"] = RULE_NUMBERS[self.verification]
        return common_pb2.SamplingState(**values)

    @classmethod
    def from_proto(cls, state: common_pb2.SamplingState) -> "SamplingSpec":
        """Invert `to_proto` (floats rounded to float32 on the way); ValueError for a rule that is not known."""
        values: dict[str, Any] = {
            own.name: tuple(value) if isinstance(own.default, tuple) else value
            for own in fields(cls)
            for value in (getattr(state, own.name),)
        }
        values["logit_bias"] = dict(state.logit_bias)
        values["logprobs"] = state.logprobs if state.HasField("logprobs") else None
        values["verification"] = rule_from_proto(state.verification)
        return cls(**values)
