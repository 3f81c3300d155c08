"""Every error that a user of Outrider can meet.

    OutriderError
    ├── InvalidRequest       the request is wrong; `violations` names every field     INVALID_ARGUMENT
    ├── Overloaded           the queue is full; retry after `retry_after_s`           RESOURCE_EXHAUSTED
    ├── WorkerUnavailable    no target worker can serve this now                      UNAVAILABLE
    ├── WorkerRefused        a worker does not fit this service                       FAILED_PRECONDITION
    ├── Superseded           another stream took the request over, or it was aborted  ABORTED
    ├── OutOfSlots           the KV cache has no room (inside a worker)               RESOURCE_EXHAUSTED
    └── CheckpointError      a checkpoint folder cannot be served                     FAILED_PRECONDITION

`rpc.py` maps them to gRPC codes in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class OutriderError(Exception):
    """Root of the tree."""


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field: its path in the request, and what to change."""

    field: str
    description: str


class InvalidRequest(OutriderError):
    """The request cannot be served as it is; nothing was started."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in self.violations))


class Overloaded(OutriderError):
    """The bounded queue is full."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class WorkerUnavailable(OutriderError):
    """No worker of the needed role is there, or the last one was lost."""


class WorkerRefused(OutriderError):
    """A worker's model, tokenizer or limits do not fit."""


class Superseded(OutriderError):
    """The request was taken over by another stream or aborted."""


class OutOfSlots(OutriderError):
    """The KV cache has fewer free slots than were asked for."""


class CheckpointError(OutriderError):
    """A checkpoint folder is missing files, unsafe or of an architecture that is not served."""
