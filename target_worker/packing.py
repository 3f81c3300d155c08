"""Parts of a target's messages that every one of its services packs."""

from dataclasses import dataclass

from outrider.target_worker.sessions import SessionFault, TokenLogprobs
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_to_bytes


@dataclass(frozen=True, kw_only=True)
class Load:
    """Fill of a target.

    Attributes:
        sessions: open.
        slots_used, slots_cached, slots_total: KV slots of sessions, those that are remembered, and all.
        steps: since start.
        busy: share of the time since the last report that steps took.
        step_age_s: how long the step that runs has been running, in reports alone.
        is_preparing: whether it may be compiling, likewise.
    """

    sessions: int = 0
    slots_used: int = 0
    slots_cached: int = 0
    slots_total: int = 0
    steps: int = 0
    busy: float = 0.0
    step_age_s: float = 0.0
    is_preparing: bool = False


def pack_load(load: Load) -> common_pb2.WorkerLoad:
    """Return a load as it travels."""
    return common_pb2.WorkerLoad(
        sessions=load.sessions,
        slots_used=load.slots_used,
        slots_cached=load.slots_cached,
        slots_total=load.slots_total,
        steps=load.steps,
        busy=load.busy,
        step_age_ms=int(1e3 * load.step_age_s),
        preparing=load.is_preparing,
    )


def session_error(session_id: int, epoch: int, fault: SessionFault) -> common_pb2.SessionError:
    """Return a fault as it travels."""
    return common_pb2.SessionError(session_id=session_id, epoch=epoch, code=int(fault.code), message=fault.message)


def pack_logprobs(row: int, logprobs: TokenLogprobs) -> target_pb2.Logprobs:
    """Return log probabilities as they travel, of the session at index `row` of the message."""
    return target_pb2.Logprobs(
        row=row,
        token_logprobs=floats_to_bytes(logprobs.token_logprobs),
        top_count=logprobs.top_token_ids.shape[1],
        top_token_ids=logprobs.top_token_ids.ravel().tolist(),
        top_logprobs=floats_to_bytes(logprobs.top_logprobs),
    )
