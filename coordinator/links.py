"""The coordinator's ends of the worker streams: messages to protocol buffers and back."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf.message import Message

from outrider import tracing
from outrider.coordinator.answers import check_additions, check_report, check_verification, verified_counts
from outrider.coordinator.firing import Latency
from outrider.coordinator.growth import growth_batch
from outrider.coordinator.messages import (
    Commits,
    FaultKind,
    GrowthBatch,
    SessionFault,
    SessionOpening,
    SpeculationMode,
    TokenLogprobs,
    VerifyResult,
)
from outrider.coordinator.one_graph_answers import RESIDENT, counted_apart, expected_counts
from outrider.coordinator.parts import Parts
from outrider.coordinator.resident import resident_growth
from outrider.coordinator.successor import Successor
from outrider.coordinator.trees import Submissions
from outrider.coordinator.verdicts import Verdicts
from outrider.coordinator.worker_link import WorkerLink
from outrider.draft_distribution import pack_distributions
from outrider.errors import WorkerUnavailable
from outrider.growth_source import ALL_SOURCES, sources_to_proto
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.succession import Addition
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.wire import floats_from_bytes, floats_to_bytes, tokens_to_bytes

_MODES = {
    SpeculationMode.ASYNC: common_pb2.SPECULATION_MODE_ASYNC,
    SpeculationMode.SYNC: common_pb2.SPECULATION_MODE_SYNC,
    SpeculationMode.OFF: common_pb2.SPECULATION_MODE_OFF,
}

_FAULT_KINDS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: FaultKind.NO_ROOM,
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: FaultKind.REFUSED,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: FaultKind.REFUSED,
    grpc.StatusCode.ABORTED.value[0]: FaultKind.REPLACED,
}
_CLOSED = {target_pb2.OUTCOME_ERROR, target_pb2.OUTCOME_ENDED}
_NO_REASON = SessionFault(kind=FaultKind.LOST, message="the target worker gave no reason")


def opening_to_proto(opening: SessionOpening) -> common_pb2.SessionOpen:
    """The message that opens a session at a worker."""
    return common_pb2.SessionOpen(
        session_id=opening.session_id,
        epoch=opening.epoch,
        prompt=tokens_to_bytes(opening.prompt),
        output=tokens_to_bytes(opening.output),
        sampling=opening.sampling.to_proto(),
        limits=common_pb2.SpeculationLimits(
            mode=_MODES[opening.mode],
            max_live_nodes=opening.max_live_nodes,
            max_depth=opening.max_depth,
            sync_nodes=opening.sync_nodes,
        ),
        traceparent=opening.traceparent,
        weights=opening.weights,
        sources=() if opening.sources == ALL_SOURCES else sources_to_proto(opening.sources),
    )


def _check_readable(message: Message | None) -> None:
    # What gRPC gives in place of a message that it could not read.
    if message is None:
        raise ValueError("its bytes are none of this protocol's")


@dataclass(eq=False, slots=True)
class _Waiting:
    """A batch that is not answered yet; `node_counts`: by session, how many were sent; `additions`: after it."""

    future: "asyncio.Future[VerifyResult]"
    node_counts: Mapping[int, int]
    is_successor: bool
    additions: int = 0


class TargetLink(WorkerLink):
    """The stream to one target worker.

    Args:
        vocab_size: tokens of the target's model; None takes any.
    """

    def __init__(
        self,
        address: str,
        *,
        incarnation: int,
        on_lost: Callable[[str], None],
        vocab_size: int | None = None,
        tls: TlsConfig | None = None,
    ) -> None:
        super().__init__(address, tls=tls, role=Role.TARGET, on_lost=on_lost)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._step = 0
        self._waiting: dict[int, _Waiting] = {}
        """Batches by step."""
        self._resident_steps: set[int] = set()
        self._outgoing: list[target_pb2.VerifyRequest] = []
        self.on_result: Callable[[], None] | None = None
        """Called when a batch has been answered, before anything else is done."""
        self.load = common_pb2.WorkerLoad()
        metadata = tracing.stream_metadata("target", address)
        self._start(target_pb2_grpc.TargetServiceStub(self._channel).Verify(metadata=metadata))

    def submit(
        self, submissions: Submissions, *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        """Sends a batch; the future gives its verdicts, or raises WorkerUnavailable when the stream is lost."""
        chosen = submissions.trees
        node_counts = chosen.counts.tolist()
        batch = target_pb2.TreeBatch(
            session_ids=submissions.session_ids,
            epochs=submissions.epochs,
            lengths=submissions.lengths,
            node_counts=node_counts,
            tokens=chosen.tokens,
            parents=chosen.parents,
            distributions=pack_distributions(chosen.distributions) if chosen.distributions else None,
            resident=submissions.resident,
        )
        if any(submissions.resident):
            self._resident_steps.add(self._step + 1)
            counts = zip(submissions.resident, node_counts, strict=True)
            node_counts = [RESIDENT if resident else count for resident, count in counts]
        return self._send_batch(batch, submissions.session_ids, node_counts, openings)

    def follow(
        self, successor: Successor, *, openings: Sequence[SessionOpening] = ()
    ) -> "asyncio.Future[VerifyResult]":
        """Sends the batch that follows the last one; the same comes of it."""
        sent = successor.succession
        node_counts = sent.counts.tolist()
        batch = target_pb2.TreeBatch(
            session_ids=successor.group.ids,
            epochs=successor.epochs,
            lengths=successor.lengths,
            node_counts=node_counts,
            tokens=sent.tokens.tolist(),
            parents=sent.parents.tolist(),
            follows=self._step,
            values=floats_to_bytes(sent.values),
            least_value=sent.least_value,
            max_nodes=sent.max_nodes.tolist(),
            max_depths=sent.max_depths.tolist(),
            max_total_nodes=sent.max_total_nodes,
        )
        return self._send_batch(batch, successor.group.ids, node_counts, openings, is_successor=True)

    def extend(self, more: Addition) -> None:
        """Adds nodes to the last batch, which follows the one before it; nothing once that is answered."""
        if self.is_lost or (waiting := self._waiting.get(self._step)) is None:
            return
        node_counts = more.counts.tolist()
        addition = target_pb2.TreeAddition(
            step=self._step,
            node_counts=node_counts,
            tokens=more.tokens.tolist(),
            parents=more.parents.tolist(),
            values=floats_to_bytes(more.values),
        )
        self._send(target_pb2.VerifyRequest(addition=addition))
        self._flush()
        waiting.additions += 1
        sent = zip(waiting.node_counts.items(), node_counts, strict=True)
        waiting.node_counts = {session_id: count + new for (session_id, count), new in sent}

    def _send_batch(
        self,
        batch: target_pb2.TreeBatch,
        session_ids: Sequence[int],
        node_counts: Sequence[int],
        openings: Sequence[SessionOpening],
        *,
        is_successor: bool = False,
    ) -> "asyncio.Future[VerifyResult]":
        self._step += 1
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            future.set_exception(WorkerUnavailable("the target worker's stream is lost"))
            return future
        opens = [opening_to_proto(opening) for opening in openings]
        self._send(target_pb2.VerifyRequest(step=self._step, opens=opens, trees=batch))
        self._flush()
        counts = dict(zip(session_ids, node_counts, strict=True))
        self._waiting[self._step] = _Waiting(future, counts, is_successor)
        return future

    def close_session(self, session_id: int, epoch: int) -> None:
        """Frees a session at the worker, after the steps in flight."""
        self._send(target_pb2.VerifyRequest(close_session_ids=[session_id], close_epochs=[epoch]))

    def _send(self, request: target_pb2.VerifyRequest) -> None:
        request.incarnation = self._incarnation
        self._outgoing.append(request)
        self._outgoing_ready.set()

    def _take_outgoing(self) -> Sequence[target_pb2.VerifyRequest]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    async def _read(self) -> None:
        async for response in self._call:
            _check_readable(response)
            self.load = response.load
            if (waiting := self._waiting.get(response.step)) is None:
                continue
            future, node_counts, is_successor = waiting.future, waiting.node_counts, waiting.is_successor
            if not future.done():
                drafted: Mapping[int, int] = {}
                if is_successor:
                    node_counts = verified_counts(response, node_counts)
                if response.step in self._resident_steps:
                    self._resident_steps.discard(response.step)
                    node_counts, drafted = expected_counts(response, node_counts)
                check_verification(response, node_counts, vocab_size=self._vocab_size)
                follower = self._waiting.get(response.step + 1)
                check_additions(response, 0 if follower is None else follower.additions)
                growth = resident_growth(response, self._vocab_size)
                result = _verify_result(response, growth, node_counts if is_successor else None)
                future.set_result(counted_apart(result, drafted))
            # Only now: whatever is wrong with an answer, whoever waits for it hears of it as the link ends.
            del self._waiting[response.step]
            if self.on_result is not None:
                self.on_result()

    def _fail(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for batch in waiting.values():
            if not batch.future.done():
                batch.future.set_exception(WorkerUnavailable(f"the target worker's stream is lost ({reason})"))


def _verify_result(
    response: target_pb2.VerifyResponse, growth: GrowthBatch | None, verified: Mapping[int, int] | None
) -> VerifyResult:
    sessions = len(response.session_ids)
    outcomes = list(response.outcomes)
    deferred: Sequence[bool] = ()
    faults: Sequence[SessionFault | None] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    if outcomes.count(target_pb2.OUTCOME_ACCEPTED) < sessions:
        deferred = [outcome == target_pb2.OUTCOME_DEFERRED for outcome in outcomes]
        faults = _faults(response)
    if response.logprobs:
        of_rows = {entry.row: _logprobs(entry) for entry in response.logprobs}
        logprobs = list(map(of_rows.get, range(sessions)))
    verdicts = Verdicts(
        session_ids=list(response.session_ids),
        epochs=list(response.epochs),
        accepted=_parts(response.accepted_nodes, response.accepted_counts),
        token_ids=_parts(response.tokens, response.token_counts),
        deferred=deferred,
        faults=faults,
        logprobs=logprobs,
        cached_tokens=list(response.cached_tokens),
    )
    return VerifyResult(
        step=response.step,
        verdicts=verdicts,
        step_ns=response.report.step_ns,
        forward_ns=response.report.forward_ns,
        step_tokens=response.report.tokens,
        growth=growth,
        verified=verified,
        ahead_ns=response.ahead_ns,
        additions=response.additions,
    )


def _parts(values: Sequence[int], counts: Sequence[int]) -> Parts:
    return Parts(list(values), np.array(counts, dtype=np.int64))


def _faults(response: target_pb2.VerifyResponse) -> list[SessionFault | None]:
    """[S] why a session is closed; None of those that are not."""
    faults = {(error.session_id, error.epoch): _fault(error) for error in response.errors}
    return [
        faults.get((session_id, epoch), _NO_REASON) if outcome in _CLOSED else None
        for session_id, epoch, outcome in zip(response.session_ids, response.epochs, response.outcomes, strict=True)
    ]


def _fault(error: common_pb2.SessionError) -> SessionFault:
    return SessionFault(kind=_FAULT_KINDS.get(error.code, FaultKind.LOST), message=error.message)


def _logprobs(entry: target_pb2.Logprobs) -> TokenLogprobs:
    token_logprobs = floats_from_bytes(entry.token_logprobs).tolist()
    count = len(token_logprobs)
    top = floats_from_bytes(entry.top_logprobs).reshape(count, entry.top_count).tolist()
    ids = list(entry.top_token_ids)
    rows = [ids[start : start + entry.top_count] for start in range(0, count * entry.top_count, entry.top_count or 1)]
    return TokenLogprobs(token_logprobs=token_logprobs, top_token_ids=rows or [[]] * count, top_logprobs=top)


class DraftLink(WorkerLink):
    """The stream to one draft worker. Nothing sent here is ever waited for.

    Growth that no target would take ends the stream: a broken draft costs its own sessions their speed, not their
    requests, which a target would refuse.

    Args:
        vocab_size: tokens of the draft's model.
    """

    # Some ten steps of many sessions: what a draft is further ahead of its reader is stale when it is read, so there it
    # rests (`front.process`). With less, a draft behind a round trip of 3 ms could not send all steps that it makes.
    unread_bytes = 32 << 10

    def __init__(
        self,
        address: str,
        *,
        incarnation: int,
        vocab_size: int,
        on_growth: Callable[[GrowthBatch], None],
        on_error: Callable[[int, int, str], None],
        on_lost: Callable[[str], None],
        tls: TlsConfig | None = None,
    ) -> None:
        super().__init__(address, tls=tls, role=Role.DRAFT, on_lost=on_lost)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._on_growth = on_growth
        self._on_error = on_error
        self._outgoing: draft_pb2.DraftCommands | None = None
        self.load = common_pb2.WorkerLoad()
        self.step_latency = Latency()
        """The worker's step time."""
        metadata = tracing.stream_metadata("draft", address)
        self._start(draft_pb2_grpc.DraftServiceStub(self._channel).Speculate(metadata=metadata))

    def open_session(self, opening: SessionOpening) -> None:
        """Asks the worker to grow this session's tree from now on."""
        self._commands().opens.append(opening_to_proto(opening))

    def commit(self, commits: Commits) -> None:
        """Tells the worker what was committed, now; what was to be sent before leaves with it."""
        batch = self._commands().commits
        batch.session_ids.extend(commits.session_ids)
        batch.epochs.extend(commits.epochs)
        batch.positions.extend(commits.positions)
        batch.token_counts.extend(map(len, commits.token_ids))
        batch.tokens.extend(itertools.chain.from_iterable(commits.token_ids))
        self._flush()

    def close_session(self, session_id: int, epoch: int) -> None:
        """Frees a session at the worker."""
        commands = self._commands()
        commands.close_session_ids.append(session_id)
        commands.close_epochs.append(epoch)

    def _commands(self) -> draft_pb2.DraftCommands:
        if self._outgoing is None:
            self._outgoing = draft_pb2.DraftCommands(incarnation=self._incarnation)
            self._outgoing_ready.set()
        return self._outgoing

    def _take_outgoing(self) -> Sequence[draft_pb2.DraftCommands]:
        commands, self._outgoing = self._outgoing, None
        return [] if commands is None else [commands]

    async def _read(self) -> None:
        async for message in self._call:
            _check_readable(message)
            check_report(message.report)
            self.load = message.load
            if message.report.step_ns:
                self.step_latency.observe(message.report.step_ns)
            for error in message.errors:
                self._on_error(error.session_id, error.epoch, error.message)
            if message.session_ids:
                self._on_growth(growth_batch(message, self._vocab_size))
