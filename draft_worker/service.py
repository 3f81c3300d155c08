"""DraftService as the thread that grows sees it: unpacks commands, packs growth. gRPC itself is the front process's."""

import logging
from collections.abc import Mapping

from outrider import rpc
from outrider.draft_worker.rounds.commands import (
    CloseCommand,
    Command,
    CommitCommand,
    HoldCommand,
    LeaveCommand,
    ResendCommand,
)
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, SessionStart
from outrider.drafting.acceptance_calibration import RELIABILITY_EDGES, LearnedBuckets
from outrider.drafting.draft_distribution import pack_distributions
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource, sources_from_proto, to_proto
from outrider.errors import FieldViolation, InvalidRequest, OutriderError
from outrider.front.calls import Call, SessionStream
from outrider.roles.log_output import about
from outrider.sampling import SamplingSpec, SpeculationMode, mode_from_proto
from outrider.v1 import common_pb2, draft_pb2
from outrider.wire import floats_to_bytes, split_by_counts, uints_from_bytes, uints_to_bytes

logger = logging.getLogger(__name__)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]


class DraftStream(SessionStream[Command]):
    """A coordinator's stream as the thread that grows sees it: an owner that turns growth into messages."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, "draft", SERVICE.methods_by_name["Speculate"].input_type)

    def unpack(self, message: draft_pb2.DraftCommands) -> list[Command]:
        """See `SessionStream`."""
        return _commands(message, self)

    def hold(self, *, is_held: bool) -> list[Command]:
        """See `SessionStream`."""
        return [HoldCommand(self, is_held)]

    def leave(self) -> list[Command]:
        """See `SessionStream`."""
        super().leave()
        return [LeaveCommand(self)]

    def deliver(self, growth: Growth) -> None:
        """See `GrowthOwner`."""
        self.call.answer(growth_message(growth))
        if self.traces is not None:
            # Of one of its steps, as the message says it.
            self.traces.stepped(
                list(dict.fromkeys(growth.session_ids)),
                step_ns=growth.step_ns // growth.steps,
                forward_ns=growth.forward_ns // growth.steps,
                rows=growth.rows // growth.steps,
            )

    def fail(self, session_id: int, epoch: int, error: OutriderError) -> None:
        """See `GrowthOwner`."""
        status = rpc.status_of(error)
        told = common_pb2.SessionError(session_id=session_id, epoch=epoch, code=status.code, message=status.message)
        self.call.answer(draft_pb2.DraftGrowth(errors=[told]))


def pack_calibrations(calibrations: Mapping[GrowthSource, LearnedBuckets]) -> common_pb2.CalibrationReport:
    """Return how well each source's estimates have held since start; thread-safe."""
    rules = [
        common_pb2.RuleReliability(
            rule=found.rule,
            children=found.children,
            predicted=floats_to_bytes(
                [total / max(count, 1) for total, count in zip(found.predicted, found.children, strict=True)]
            ),
            hits=found.hits,
            source=to_proto(source),
        )
        for source, calibration in sorted(calibrations.items())
        for found in calibration.reliability()
    ]
    return common_pb2.CalibrationReport(edges=floats_to_bytes(RELIABILITY_EDGES), rules=rules)


def _commands(message: draft_pb2.DraftCommands, stream: DraftStream) -> list[Command]:
    """The commands of a message, in the order opens, commits, resends, closes.

    Raises:
        InvalidRequest: columns of different lengths, which leave open what belongs to whom.
    """
    _check_columns(message)
    commands: list[Command] = []
    for opened in message.opens:
        ids = about(session_id=opened.session_id, epoch=opened.epoch)
        logger.debug("session %d, epoch %d is opened", opened.session_id, opened.epoch, extra=ids)
        try:
            commands.append(_session_start(opened, message.incarnation, stream))
        except InvalidRequest as error:
            stream.fail(opened.session_id, opened.epoch, error)
    batch = message.commits
    tokens = list(batch.tokens)
    columns = zip(batch.session_ids, batch.epochs, batch.positions, split_by_counts(batch.token_counts), strict=True)
    for session_id, epoch, position, span in columns:
        commands.append(CommitCommand(stream, (message.incarnation, session_id), epoch, position, tokens[span]))
    for session_id, epoch in zip(message.resend_session_ids, message.resend_epochs, strict=True):
        commands.append(ResendCommand(stream, (message.incarnation, session_id), epoch))
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
        ("resend_epochs", len(message.resend_epochs), len(message.resend_session_ids)),
        ("close_epochs", len(message.close_epochs), len(message.close_session_ids)),
    )
    violations = [
        FieldViolation(name, f"{count} entries given, {needed} needed")
        for name, count, needed in lengths
        if count != needed
    ]
    if violations:
        raise InvalidRequest(violations)


def _session_start(opened: common_pb2.SessionOpen, incarnation: int, stream: DraftStream) -> SessionStart:
    try:
        prompt, output = uints_from_bytes(opened.prompt).tolist(), uints_from_bytes(opened.output).tolist()
    except ValueError as error:
        raise InvalidRequest([FieldViolation("prompt", f"whole uint32 tokens needed: {error}")]) from error
    try:
        mode = mode_from_proto(opened.limits.mode)
    except ValueError:
        mode = SpeculationMode.OFF
    if mode is SpeculationMode.OFF:
        raise InvalidRequest(
            [FieldViolation("limits.mode", f"{opened.limits.mode} given, 1 (async) or 2 (sync) needed")]
        )
    try:
        sampling = SamplingSpec.from_proto(opened.sampling)
    except ValueError as error:
        raise InvalidRequest([FieldViolation("sampling.verification", str(error))]) from error
    # An unset bound is the worker's own.
    bounds = {
        name: bound
        for name, bound in (
            ("max_live_nodes", opened.limits.max_live_nodes),
            ("max_depth", opened.limits.max_depth),
            ("sync_nodes", opened.limits.max_nodes),
        )
        if bound
    }
    return SessionStart(
        key=(incarnation, opened.session_id),
        owner=stream,
        epoch=opened.epoch,
        prompt=prompt,
        output=output,
        sampling=sampling,
        limits=GrowthLimits(mode=mode, **bounds),
        sources=sources_from_proto(opened.sources, default=ALL_SOURCES),
    )


def growth_message(growth: Growth) -> draft_pb2.DraftGrowth:
    """Pack the nodes of steps, of the sessions of one owner, as they travel."""
    report = None
    # What a trie says has no report: its time says nothing of when more is to be expected.
    if growth.source is GrowthSource.MODEL and growth.rows:
        report = common_pb2.StepReport(
            step_ns=growth.step_ns // growth.steps,
            forward_ns=growth.forward_ns // growth.steps,
            steps=growth.steps,
        )
    return draft_pb2.DraftGrowth(
        session_ids=growth.session_ids,
        epochs=growth.epochs,
        as_of=growth.as_of,
        node_counts=growth.counts,
        node_ids=uints_to_bytes(growth.node_ids),
        parents=uints_to_bytes(growth.parents),
        tokens=uints_to_bytes(growth.tokens),
        acceptance=floats_to_bytes(growth.acceptance),
        complete=growth.complete,
        report=report,
        source=to_proto(growth.source),
        distributions=pack_distributions(growth.distributions),
        forgot=growth.forgot if any(growth.forgot) else (),
        again=growth.again if any(growth.again) else (),
    )
