"""A session as its coordinator opens it, and what is asked of its tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.errors import CommitMismatch, FieldViolation, InvalidRequest
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule
from outrider.wire import MOST_NODES

Key = tuple[int, int]
"""A session's name in its worker: the coordinator's incarnation and the session id."""


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """Bounds of one session's tree, 1 at least; see `SpeculationLimits` in common.proto."""

    mode: SpeculationMode = SpeculationMode.ASYNC
    max_live_nodes: int = MOST_NODES
    max_depth: int = 16
    sync_nodes: int = 24


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """The opening of a session.

    Attributes:
        key: see `Key`.
        owner: receives the session's growth; opaque here.
        epoch: counts the opens of this session.
        prompt: token ids, at least one.
        output: tokens committed so far.
        sampling: parameters of the request.
        limits: bounds of its tree.
        sources: drafters of the worker that may grow it.
        is_shared: whether two drafters grow it; the model answers its commits then.
    """

    key: Key
    owner: Any
    epoch: int
    prompt: Sequence[int]
    output: Sequence[int]
    sampling: SamplingSpec
    limits: GrowthLimits
    sources: Collection[GrowthSource] = ALL_SOURCES
    is_shared: bool = False

    @property
    def is_sync(self) -> bool:
        """True if the session grows one tree a round."""
        return self.limits.mode is SpeculationMode.SYNC

    def end(self, max_model_len: int) -> int:
        """Length at which the session ends, in tokens of prompt and output."""
        return min(len(self.prompt) + self.sampling.max_new_tokens, max_model_len)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens whose nodes have no children."""
        if self.sampling.rule is VerificationRule.REJECTION:
            # A chain's length decides what is verified, so it must not depend on the chain's tokens.
            return frozenset()
        return frozenset(self.sampling.stop_token_ids)


def check_start(start: SessionStart, *, vocab_size: int, max_model_len: int) -> None:
    """Check the tokens and the sampling parameters of a session that is to be opened.

    Raises:
        InvalidRequest: token ids or lengths that the model does not take, with every field that is wrong.
    """
    length = len(start.prompt) + len(start.output)
    violations = []
    if not start.prompt:
        violations.append(FieldViolation("prompt", "empty, at least one token needed"))
    if length > max_model_len:
        violations.append(
            FieldViolation("prompt", f"{length} tokens with the output given, at most {max_model_len} fit")
        )
    highest = max((*start.prompt, *start.output), default=0)
    if highest >= vocab_size:
        violations.append(FieldViolation("prompt", f"token {highest} given, ids below {vocab_size} needed"))
    if (fault := start.sampling.fault(None)) is not None:
        violations.append(FieldViolation("sampling", fault))
    if violations:
        raise InvalidRequest(violations)


def new_tokens(held: Sequence[int], position: int, token_ids: Sequence[int], *, vocab_size: int) -> Sequence[int]:
    """Return the part of a commit that the session does not have yet.

    Args:
        held: the session's committed tokens.
        position: committed length before the commit's tokens.
        token_ids: tokens of the commit.
        vocab_size: ids of the draft's vocabulary; the target's may be padded wider.

    Raises:
        InvalidRequest: a token outside the vocabulary.
        CommitMismatch: tokens are missing before `position`, or differ from what was committed.
    """
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        violation = FieldViolation("tokens", f"token {highest} given, ids below {vocab_size} needed")
        raise InvalidRequest([violation])
    known = len(held) - position
    if known < 0:
        raise CommitMismatch(f"commit at {position}, but only {len(held)} tokens are known")
    if known and list(token_ids[:known]) != list(held[position : position + len(token_ids)]):
        raise CommitMismatch(f"commit at {position} differs from what was committed there")
    return token_ids[known:] if known else token_ids
