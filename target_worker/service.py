"""TargetService.Verify: unpacks a coordinator's commands, hands them to the round thread, packs what rounds give."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from outrider import rpc, tracing
from outrider.errors import OutriderError
from outrider.kernels.verification.walk import Finish
from outrider.target_worker.commands import HoldCommand, LeaveCommand, Load, RoundCost
from outrider.target_worker.reload import Reloader
from outrider.target_worker.round_thread import RoundThread
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.sessions import SessionFault, TokenLogprobs
from outrider.target_worker.unpacking import unpack
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes

logger = logging.getLogger(__name__)

# Messages that a coordinator may leave unread before its sessions rest, and how few let them go on.
_MOST_UNREAD, _FEW_UNREAD = 64, 8
_FINISHES = {
    Finish.NONE: target_pb2.FINISH_UNSPECIFIED,
    Finish.STOP: target_pb2.FINISH_STOP,
    Finish.LENGTH: target_pb2.FINISH_LENGTH,
}


class _Stream:
    """One coordinator's stream: the owner of its sessions."""

    def __init__(self, thread: RoundThread, traces: tracing.SessionTraces | None) -> None:
        self._thread, self._loop = thread, asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[target_pb2.RoundResults | None] = asyncio.Queue()
        self._is_held = False
        self.traces = traces

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost, load: Load) -> None:
        """See `ResultOwner`."""
        self._loop.call_soon_threadsafe(self._take, results, cost, load)

    def fail(self, session_id: int, epoch: int, fault: SessionFault) -> None:
        """See `ResultOwner`."""
        response = target_pb2.RoundResults(errors=[session_error(session_id, epoch, fault)])
        self._loop.call_soon_threadsafe(self._put, response)

    def end(self) -> None:
        """The coordinator sends nothing more."""
        self._outgoing.put_nowait(None)

    def _take(self, results: Sequence[SessionResult], cost: RoundCost, load: Load) -> None:
        if self.traces is not None:
            ids = [result.key[1] for result in results]
            self.traces.stepped(ids, step_ns=cost.step_ns, forward_ns=cost.forward_ns, rows=cost.rows)
        self._put(pack(results, cost, load))

    def _put(self, response: target_pb2.RoundResults) -> None:
        self._outgoing.put_nowait(response)
        if not self._is_held and self._outgoing.qsize() > _MOST_UNREAD:
            self._hold(is_held=True)

    def _hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        self._thread.submit([HoldCommand(self, is_held)])

    async def write(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Write results until the coordinator's commands end."""
        while (response := await self._outgoing.get()) is not None:
            await context.write(response)
            if self._is_held and self._outgoing.qsize() <= _FEW_UNREAD:
                self._hold(is_held=False)


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves any number of coordinators from one round thread.

    Args:
        thread: runs the rounds.
        reloader: changes the model's weights; default one of this thread.
    """

    def __init__(self, thread: RoundThread, reloader: Reloader | None = None) -> None:
        self._thread = thread
        self._reloader = reloader or Reloader(thread)

    async def Verify(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[target_pb2.RoundCommands],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """See target.proto. Reading and writing are tasks of their own: neither ever waits for the other."""
        stream = _Stream(self._thread, tracing.session_traces("target", context.invocation_metadata()))
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda _reader: stream.end())
        try:
            await stream.write(context)
            await reader
        except OutriderError as error:
            await rpc.abort_with(context, error)
        finally:
            self._thread.submit([LeaveCommand(stream)])
            if stream.traces is not None:
                stream.traces.end()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def Reload(  # noqa: N802
        self,
        request: target_pb2.ReloadRequest,
        context: "grpc.aio.ServicerContext[target_pb2.ReloadRequest, target_pb2.ReloadResponse]",
    ) -> target_pb2.ReloadResponse:
        """See target.proto. A caller that goes away changes nothing: what has begun is done."""
        try:
            return await asyncio.shield(asyncio.ensure_future(self._reloader.reload(request)))
        except OutriderError as error:
            await rpc.abort_with(context, error)

    async def _read(self, stream: _Stream, messages: AsyncIterator[target_pb2.RoundCommands]) -> None:
        sizes = (await asyncio.wrap_future(self._thread.ready)).sizes
        async for message in messages:
            commands = unpack(message, stream, places=sizes.places, vocab_size=sizes.vocab_size)
            if stream.traces is not None:
                for opening in message.opens:
                    stream.traces.opened(opening.session_id, opening.epoch, opening.traceparent)
                for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
                    stream.traces.closed(session_id, epoch)
            self._thread.submit(commands)


def pack(results: Sequence[SessionResult], cost: RoundCost, load: Load) -> target_pb2.RoundResults:
    """Return what a round has given, as it travels."""
    return target_pb2.RoundResults(
        session_ids=[result.key[1] for result in results],
        epochs=[result.epoch for result in results],
        token_counts=[len(result.tokens) for result in results],
        tokens=[token for result in results for token in result.tokens],
        accepted_counts=[result.accepted for result in results],
        selected_counts=[max(result.selected, 0) for result in results],
        accepted_sources=[sources for result in results for sources in result.drafters],
        finishes=[_FINISHES.get(result.finish, target_pb2.FINISH_UNSPECIFIED) for result in results],
        cached_tokens=[result.cached_tokens for result in results],
        lost=[result.lost for result in results],
        logprobs=[
            _pack_logprobs(row, result.logprobs) for row, result in enumerate(results) if result.logprobs is not None
        ],
        errors=[
            session_error(result.key[1], result.epoch, result.fault) for result in results if result.fault is not None
        ],
        report=common_pb2.StepReport(
            step_ns=cost.step_ns, forward_ns=cost.forward_ns, tokens=cost.rows, sessions=cost.sessions
        ),
        load=pack_load(load),
    )


def _pack_logprobs(row: int, logprobs: TokenLogprobs) -> target_pb2.Logprobs:
    return target_pb2.Logprobs(
        row=row,
        token_logprobs=floats_to_bytes(logprobs.token_logprobs),
        top_count=logprobs.top_token_ids.shape[1],
        top_token_ids=logprobs.top_token_ids.ravel().tolist(),
        top_logprobs=floats_to_bytes(logprobs.top_logprobs),
    )


def session_error(session_id: int, epoch: int, fault: SessionFault) -> common_pb2.SessionError:
    """Return a fault as it travels."""
    return common_pb2.SessionError(session_id=session_id, epoch=epoch, code=int(fault.code), message=fault.message)


def pack_load(load: Load) -> common_pb2.WorkerLoad:
    """Return the load as it travels."""
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
