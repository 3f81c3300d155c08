"""TargetService.Verify: unpacks a coordinator's messages, hands them to the step thread, packs the results."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc.aio

from outrider import rpc, tracing
from outrider.errors import OutriderError
from outrider.target_worker.packing import Load, pack_load, pack_logprobs, session_error
from outrider.target_worker.reload import Reloader
from outrider.target_worker.sessions import Outcome, SessionKey, TreeResult
from outrider.target_worker.step_jobs import Batch, BatchResult
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.succession import StreamSteps, Successor
from outrider.target_worker.unpacking import unpack, unpack_addition
from outrider.v1 import common_pb2, target_pb2, target_pb2_grpc
from outrider.wire import floats_to_bytes

logger = logging.getLogger(__name__)

# Messages of one stream that may wait for the model; then its reader waits, and with it the coordinator.
_MAX_WAITING = 64

_OUTCOMES = {
    Outcome.ACCEPTED: target_pb2.OUTCOME_ACCEPTED,
    Outcome.DEFERRED: target_pb2.OUTCOME_DEFERRED,
    Outcome.ERROR: target_pb2.OUTCOME_ERROR,
    Outcome.ENDED: target_pb2.OUTCOME_ENDED,
}
_Response = target_pb2.VerifyResponse


@dataclass(eq=False)
class _Stream:
    """One coordinator's stream.

    Attributes:
        open_epochs: sessions opened over it, with their epochs; closed when it ends.
        last_step: highest step seen.
        successor: the batch of that step, where it follows another.
        steps: what the last finished one has left, for the step thread.
        outgoing: answers on their way, in the order of the requests; None ends the stream.
        traces: of its sessions; None while nobody traces.
        room: how many more answers may be on their way.
    """

    open_epochs: dict[SessionKey, int] = field(default_factory=dict)
    last_step: int = 0
    successor: Successor | None = None
    steps: StreamSteps = field(default_factory=StreamSteps)
    outgoing: "asyncio.Queue[asyncio.Task[_Response] | None]" = field(default_factory=asyncio.Queue)
    traces: tracing.SessionTraces | None = None
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_WAITING))


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves any number of coordinators from one step thread.

    Args:
        steps: the thread.
        reloader: changes the model's weights; default one of this thread.

    Attributes:
        duplicates: messages ignored because their step had been seen.
    """

    def __init__(self, steps: StepThread, reloader: Reloader | None = None) -> None:
        self._steps = steps
        self._reloader = reloader or Reloader(steps)
        self.duplicates = 0

    async def Verify(  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: "grpc.aio.ServicerContext[target_pb2.VerifyRequest, _Response]",
    ) -> None:
        """See target.proto. Reading and writing are tasks of their own: neither ever waits for the other."""
        stream = _Stream(traces=tracing.session_traces("target", context.invocation_metadata()))
        reader = asyncio.create_task(self._read(stream, request_iterator))
        reader.add_done_callback(lambda _reader: stream.outgoing.put_nowait(None))
        try:
            while (answer := await stream.outgoing.get()) is not None:
                await context.write(await answer)
                stream.room.release()
            await reader
        except OutriderError as error:
            await rpc.abort_with(context, error)
        finally:
            self._steps.submit(Batch(closes=list(stream.open_epochs.items())))
            if stream.traces is not None:
                stream.traces.end()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            while not stream.outgoing.empty():
                if (answer := stream.outgoing.get_nowait()) is not None:
                    answer.cancel()

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

    async def _read(self, stream: _Stream, requests: AsyncIterator[target_pb2.VerifyRequest]) -> None:
        async for request in requests:
            if request.step and request.step <= stream.last_step:
                self.duplicates += 1
                logger.warning("step %d came again and is ignored", request.step)
                continue
            if request.HasField("addition") and not (request.step or request.opens or request.close_session_ids):
                stream.steps.add(unpack_addition(request.addition, stream.successor, stream.last_step))
                continue
            batch, unreadable = unpack(request, last_step=stream.last_step, stream=stream.steps)
            if request.step:
                stream.last_step, stream.successor = request.step, batch.successor
                stream.steps.expect(batch.successor)
            if stream.traces is not None:
                for opening in request.opens:
                    stream.traces.opened(opening.session_id, opening.epoch, opening.traceparent)
            for opening in batch.opens:
                # Of several opens of a session the highest epoch counts: the others are refused.
                stream.open_epochs[opening.key] = max(opening.epoch, stream.open_epochs.get(opening.key, 0))
            for key, epoch in batch.closes:
                if stream.open_epochs.get(key, epoch + 1) <= epoch:
                    del stream.open_epochs[key]
            done = self._steps.submit(batch)
            if stream.traces is not None:
                for session_id, epoch in zip(request.close_session_ids, request.close_epochs, strict=True):
                    stream.traces.closed(session_id, epoch)
            if request.step:
                await stream.room.acquire()
                stream.outgoing.put_nowait(asyncio.create_task(self._answer(request, done, unreadable, stream.traces)))

    async def _answer(
        self,
        request: target_pb2.VerifyRequest,
        done: "Future[BatchResult]",
        unreadable: list[common_pb2.SessionError],
        traces: tracing.SessionTraces | None,
    ) -> _Response:
        result = await asyncio.wrap_future(done)
        response = pack(request, result, self._steps.load)
        if traces is not None and (step := result.step) is not None:
            ids = request.trees.session_ids
            traces.stepped(ids, step_ns=step.step_ns, forward_ns=step.forward_ns, rows=step.tokens)
        response.errors.extend(unreadable)
        return response


def pack(request: target_pb2.VerifyRequest, done: BatchResult, load: Load) -> _Response:
    """The answer to a message with a step."""
    trees = request.trees
    response = _Response(step=request.step, session_ids=trees.session_ids, epochs=trees.epochs, load=pack_load(load))
    reported: set[tuple[int, int]] = set()
    for row, result in enumerate(done.results):
        response.outcomes.append(_OUTCOMES[result.outcome])
        response.accepted_counts.append(len(result.accepted_nodes))
        response.accepted_nodes.extend(result.accepted_nodes)
        response.token_counts.append(len(result.token_ids))
        response.tokens.extend(result.token_ids)
        response.cached_tokens.append(result.cached_tokens)
        if result.logprobs is not None:
            response.logprobs.append(pack_logprobs(row, result.logprobs))
        if result.fault is not None:
            reported.add((trees.session_ids[row], trees.epochs[row]))
            response.errors.append(session_error(trees.session_ids[row], trees.epochs[row], result.fault))
    if any(trees.resident):
        response.drafted_counts.extend(result.drafted for result in done.results)
    response.additions = done.additions
    if trees.follows:
        response.verified_counts.extend(done.verified)
        response.ahead_ns = done.ahead_ns
    for key, epoch, fault in done.faults:
        if (key[1], epoch) not in reported:
            response.errors.append(session_error(key[1], epoch, fault))
    if any(result.growth is not None for result in done.results):
        pack_growth(response, done.results)
    if done.step is not None:
        response.report.step_ns = done.step.step_ns
        response.report.forward_ns = done.step.forward_ns
        response.report.tokens = done.step.tokens
        response.report.sessions = done.step.sessions
    return response


def pack_growth(response: _Response, results: Sequence[TreeResult]) -> None:
    """Adds what a resident draft has grown; the response has its sessions already."""
    growth = response.growth
    acceptance: list[float] = []
    for session_id, epoch, result in zip(response.session_ids, response.epochs, results, strict=True):
        if (grown := result.growth) is None:
            continue
        growth.session_ids.append(session_id)
        growth.epochs.append(epoch)
        growth.as_of.append(grown.as_of)
        growth.node_counts.append(len(grown.node_ids))
        growth.node_ids.extend(grown.node_ids)
        growth.parents.extend(grown.parents)
        growth.tokens.extend(grown.tokens)
        acceptance.extend(grown.acceptance)
    growth.acceptance = floats_to_bytes(acceptance)
    growth.sources.extend([common_pb2.GROWTH_SOURCE_EAGLE] * len(acceptance))
