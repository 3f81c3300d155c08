"""From a failed call's status back to the errors of `outrider.errors`: the inverse of `rpc.status_of`."""

from typing import TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from outrider import errors

_DETAILS_KEY = "grpc-status-details-bin"
_Detail = TypeVar("_Detail", error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
_KINDS: dict[grpc.StatusCode, type[errors.OutriderError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OutriderError,
    grpc.StatusCode.UNAVAILABLE: errors.WorkerUnavailable,
    grpc.StatusCode.FAILED_PRECONDITION: errors.WorkerRefused,
    grpc.StatusCode.ABORTED: errors.Superseded,
    grpc.StatusCode.INTERNAL: errors.InternalError,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
}


def error_of(error: grpc.RpcError) -> errors.OutriderError | TimeoutError:
    """Map a failed call to the error that callers see."""
    # grpc's own errors are calls, too; a bare RpcError has none of this.
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    message: str = getattr(error, "details", lambda: None)() or str(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        found = _detail(error, error_details_pb2.BadRequest()).field_violations
        violations = [errors.FieldViolation(violation.field, violation.description) for violation in found]
        return errors.InvalidRequest(violations or [errors.FieldViolation("request", message)])
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_info = _detail(error, error_details_pb2.RetryInfo())
        if retry_info.HasField("retry_delay"):
            delay = retry_info.retry_delay
            return errors.Overloaded(message, retry_after_s=delay.seconds + delay.nanos / 1e9)
    if was_never_sent(error):
        last = message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        # So a server that talks TLS, or wants a certificate, ends the connection of who does not.
        hint = " (does it talk TLS? --tls-ca)" if last.endswith("Socket closed") else ""
        message = f"cannot connect to the service, is it running (`outrider serve`)?{hint} {last}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimeoutError(f"no end within the timeout: {message}")
    kind = _KINDS.get(code)
    return kind(message) if kind is not None else errors.OutriderError(f"{code.name}: {message}")


def was_answered(error: grpc.RpcError) -> bool:
    """Return True if the service sent this status; False if the stream broke or never opened."""
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    return any(key == _DETAILS_KEY for key, _ in metadata)


def was_never_sent(error: grpc.RpcError) -> bool:
    """Return True if no connection could be made."""
    details: str | None = getattr(error, "details", lambda: None)()
    return (details or "").startswith("failed to connect to all addresses")


def _detail(error: grpc.RpcError, detail: _Detail) -> _Detail:
    """The detail of its kind in a call's status; as it is given where there is none."""
    for key, value in getattr(error, "trailing_metadata", lambda: None)() or ():
        if key == _DETAILS_KEY and any(packed.Unpack(detail) for packed in status_pb2.Status.FromString(value).details):
            break
    return detail
