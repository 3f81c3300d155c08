"""TargetService as the thread of the rounds sees it: unpacks commands, packs results. The front process speaks gRPC."""

import asyncio
import logging
from collections.abc import Sequence

from outrider.errors import InternalError, InvalidRequest, OutriderError
from outrider.front.calls import Call, SessionStream
from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.verification.walk import Finish
from outrider.request_decoding import decode
from outrider.target_worker.rounds.commands import Command, HoldCommand, LeaveCommand, Load, RoundCost
from outrider.target_worker.rounds.reload import Reloader
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.rounds.thread import RoundThread
from outrider.target_worker.sessions.requests import SessionFault, TokenLogprobs
from outrider.target_worker.sessions.unpacking import unpack
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_to_bytes

logger = logging.getLogger(__name__)

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

_FINISHES = {
    Finish.NONE: target_pb2.FINISH_UNSPECIFIED,
    Finish.STOP: target_pb2.FINISH_STOP,
    Finish.LENGTH: target_pb2.FINISH_LENGTH,
    # Told as an error.
    Finish.FAULT: target_pb2.FINISH_UNSPECIFIED,
}
_TREE_ENDS = {
    TreeEnd.NONE: target_pb2.TREE_END_UNSPECIFIED,
    TreeEnd.COVERED: target_pb2.TREE_END_COVERED,
    TreeEnd.MISSED: target_pb2.TREE_END_MISSED,
    TreeEnd.STARVED: target_pb2.TREE_END_STARVED,
}


class TargetStream(SessionStream[Command]):
    """A coordinator's stream of `Verify` as the thread of the rounds sees it: an owner that packs results.

    Args:
        call: the stream.
        thread: of the rounds.
    """

    def __init__(self, call: Call, thread: RoundThread) -> None:
        super().__init__(call, "target", SERVICE.methods_by_name["Verify"].input_type)
        loop = thread.ready.result()
        self._vocab_size, self._places = loop.model.vocab_size, loop.config.places

    def unpack(self, message: target_pb2.RoundCommands) -> list[Command]:
        """See `SessionStream`."""
        return unpack(message, self, vocab_size=self._vocab_size, places=self._places)

    def hold(self, *, is_held: bool) -> list[Command]:
        """See `SessionStream`."""
        return [HoldCommand(self, is_held)]

    def leave(self) -> list[Command]:
        """See `SessionStream`."""
        super().leave()
        return [LeaveCommand(self)]

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost | None) -> None:
        """See `RoundOwner`."""
        self.call.answer(pack_results(results, cost))
        if self.traces is not None:
            ids = [result.key[1] for result in results]
            if cost is not None:
                self.traces.stepped(ids, step_ns=cost.step_ns, forward_ns=cost.forward_ns, rows=cost.rows)
            for result in results:
                if result.has_ended:
                    self.traces.closed(result.key[1], result.epoch)


class ReloadCall:
    """A call of `Reload`; a `CallHandler`. A caller that goes away changes nothing: what has begun is done.

    Args:
        call: the way back.
        reloader: that does it.
        event_loop: that it does it in.
    """

    def __init__(self, call: Call, reloader: Reloader, event_loop: asyncio.AbstractEventLoop) -> None:
        self._call, self._reloader, self._event_loop = call, reloader, event_loop

    def take(self, data: bytes) -> list[Command]:
        """See `CallHandler`."""
        asyncio.run_coroutine_threadsafe(self._reload(data), self._event_loop)
        return []

    def hold(self, *, is_held: bool) -> list[Command]:
        """See `CallHandler`: there is one answer."""
        return []

    def leave(self) -> list[Command]:
        """See `CallHandler`."""
        return []

    async def _reload(self, data: bytes) -> None:
        request = decode(SERVICE.methods_by_name["Reload"].input_type, data)
        try:
            if isinstance(request, InvalidRequest):
                raise request
            assert isinstance(request, target_pb2.ReloadRequest)
            self._call.answer(await self._reloader.reload(request))
        except OutriderError as error:
            self._call.refuse(error)
        except Exception:
            logger.exception("weights were not reloaded")
            self._call.refuse(InternalError("weights were not reloaded; the worker's log says why"))


def pack_results(results: Sequence[SessionResult], cost: RoundCost | None) -> target_pb2.RoundResults:
    """Return what one round has given the sessions of a stream, as it travels."""
    message = target_pb2.RoundResults(
        session_ids=[result.key[1] for result in results],
        epochs=[result.epoch for result in results],
        token_counts=[len(result.tokens) for result in results],
        tokens=[token for result in results for token in result.tokens],
        accepted_counts=[result.accepted for result in results],
        selected_counts=[result.selected for result in results],
        selected_by_source=_selected_by_source(results),
        grown_by_source=_grown_by_source(results),
        tree_ends=[_TREE_ENDS[result.tree_end] for result in results],
        accepted_sources=[sources for result in results for sources in result.drafters],
        finishes=[_FINISHES[result.finish] for result in results],
        cached_tokens=[result.cached_tokens for result in results],
        lost=[result.lost for result in results],
        logprobs=[
            pack_logprobs(row, result.logprobs) for row, result in enumerate(results) if result.logprobs is not None
        ],
        errors=[
            session_error(result.key[1], result.epoch, result.fault) for result in results if result.fault is not None
        ],
    )
    if cost is not None:
        message.report.CopyFrom(
            common_pb2.StepReport(
                step_ns=cost.step_ns,
                forward_ns=cost.forward_ns,
                plain_ns=cost.plain_ns,
            )
        )
    return message


def _selected_by_source(results: Sequence[SessionResult]) -> list[int]:
    """Return counts of each session's verified nodes by source; none where all are of a draft model alone."""
    if all(tuple(result.selected_by_kind) == (result.selected, 0, 0) for result in results):
        return []
    return [count for result in results for count in result.selected_by_kind]


def _grown_by_source(results: Sequence[SessionResult]) -> list[int]:
    """Return counts of the nodes that each session was grown here, by source; none where nothing has grown."""
    counts = [count for result in results for count in result.grown_by_kind]
    return counts if any(counts) else []


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
