"""Sessions as coordinators ask for them, what is wrong with those that cannot be, and log probabilities of tokens.

No proto and no grpc here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource
from outrider.kernels.verification.walk import MAX_RATES
from outrider.sampling import SamplingSpec, SpeculationMode, VerificationRule

# The device counts indices in 32 bits.
_MOST_NEW_TOKENS = 1 << 30

SessionKey = tuple[int, int]
"""(coordinator incarnation, session id)."""
WITHOUT_BOUND = (1 << 31) - 2
"""`max_nodes` and `max_depth` of a session whose trees have any size."""
WITHOUT_LIMIT = (1 << 31) - 1
"""`allow` of a session that may run as far as it can."""


class Code(IntEnum):
    """The google.rpc.Code values that faults carry."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13


class SessionFault(Exception):
    """Error of one session; other sessions go on."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """Opens a session, or reopens it under a higher epoch with other committed tokens.

    `weights` is the version that its tokens are chosen with; empty: any.
    `sync_wait_ms` is how long it waits for a tree in sync mode.
    `max_nodes` and `max_depth` bound what one round verifies of its tree.
    `allow` is the length up to which it may run ahead of its client.
    `is_alone` keeps all other sessions out of its rounds.
    `sources` are the kinds of drafter that may grow its tree.
    """

    key: SessionKey
    epoch: int
    prompt: Sequence[int]
    output: Sequence[int]
    sampling: SamplingSpec
    weights: str = ""
    mode: SpeculationMode = SpeculationMode.ASYNC
    sync_wait_ms: int = 0
    max_nodes: int = WITHOUT_BOUND
    max_depth: int = WITHOUT_BOUND
    allow: int = WITHOUT_LIMIT
    is_alone: bool = False
    sources: Collection[GrowthSource] = ALL_SOURCES


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Raw log probabilities of m emitted tokens and their k best alternatives.

    Attributes:
        token_logprobs: [m] float32.
        top_token_ids: [m, k] int64, best first.
        top_logprobs: [m, k] float32.
    """

    token_logprobs: npt.NDArray[np.float32]
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


def check_open(
    request: OpenRequest,
    ids: npt.NDArray[np.int64],
    *,
    vocab_size: int,
    max_model_len: int,
    num_slots: int,
    logprobs: int,
) -> None:
    """Check a session that is to be opened: everything that is wrong whatever the model will say.

    Args:
        request: the session.
        ids: [n] prompt and output in one.
        vocab_size: of the target.
        max_model_len: most tokens that the target takes.
        num_slots: tokens whose KV fits.
        logprobs: most alternatives with log probabilities.

    Raises:
        SessionFault: INVALID_ARGUMENT, with what is wrong and what would do.
    """
    if not request.prompt:
        raise _invalid("prompt: empty, at least one token needed")
    if ids.max() >= vocab_size or ids.min() < 0:
        raise _invalid(f"prompt, output: token ids from 0 to {vocab_size - 1} needed")
    if len(ids) > max_model_len:
        raise _invalid(f"{len(ids)} tokens given, the model takes {max_model_len} (max_model_len)")
    if (fault := fit_fault(len(ids), num_slots)) is not None:
        raise fault
    _check_sampling(request.sampling, vocab_size, logprobs)


def fit_fault(length: int, num_slots: int) -> SessionFault | None:
    """Return the fault of a session of more tokens than there is KV for; None if it fits."""
    if length <= num_slots:
        return None
    return _invalid(
        f"{length} tokens given, the KV cache holds {num_slots}: "
        "raise num_slots, kv_bytes or kv_cache_memory_fraction of the target worker"
    )


def _check_sampling(sampling: SamplingSpec, vocab_size: int, most_logprobs: int) -> None:
    if (fault := sampling.fault(vocab_size)) is not None:
        raise _invalid(f"sampling: {fault}")
    only_stops = set(sampling.allowed_token_ids) <= set(sampling.stop_token_ids)
    if sampling.min_new_tokens and sampling.allowed_token_ids and only_stops:
        raise _invalid("sampling: min_new_tokens leaves no allowed token")
    if sampling.is_synthetic and not all(0 <= rate <= 1 for rate in sampling.synthetic_rates or (-1,)):
        raise _invalid(f"synthetic_rates: {sampling.synthetic_rates} given, at least one needed, each 0 to 1")
    thresholds = (sampling.threshold_single, sampling.threshold_acc)
    if sampling.rule is VerificationRule.TARGET_ONLY and not all(0 < value <= 1 for value in thresholds):
        raise _invalid(f"thresholds: {thresholds} given, above 0 and at most 1 needed")
    bounds = {
        "logprobs": (sampling.logprobs or 0, most_logprobs),
        "synthetic_rates": (len(sampling.synthetic_rates) * sampling.is_synthetic, MAX_RATES),
        "min_new_tokens": (sampling.min_new_tokens, _MOST_NEW_TOKENS),
    }
    for name, (count, most) in bounds.items():
        if count > most:
            raise _invalid(f"sampling: {name}: {count} given, at most {most} needed")


def _invalid(message: str) -> SessionFault:
    return SessionFault(Code.INVALID_ARGUMENT, message)
