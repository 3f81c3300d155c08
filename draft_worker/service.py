"""DraftService over a growth thread: unpacks commands, packs growth."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from outrider import rpc, tracing
from outrider.draft_distribution import pack_distributions
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.growth_thread import (
    CloseCommand,
    Command,
    CommitCommand,
    GrowthThread,
    LeaveCommand,
    Load,
    OpenCommand,
    SessionFailure,
)
from outrider.draft_worker.session import GrowthLimits, GrowthMode, SessionStart
from outrider.errors import FieldViolation, InvalidRequest, OutriderError
from outrider.growth_source import ALL_SOURCES, GrowthSource, sources_from_proto, sources_to_proto
from outrider.log_output import about
from outrider.sampling import SamplingSpec
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from outrider.wire import floats_to_bytes, split_by_counts, tokens_from_bytes

logger = logging.getLogger(__name__)

_MODES = {
    common_pb2.SPECULATION_MODE_UNSPECIFIED: GrowthMode.ASYNC,
    common_pb2.SPECULATION_MODE_ASYNC: GrowthMode.ASYNC,
    common_pb2.SPECULATION_MODE_SYNC: GrowthMode.SYNC,
}


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves every coordinator's stream from one growth thread."""

    def __init__(self, growth: GrowthThread) -> None:
        self._growth = growth
        self._streams: set[_Stream] = set()

    async def Speculate(  # noqa: N802 - the name in the proto
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftCommands],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One coordinator's commands in and growth out, until it hangs up; then its sessions are closed."""
        traces = tracing.session_traces("draft", context.invocation_metadata())
        stream = _Stream(asyncio.get_running_loop(), traces)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        reader.add_done_callback(stream.reader_ended)
        self._streams.add(stream)
        try:
            while (message := await stream.take()) is not None:
                await context.write(message)
        except OutriderError as error:
            await rpc.abort_with(context, error)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._growth.submit([LeaveCommand(stream)])
            if traces is not None:
                traces.end()

    async def end_streams(self) -> None:
        """Lets every stream end after what it has to send, so that coordinators turn elsewhere at once."""
        for stream in self._streams:
            stream.end()

    async def _read(self, requests: AsyncIterator[draft_pb2.DraftCommands], stream: "_Stream") -> None:
        async for message in requests:
            self._growth.submit(_commands(message, stream))
            if stream.traces is not None:
                for opened in message.opens:
                    stream.traces.opened(opened.session_id, opened.epoch, opened.traceparent)
                for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
                    stream.traces.closed(session_id, epoch)


class _Stream:
    """A coordinator's stream as the growth thread sees it: an owner that turns growth into messages.

    What waits here is bounded by the credit of the stream's sessions: a coordinator that does not read does not commit.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, traces: tracing.SessionTraces | None = None) -> None:
        self._loop = loop
        self.traces = traces
        self._outgoing: asyncio.Queue[draft_pb2.DraftGrowth | BaseException | None] = asyncio.Queue()

    def deliver(self, growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> None:
        self._put(growth_message(growths, step, load))
        if self.traces is not None:
            ids = [growth.session_id for growth in growths]
            self.traces.stepped(ids, step_ns=step.step_ns, forward_ns=step.forward_ns, rows=step.tokens)

    def fail(self, failure: SessionFailure) -> None:
        kinds = (code for kind, code in rpc.CODES.items() if isinstance(failure.error, kind))
        code = next(kinds, grpc.StatusCode.FAILED_PRECONDITION)
        error = common_pb2.SessionError(
            session_id=failure.session_id, epoch=failure.epoch, code=code.value[0], message=str(failure.error)
        )
        self._put(draft_pb2.DraftGrowth(errors=[error]))

    def end(self) -> None:
        self._put(None)

    def reader_ended(self, reader: asyncio.Task[None]) -> None:
        self._put(None if reader.cancelled() else reader.exception())

    async def take(self) -> draft_pb2.DraftGrowth | None:
        message = await self._outgoing.get()
        if isinstance(message, BaseException):
            raise message
        return message

    def _put(self, message: draft_pb2.DraftGrowth | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)
        except RuntimeError:
            # The loop is closed: the server is gone, and nobody is left to read.
            logger.debug("growth for a closed stream dropped")


def pack_load(load: Load) -> common_pb2.WorkerLoad:
    """A worker's load as it travels."""
    return common_pb2.WorkerLoad(
        sessions=load.sessions,
        slots_used=load.slots_used,
        slots_total=load.slots_total,
        steps=load.steps,
        busy=load.busy,
    )


def _commands(message: draft_pb2.DraftCommands, stream: _Stream) -> list[Command]:
    """The commands of a message, in the order opens, commits, closes.

    Raises:
        InvalidRequest: columns of different lengths, which leave open what belongs to whom.
    """
    _check_columns(message)
    commands: list[Command] = []
    for opened in message.opens:
        ids = about(session_id=opened.session_id, epoch=opened.epoch)
        logger.debug("session %d, epoch %d is opened", opened.session_id, opened.epoch, extra=ids)
        try:
            commands.append(OpenCommand(stream, _session_start(opened, message.incarnation, stream)))
        except InvalidRequest as error:
            stream.fail(SessionFailure(opened.session_id, opened.epoch, error))
    batch = message.commits
    tokens = list(batch.tokens)
    columns = zip(batch.session_ids, batch.epochs, batch.positions, split_by_counts(batch.token_counts), strict=True)
    for session_id, epoch, position, span in columns:
        commands.append(CommitCommand(stream, (message.incarnation, session_id), epoch, position, tokens[span]))
    for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
        commands.append(CloseCommand(stream, (message.incarnation, session_id), epoch))
    return commands


def _check_columns(message: draft_pb2.DraftCommands) -> None:
    batch = message.commits
    sessions = len(batch.session_ids)
    lengths = (
        ("commits.epochs", len(batch.epochs), sessions),
        ("commits.positions", len(batch.positions), sessions),
        ("commits.token_counts", len(batch.token_counts), sessions),
        ("commits.tokens", len(batch.tokens), sum(batch.token_counts)),
        ("close_epochs", len(message.close_epochs), len(message.close_session_ids)),
    )
    violations = [
        FieldViolation(name, f"{count} entries given, {needed} needed")
        for name, count, needed in lengths
        if count != needed
    ]
    if violations:
        raise InvalidRequest(violations)


def _session_start(opened: common_pb2.SessionOpen, incarnation: int, stream: _Stream) -> SessionStart:
    try:
        prompt, output = tokens_from_bytes(opened.prompt), tokens_from_bytes(opened.output)
    except ValueError as error:
        raise InvalidRequest([FieldViolation("prompt", f"whole uint32 tokens needed: {error}")]) from error
    if opened.limits.mode not in _MODES:
        raise InvalidRequest(
            [FieldViolation("limits.mode", f"{opened.limits.mode} given, 1 (async) or 2 (sync) needed")]
        )
    try:
        sampling = SamplingSpec.from_proto(opened.sampling)
    except ValueError as error:
        raise InvalidRequest([FieldViolation("sampling.verification", str(error))]) from error
    # An unset bound is the worker's own.
    bounds = {
        name: getattr(opened.limits, name)
        for name in ("max_live_nodes", "max_depth", "sync_nodes")
        if getattr(opened.limits, name)
    }
    return SessionStart(
        key=(incarnation, opened.session_id),
        owner=stream,
        epoch=opened.epoch,
        prompt=prompt,
        output=output,
        sampling=sampling,
        limits=GrowthLimits(mode=_MODES[opened.limits.mode], **bounds),
        sources=sources_from_proto(opened.sources, default=ALL_SOURCES),
    )


def growth_message(growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> draft_pb2.DraftGrowth:
    """A step's nodes as they travel, of the sessions of one owner."""
    sources, report = [], None
    if step.source is GrowthSource.MODEL:
        report = common_pb2.StepReport(
            step_ns=step.step_ns, forward_ns=step.forward_ns, tokens=step.tokens, sessions=step.sessions
        )
    else:
        # Without a report: its time says nothing of when more is to be expected.
        sources = sources_to_proto([step.source]) * sum(len(growth.node_ids) for growth in growths)
    return draft_pb2.DraftGrowth(
        session_ids=[growth.session_id for growth in growths],
        epochs=[growth.epoch for growth in growths],
        as_of=[growth.as_of for growth in growths],
        node_counts=[len(growth.node_ids) for growth in growths],
        node_ids=[node_id for growth in growths for node_id in growth.node_ids],
        parents=[parent for growth in growths for parent in growth.parents],
        tokens=[token for growth in growths for token in growth.tokens],
        acceptance=floats_to_bytes([value for growth in growths for value in growth.acceptance]),
        complete=[growth.complete for growth in growths],
        report=report,
        load=pack_load(load),
        sources=sources,
        distributions=pack_distributions([q for growth in growths for q in growth.distributions]),
    )
