"""A coordinator's messages as the step thread takes them."""

import logging
from collections.abc import Sequence

from outrider.draft_distribution import DraftDistribution, unpack_distributions
from outrider.errors import FieldViolation, InvalidRequest
from outrider.growth_source import ALL_SOURCES, GrowthSource, sources_from_proto
from outrider.log_output import about
from outrider.sampling import SamplingSpec
from outrider.succession import Addition, addition_from_proto, succession_from_proto
from outrider.target_worker.packing import session_error
from outrider.target_worker.resident_growth import DraftLimits
from outrider.target_worker.sessions import Code, OpenRequest, SessionFault, TreeRequest
from outrider.target_worker.step_jobs import Batch
from outrider.target_worker.succession import StreamSteps, Successor
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_from_bytes, split_by_counts, tokens_from_bytes

logger = logging.getLogger(__name__)


def unpack(
    request: target_pb2.VerifyRequest, *, last_step: int = 0, stream: StreamSteps | None = None
) -> tuple[Batch, list[common_pb2.SessionError]]:
    """A message as a batch, and the opens whose bytes could not be read.

    Args:
        request: the message.
        last_step: before it on its stream.
        stream: what that step leaves, if the message may follow it.

    Raises:
        InvalidRequest: columns of different lengths, which leave open what belongs to whom; a step that cannot be
            followed.
    """
    violations = [_miscounted(*column) for column in _column_lengths(request) if column[1] != column[2]]
    violations += _successor_violations(request, last_step)
    if request.HasField("addition"):
        violations.append(FieldViolation("addition", "given with a step, opens or closes: it comes by itself"))
    if violations:
        raise InvalidRequest(violations)
    opens: list[OpenRequest] = []
    unreadable: list[common_pb2.SessionError] = []
    for opening in request.opens:
        ids = about(session_id=opening.session_id, epoch=opening.epoch)
        logger.debug("session %d, epoch %d is opened", opening.session_id, opening.epoch, extra=ids)
        try:
            opens.append(_open_request(request.incarnation, opening))
        except ValueError as error:
            fault = SessionFault(Code.INVALID_ARGUMENT, f"prompt, output or sampling: {error}")
            unreadable.append(session_error(opening.session_id, opening.epoch, fault))
    closes = [
        ((request.incarnation, session_id), epoch)
        for session_id, epoch in zip(request.close_session_ids, request.close_epochs, strict=True)
    ]
    batch = Batch(
        opens=opens,
        closes=closes,
        trees=() if request.trees.follows else _tree_requests(request),
        successor=_successor(request) if request.trees.follows else None,
        step=request.step,
        stream=stream,
    )
    return batch, unreadable


def _column_lengths(request: target_pb2.VerifyRequest) -> list[tuple[str, int, int]]:
    trees = request.trees
    sessions, nodes = len(trees.session_ids), sum(trees.node_counts)
    return [
        ("close_epochs", len(request.close_epochs), len(request.close_session_ids)),
        ("trees.epochs", len(trees.epochs), sessions),
        ("trees.lengths", len(trees.lengths), sessions),
        ("trees.node_counts", len(trees.node_counts), sessions),
        ("trees.tokens", len(trees.tokens), nodes),
        ("trees.parents", len(trees.parents), nodes),
        ("trees.resident", len(trees.resident), sessions if trees.resident else 0),
        ("trees.max_nodes", len(trees.max_nodes), sessions if trees.follows else 0),
        ("trees.max_depths", len(trees.max_depths), sessions if trees.follows else 0),
    ]


def _successor_violations(request: target_pb2.VerifyRequest, last_step: int) -> list[FieldViolation]:
    trees = request.trees
    if not trees.follows:
        return []
    violations: list[FieldViolation] = []
    if trees.follows != last_step or not request.step:
        message = f"{trees.follows} given: a batch with a step can follow the one before it on its stream, {last_step}"
        violations.append(FieldViolation("trees.follows", message))
    if any(trees.resident):
        violations.append(FieldViolation("trees.resident", "given: what the target drafts itself follows no step"))
    if trees.HasField("distributions"):
        violations.append(FieldViolation("trees.distributions", "given: chains of rejection follow no step"))
    return violations + _value_violations("trees.values", trees.values, len(trees.tokens))


def _miscounted(name: str, count: int, needed: int) -> FieldViolation:
    return FieldViolation(name, f"{count} entries given, {needed} needed")


def _value_violations(name: str, data: bytes, nodes: int) -> list[FieldViolation]:
    if len(data) != 4 * nodes:
        return [FieldViolation(name, f"{len(data)} bytes given, {4 * nodes} needed")]
    values = floats_from_bytes(data)
    # Whatever is no number is not in between either.
    return [] if ((values >= 0) & (values <= 1)).all() else [FieldViolation(name, "numbers from 0 to 1 needed")]


def _successor(request: target_pb2.VerifyRequest) -> Successor:
    trees = request.trees
    return Successor(
        follows=trees.follows,
        keys=[(request.incarnation, session_id) for session_id in trees.session_ids],
        epochs=list(trees.epochs),
        lengths=list(trees.lengths),
        trees=succession_from_proto(trees),
    )


def unpack_addition(addition: target_pb2.TreeAddition, successor: Successor | None, last_step: int) -> Addition:
    """Nodes for a successor.

    Args:
        addition: the message.
        successor: the last batch on its stream; None where that follows nothing.
        last_step: number of that batch.

    Raises:
        InvalidRequest: the successor is another one; columns of different lengths; values that are none.
    """
    nodes = len(addition.tokens)
    counted = [
        ("addition.node_counts", len(addition.node_counts), 0 if successor is None else len(successor.keys)),
        ("addition.tokens", nodes, sum(addition.node_counts)),
        ("addition.parents", len(addition.parents), nodes),
    ]
    violations = [_miscounted(name, count, needed) for name, count, needed in counted if count != needed]
    if successor is None or addition.step != last_step:
        message = f"{addition.step} given: only the last batch of a stream can be added to, if it follows a step"
        violations.append(FieldViolation("addition.step", message))
    violations += _value_violations("addition.values", addition.values, nodes)
    if violations:
        raise InvalidRequest(violations)
    return addition_from_proto(addition)


def _open_request(incarnation: int, opening: common_pb2.SessionOpen) -> OpenRequest:
    return OpenRequest(
        key=(incarnation, opening.session_id),
        epoch=opening.epoch,
        prompt=tokens_from_bytes(opening.prompt),
        output=tokens_from_bytes(opening.output),
        sampling=SamplingSpec.from_proto(opening.sampling),
        weights=opening.weights,
        draft=_draft_limits(opening),
    )


def _draft_limits(opening: common_pb2.SessionOpen) -> DraftLimits | None:
    """What a resident draft may grow; None: nothing."""
    mode, limits = opening.limits.mode, opening.limits
    wanted = sources_from_proto(opening.sources, default=ALL_SOURCES)
    if mode == common_pb2.SPECULATION_MODE_OFF or GrowthSource.EAGLE not in wanted:
        return None
    is_sync = mode == common_pb2.SPECULATION_MODE_SYNC
    return DraftLimits(
        max_nodes=(limits.sync_nodes or None) if is_sync else None,
        max_depth=limits.max_depth or None,
        is_fixed=is_sync,
    )


def _tree_requests(request: target_pb2.VerifyRequest) -> list[TreeRequest]:
    trees = request.trees
    tokens, parents = list(trees.tokens), list(trees.parents)
    distributions: Sequence[DraftDistribution | None] = ()
    if trees.HasField("distributions"):
        try:
            distributions = unpack_distributions(trees.distributions, len(tokens))
        except ValueError as error:
            raise InvalidRequest([FieldViolation("trees", str(error))]) from error
    return [
        TreeRequest(
            key=(request.incarnation, session_id),
            epoch=epoch,
            length=length,
            tokens=tokens[nodes],
            parents=parents[nodes],
            distributions=distributions[nodes],
            resident=resident,
        )
        for session_id, epoch, length, nodes, resident in zip(
            trees.session_ids,
            trees.epochs,
            trees.lengths,
            split_by_counts(trees.node_counts),
            trees.resident or [False] * len(trees.session_ids),
            strict=True,
        )
    ]
