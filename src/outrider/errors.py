"""Every error that a user of Outrider can meet.

    OutriderError
    ├── InvalidRequest       the request is wrong; `violations` names every field     INVALID_ARGUMENT
    ├── Overloaded           the queue is full; retry after `retry_after_s`           RESOURCE_EXHAUSTED
    ├── WorkerUnavailable    no target worker can serve this now                      UNAVAILABLE
    │   └── WorkerHung       a step of a worker does not come back: its process has to end  UNAVAILABLE
    ├── WorkerRefused        a worker does not fit this service                       FAILED_PRECONDITION
    ├── Superseded           another stream took the request over, or it was aborted  ABORTED
    │   └── WeightsReplaced  it began with weights that the service does not run with any more  ABORTED
    ├── InternalError        a defect of the service ended this request               INTERNAL
    │   └── PoisonRequest    it crashed two target workers and is not tried again     INTERNAL
    ├── OutOfSlots           a worker has no room now (inside a worker)               RESOURCE_EXHAUSTED
    ├── CommitMismatch       a commit continues another text (inside a draft worker)  FAILED_PRECONDITION
    ├── CheckpointError      a checkpoint folder cannot be served                     FAILED_PRECONDITION
    ├── CorpusError          a file of texts for the n-gram source cannot be read      FAILED_PRECONDITION
    ├── CertificateError     own certificate or key cannot be used                    FAILED_PRECONDITION
    ├── TokenFileError       the coordinator's file of tokens cannot be used           FAILED_PRECONDITION
    ├── MissingPackage       an optional package is not installed                     FAILED_PRECONDITION
    ├── GrammarUnsupported   structured output cannot be had with this tokenizer      FAILED_PRECONDITION
    ├── LoadtestFailed       a load test cannot go on (on the client's side)          FAILED_PRECONDITION
    ├── Unauthenticated      no token or certificate, or one that is not known        UNAUTHENTICATED
    └── Forbidden            the caller is known, and this is not for it              PERMISSION_DENIED

`rpc.py` maps them to gRPC codes in one place.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class OutriderError(Exception):
    """Root of the tree."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field: its path in the request, and what to change.

    Attributes:
        description: what is wrong, and what to give instead.
        code: for programs, where OpenAI's API has a word for it, as `CONTEXT_LENGTH_EXCEEDED`; empty for none.
    """

    field: str
    description: str
    code: str = ""


class InvalidRequest(OutriderError):
    """The request cannot be served as it is; nothing was started."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in self.violations))

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[Sequence[FieldViolation]]]:
        # Pickle would make it anew of its message.
        return type(self), (self.violations,)


class Overloaded(OutriderError):
    """The bounded queue is full."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)

    def __reduce__(self) -> tuple[Callable[..., "Overloaded"], tuple[str]]:
        # Pickle would make it anew of its message alone.
        return functools.partial(type(self), retry_after_s=self.retry_after_s), (str(self),)


class WorkerUnavailable(OutriderError):
    """No worker of the needed role is there, or the last one was lost."""


class WorkerHung(WorkerUnavailable):
    """A step does not come back. The thread that runs it cannot be ended, its process can."""


class WorkerRefused(OutriderError):
    """A worker's model, tokenizer or limits do not fit."""


class Superseded(OutriderError):
    """The request was taken over by another stream or aborted."""


class WeightsReplaced(Superseded):
    """The request began with weights that have been replaced; whoever wants an answer of the new ones asks anew."""


class InternalError(OutriderError):
    """A defect of the service ended this request, and no other."""


class PoisonRequest(InternalError):
    """Two target workers crashed while they verified this request alone; a third is not risked."""


class OutOfSlots(OutriderError):
    """A worker has fewer rows or free slots than were asked for; it may have them later."""


class CommitMismatch(OutriderError):
    """A commit does not continue what a draft worker holds of its session."""


class CheckpointError(OutriderError):
    """A checkpoint folder is missing files, unsafe or of an architecture that is not served."""


class CorpusError(OutriderError):
    """A file of texts for the n-gram source is missing or has a line that is no text."""


class CertificateError(OutriderError):
    """A certificate or key file is missing, damaged, out of date or of another role."""


class TokenFileError(OutriderError):
    """A token file is not one."""


class MissingPackage(OutriderError):
    """An optional package is not installed; the text says how to get it."""


class GrammarUnsupported(OutriderError):
    """The library of structured output is not installed, or a tokenizer cannot be used with it."""


class LoadtestFailed(OutriderError):
    """The load test cannot go on: the service is not there, or a client process has ended."""


class Unauthenticated(OutriderError):
    """The caller has not shown who it is."""


class Forbidden(OutriderError):
    """The caller is known, but may not do this."""
