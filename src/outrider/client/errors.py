"""From a failed call's status back to the errors of `outrider.errors`: the inverse of `rpc.status_of`."""

import grpc
from google.rpc import error_details_pb2, status_pb2

from outrider import errors

_DETAILS_KEY = "grpc-status-details-bin"
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
    """What a call's failure means to a user."""
    # grpc's own errors are calls, too; a bare RpcError has none of this.
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    message: str = getattr(error, "details", lambda: None)() or str(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return errors.InvalidRequest(_violations(error) or [errors.FieldViolation("request", message)])
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = _retry_after_s(error)
        if retry_after_s is not None:
            return errors.Overloaded(message, retry_after_s=retry_after_s)
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
    """Whether the service itself has said so; otherwise the stream broke, or never was one."""
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    return any(key == _DETAILS_KEY for key, _ in metadata)


def was_never_sent(error: grpc.RpcError) -> bool:
    """Whether nobody could be connected to."""
    details: str | None = getattr(error, "details", lambda: None)()
    return (details or "").startswith("failed to connect to all addresses")


def _violations(error: grpc.RpcError) -> list[errors.FieldViolation]:
    bad_request = error_details_pb2.BadRequest()
    _unpack_detail(error, bad_request)
    return [errors.FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations]


def _retry_after_s(error: grpc.RpcError) -> float | None:
    retry_info = error_details_pb2.RetryInfo()
    if not _unpack_detail(error, retry_info):
        return None
    return retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9


def _unpack_detail(error: grpc.RpcError, into: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> bool:
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            return any(detail.Unpack(into) for detail in status.details)
    return False
