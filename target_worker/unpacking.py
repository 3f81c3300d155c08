"""A coordinator's messages as the round thread takes them."""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from outrider.draft_distribution import DraftDistribution, unpack_distributions
from outrider.errors import FieldViolation, InvalidRequest
from outrider.growth_source import GrowthSource
from outrider.log_output import about
from outrider.sampling import SamplingSpec
from outrider.target_worker.commands import (
    BoundCommand,
    CloseCommand,
    Command,
    GrowthCommand,
    OpenCommand,
    PlaceCommand,
    ResultOwner,
)
from outrider.target_worker.sessions import Code, OpenRequest, SessionFault
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import floats_from_bytes, split_by_counts, tokens_from_bytes

logger = logging.getLogger(__name__)

_MOST_ID = (1 << 31) - 1


def unpack(message: target_pb2.RoundCommands, owner: ResultOwner, *, places: int, vocab_size: int) -> list[Command]:
    """Return a message's commands, in the order in which they take effect.

    Opens whose bytes cannot be read are told to the owner.

    Args:
        message: to read.
        owner: of the sessions.
        places: for draft workers of a session.
        vocab_size: tokens of the model.

    Raises:
        InvalidRequest: columns that do not fit together, or nodes that stand for nothing.
    """
    violations = [
        FieldViolation(name, f"{count} entries given, {needed} needed")
        for name, count, needed in _column_lengths(message)
        if count != needed
    ]
    if violations:
        raise InvalidRequest(violations)
    commands = list[Command]()
    for opening in message.opens:
        ids = about(session_id=opening.session_id, epoch=opening.epoch)
        logger.debug("session %d, epoch %d is opened", opening.session_id, opening.epoch, extra=ids)
        try:
            commands.append(OpenCommand(owner, _open_request(message.incarnation, opening)))
        except ValueError as error:
            fault = SessionFault(Code.INVALID_ARGUMENT, f"prompt, output or sampling: {error}")
            owner.fail(opening.session_id, opening.epoch, fault)
    commands += _place_commands(message, places)
    commands += _growth_commands(message, places, vocab_size)
    bounds = message.bounds
    for session_id, epoch, allow in zip(bounds.session_ids, bounds.epochs, bounds.allow, strict=True):
        commands.append(BoundCommand((message.incarnation, session_id), epoch, min(allow, _MOST_ID)))
    for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True):
        commands.append(CloseCommand((message.incarnation, session_id), epoch))
    return commands


def _column_lengths(message: target_pb2.RoundCommands) -> Iterator[tuple[str, int, int]]:
    """(name, entries, those that are needed) of all columns."""
    growth = message.growth
    nodes = sum(growth.node_counts)
    told = [
        ("places", message.places, len(message.places.session_ids), ("epochs", "places", "changes")),
        ("growth", growth, len(growth.session_ids), ("epochs", "places", "as_of", "node_counts")),
        ("growth", growth, nodes, ("node_ids", "parents", "tokens")),
        ("bounds", message.bounds, len(message.bounds.session_ids), ("epochs", "allow")),
    ]
    for part, columns, needed, names in told:
        for name in names:
            yield f"{part}.{name}", len(getattr(columns, name)), needed
    yield "growth.acceptance", len(growth.acceptance), 4 * nodes
    for name, needed in (("sources", nodes), ("complete", len(growth.session_ids))):
        if count := len(getattr(growth, name)):
            yield f"growth.{name}", count, needed
    if count := len(message.bounds.alone):
        yield "bounds.alone", count, len(message.bounds.session_ids)
    yield "close_epochs", len(message.close_epochs), len(message.close_session_ids)


def _open_request(incarnation: int, opening: common_pb2.SessionOpen) -> OpenRequest:
    return OpenRequest(
        key=(incarnation, opening.session_id),
        epoch=opening.epoch,
        prompt=tokens_from_bytes(opening.prompt),
        output=tokens_from_bytes(opening.output),
        sampling=SamplingSpec.from_proto(opening.sampling),
        weights=opening.weights,
    )


def _place_commands(message: target_pb2.RoundCommands, places: int) -> Iterator[Command]:
    told = message.places
    _check_places("places.places", told.places, places)
    for session_id, epoch, place, change in zip(told.session_ids, told.epochs, told.places, told.changes, strict=True):
        # What a worker has grown stays when it leaves.
        if change in {target_pb2.PLACE_CHANGE_TAKEN, target_pb2.PLACE_CHANGE_RESENT}:
            is_resent = change == target_pb2.PLACE_CHANGE_RESENT
            yield PlaceCommand((message.incarnation, session_id), epoch, place, is_resent)


def _growth_commands(message: target_pb2.RoundCommands, places: int, vocab_size: int) -> Iterator[Command]:
    growth = message.growth
    if not growth.session_ids:
        return
    _check_places("growth.places", growth.places, places)
    _check_nodes(growth, vocab_size)
    node_ids, parents, tokens = list(growth.node_ids), list(growth.parents), list(growth.tokens)
    acceptances = floats_from_bytes(growth.acceptance).tolist()
    distributions: Sequence[DraftDistribution | None] = ()
    if growth.HasField("distributions"):
        try:
            distributions = unpack_distributions(growth.distributions, len(tokens))
        except ValueError as error:
            raise InvalidRequest([FieldViolation("growth.distributions", str(error))]) from error
    columns = zip(
        growth.session_ids, growth.epochs, growth.places, growth.as_of, split_by_counts(growth.node_counts), strict=True
    )
    for session_id, epoch, place, as_of, nodes in columns:
        for drafter, part in _by_source(growth.sources, nodes):
            yield GrowthCommand(
                key=(message.incarnation, session_id),
                epoch=epoch,
                place=place,
                as_of=as_of,
                node_ids=node_ids[part],
                parents=parents[part],
                tokens=tokens[part],
                acceptances=acceptances[part],
                drafter=drafter,
                distributions=distributions[part],
            )


def _by_source(sources: Sequence[int], nodes: slice) -> Iterator[tuple[int, slice]]:
    """Runs of a session's nodes that are of one source."""
    if not sources:
        yield GrowthSource.MODEL, nodes
        return
    begin = nodes.start
    for source, run in groupby(sources[nodes]):
        end = begin + sum(1 for _ in run)
        yield source, slice(begin, end)
        begin = end


def _check_places(name: str, given: Sequence[int], places: int) -> None:
    if given and (highest := max(given)) >= places:
        raise InvalidRequest([FieldViolation(name, f"{highest} given, below {places} needed")])


def _check_nodes(growth: target_pb2.RelayedGrowth, vocab_size: int) -> None:
    violations = list[FieldViolation]()
    node_ids, acceptance = growth.node_ids, floats_from_bytes(growth.acceptance)
    if node_ids and not 1 <= min(node_ids) <= max(node_ids) <= _MOST_ID:
        violations.append(FieldViolation("growth.node_ids", f"1 to {_MOST_ID} needed"))
    if growth.parents and max(growth.parents) > _MOST_ID:
        violations.append(FieldViolation("growth.parents", f"0 to {_MOST_ID} needed"))
    if growth.as_of and max(growth.as_of) > _MOST_ID:
        violations.append(FieldViolation("growth.as_of", f"0 to {_MOST_ID} needed"))
    if growth.tokens and (highest := max(growth.tokens)) >= vocab_size:
        violations.append(FieldViolation("growth.tokens", f"{highest} given, ids below {vocab_size} needed"))
    # Whatever is no number is not in between either.
    if not bool(np.all((acceptance >= 0) & (acceptance <= 1))):
        violations.append(FieldViolation("growth.acceptance", "numbers from 0 to 1 needed"))
    if growth.sources and not set(growth.sources) <= set(GrowthSource):
        violations.append(FieldViolation("growth.sources", "one of those in common.proto needed"))
    if violations:
        raise InvalidRequest(violations)
