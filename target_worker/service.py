"""TargetService.Verify: unpacks a coordinator's commands, hands them to the thread of the rounds, packs results."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from outrider import rpc, tracing
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.verification.walk import Finish
from outrider.target_worker.reload import Reloader
from outrider.target_worker.rounds.commands import HoldCommand, Load, RoundCost
from outrider.target_worker.rounds.session import SessionResult
from outrider.target_worker.rounds.thread import RoundThread
from outrider.target_worker.sessions import SessionFault, TokenLogprobs
from outrider.target_worker.unpacking import unpack
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes

# Messages of results that may wait to be read; then the stream's sessions rest until half of them have been.
_MOST_UNREAD = 64
# Commands that may wait for the thread; then readers wait, and look again so often.
_MOST_WAITING, _LOOK_S = 4096, 0.001

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


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves any number of coordinators from one thread of rounds.

    Args:
        thread: that runs them.
        reloader: changes the model's weights; default one of this thread.
        most_unread: messages of a stream that may wait to be read before its sessions rest.
    """

    def __init__(
        self, thread: RoundThread, reloader: Reloader | None = None, *, most_unread: int = _MOST_UNREAD
    ) -> None:
        self._thread, self._most_unread = thread, most_unread
        self._reloader = reloader or Reloader(thread)

    async def Verify(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[target_pb2.RoundCommands],
        context: "grpc.aio.ServicerContext[target_pb2.RoundCommands, target_pb2.RoundResults]",
    ) -> None:
        """See target.proto. Reading and writing are tasks of their own: neither ever waits for the other."""
        traces = tracing.session_traces("target", context.invocation_metadata())
        stream = _Stream(self._thread, traces, most_unread=self._most_unread)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda _reader: stream.finish())
        try:
            self._thread.join(stream)
            while (message := await stream.next()) is not None:
                await context.write(message)
            await reader
        except OutriderError as error:
            await rpc.abort_with(context, error)
        finally:
            stream.has_left = True
            self._thread.leave(stream)
            if traces is not None:
                traces.end()
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

    async def _read(self, stream: "_Stream", messages: AsyncIterator[target_pb2.RoundCommands]) -> None:
        loop = await asyncio.wrap_future(self._thread.ready)
        sizes = {"vocab_size": loop.model.vocab_size, "places": loop.config.places}
        async for message in messages:
            commands = unpack(message, stream, **sizes)
            if stream.traces is not None:
                for opening in message.opens:
                    stream.traces.opened(opening.session_id, opening.epoch, opening.traceparent)
                for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
                    stream.traces.closed(session_id, epoch)
            # An event would have the thread of the rounds call this one whenever it takes commands.
            while self._thread.waiting > _MOST_WAITING:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            self._thread.submit(commands)


class _Stream:
    """One coordinator's stream: takes results on the thread of the rounds, gives messages to the stream's writer.

    Args:
        thread: of the rounds.
        traces: of the stream's sessions; None while nobody traces.
        most_unread: messages that may wait before the sessions rest.

    Attributes:
        has_left: whether nobody will read any more.
    """

    def __init__(self, thread: RoundThread, traces: tracing.SessionTraces | None, *, most_unread: int) -> None:
        self.traces = traces
        self._thread, self._most_unread = thread, most_unread
        self._event_loop = asyncio.get_running_loop()
        self._unread: deque[target_pb2.RoundResults] = deque()
        self._has_news = asyncio.Event()
        self._is_held = self._is_finished = self.has_left = False
        self._error: OutriderError | None = None

    def deliver(self, results: Sequence[SessionResult], cost: RoundCost | None, load: Load) -> None:
        """See `RoundOwner`."""
        self._event_loop.call_soon_threadsafe(self._put, results, cost, load)

    def end(self, error: OutriderError) -> None:
        """See `RoundOwner`."""
        self._event_loop.call_soon_threadsafe(self.finish, error)

    def finish(self, error: OutriderError | None = None) -> None:
        """End the stream once what waits has been read."""
        self._error = self._error or error
        self._is_finished = True
        self._has_news.set()

    async def next(self) -> target_pb2.RoundResults | None:
        """Return the next message; None once the stream has finished.

        Raises:
            OutriderError: that has finished it.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_finished:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        message = self._unread.popleft()
        if self._is_held and len(self._unread) <= self._most_unread // 2:
            self._hold(is_held=False)
        return message

    def _put(self, results: Sequence[SessionResult], cost: RoundCost | None, load: Load) -> None:
        if self.has_left:
            return
        if self.traces is not None:
            ids = [result.key[1] for result in results]
            if cost is not None:
                self.traces.stepped(ids, step_ns=cost.step_ns, forward_ns=cost.forward_ns, rows=cost.rows)
            for result in results:
                if result.has_ended:
                    self.traces.closed(result.key[1], result.epoch)
        self._unread.append(pack_results(results, cost, load))
        self._has_news.set()
        if not self._is_held and len(self._unread) > self._most_unread:
            self._hold(is_held=True)

    def _hold(self, *, is_held: bool) -> None:
        self._is_held = is_held
        # A thread that ends has told the stream, or is about to.
        with contextlib.suppress(WorkerUnavailable):
            self._thread.submit([HoldCommand(self, is_held)])


def pack_results(results: Sequence[SessionResult], cost: RoundCost | None, load: Load) -> target_pb2.RoundResults:
    """Return what one round has given the sessions of a stream, as it travels."""
    message = target_pb2.RoundResults(
        session_ids=[result.key[1] for result in results],
        epochs=[result.epoch for result in results],
        token_counts=[len(result.tokens) for result in results],
        tokens=[token for result in results for token in result.tokens],
        accepted_counts=[result.accepted for result in results],
        selected_counts=[result.selected for result in results],
        selected_by_source=_selected_by_source(results),
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
        load=pack_load(load),
    )
    if cost is not None:
        message.report.CopyFrom(
            common_pb2.StepReport(
                step_ns=cost.step_ns,
                forward_ns=cost.forward_ns,
                tokens=cost.rows,
                sessions=cost.sessions,
                plain_ns=cost.plain_ns,
            )
        )
    return message


def _selected_by_source(results: Sequence[SessionResult]) -> list[int]:
    """Return counts of each session's verified nodes by source; none where all are of a draft model alone."""
    if all(tuple(result.selected_by_kind) == (result.selected, 0, 0) for result in results):
        return []
    return [count for result in results for count in result.selected_by_kind]


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
