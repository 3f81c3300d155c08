"""What rounds are asked of sessions, and what they answer (no proto, no grpc)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

from outrider.sampling import SamplingSpec

SessionKey = tuple[int, int]
"""(coordinator incarnation, session id)."""
WITHOUT_BOUND = (1 << 31) - 2
"""`max_nodes` and `max_depth` of a session whose trees have any size."""


class Code(IntEnum):
    """The google.rpc.Code values that faults carry."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13


class SessionFault(Exception):
    """What is wrong with one session; others go on."""

    def __init__(self, code: Code, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(message)


class SpeculationMode(Enum):
    """When a session's trees are verified."""

    ASYNC = "async"
    """Whatever has been grown by the next round."""
    SYNC = "sync"
    """Whole trees, one a round."""
    OFF = "off"
    """Never: every round is a plain step."""


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """Opens a session, or reopens it under a higher epoch with other committed tokens.

    `weights` is the version that its tokens are chosen with; empty: any.
    `sync_wait_ms` is how long it waits for a tree in sync mode.
    `max_nodes` and `max_depth` bound what one round verifies of its tree.
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
