"""A coordinator's messages as commands.

Columns of different lengths leave open what belongs to whom: such a message is refused as a whole. Everything else that
is wrong concerns one session, which is told, and closed.
"""

import logging
from collections.abc import Iterator

import numpy as np

from outrider.drafting.draft_distribution import unpack_distributions
from outrider.drafting.growth_source import ALL_SOURCES, GrowthSource, sources_from_proto
from outrider.errors import FieldViolation, InvalidRequest
from outrider.roles.log_output import about
from outrider.sampling import SamplingSpec, mode_from_proto
from outrider.target_worker.rounds.commands import (
    BoundsCommand,
    CloseCommand,
    Command,
    OpenCommand,
    PlaceChange,
    PlaceCommand,
    RefuseCommand,
    RoundOwner,
)
from outrider.target_worker.rounds.growth import Growth
from outrider.target_worker.sessions.requests import (
    WITHOUT_BOUND,
    WITHOUT_LIMIT,
    Code,
    OpenRequest,
    SessionFault,
)
from outrider.v1 import common_pb2, target_pb2
from outrider.wire import MOST_NODES, floats_from_bytes, uints_from_bytes

logger = logging.getLogger(__name__)

_MOST = (1 << 31) - 1
"""The largest number of a record."""
_MOST_SOURCE = 7

_Bounds = dict[tuple[int, int], tuple[int, bool]]
"""By session id and epoch: `allow`, and whether the session is alone."""

_CHANGES = {
    target_pb2.PLACE_CHANGE_TAKEN: PlaceChange.TAKEN,
    target_pb2.PLACE_CHANGE_LEFT: PlaceChange.LEFT,
    target_pb2.PLACE_CHANGE_RESENT: PlaceChange.RESENT,
}


def unpack(message: target_pb2.RoundCommands, owner: RoundOwner, *, vocab_size: int, places: int) -> list[Command]:
    """Return the commands of a message, in the order in which they take effect.

    Args:
        message: as it came.
        owner: of the sessions that it opens.
        vocab_size: of the target.
        places: D.

    Raises:
        InvalidRequest: columns of different lengths.
    """
    violations = [
        FieldViolation(name, f"{count} entries given, {needed} needed")
        for name, count, needed in _column_lengths(message)
        if count != needed
    ]
    if violations:
        raise InvalidRequest(violations)
    bounds = _bounds(message)
    return [
        *(_open_command(message.incarnation, opening, owner, bounds) for opening in message.opens),
        *_place_commands(message, owner, places),
        *_grow_commands(message, owner, vocab_size=vocab_size, places=places),
        *_bounds_commands(message.incarnation, owner, bounds),
        *(
            CloseCommand((message.incarnation, session_id), epoch)
            for session_id, epoch in zip(message.close_session_ids, message.close_epochs, strict=True)
        ),
    ]


def _column_lengths(message: target_pb2.RoundCommands) -> list[tuple[str, int, int]]:
    places, growth, bounds = message.places, message.growth, message.bounds
    changed, grown, bounded = len(places.session_ids), len(growth.session_ids), len(bounds.session_ids)
    nodes = sum(growth.node_counts)
    return [
        ("places.epochs", len(places.epochs), changed),
        ("places.places", len(places.places), changed),
        ("places.changes", len(places.changes), changed),
        ("growth.epochs", len(growth.epochs), grown),
        ("growth.places", len(growth.places), grown),
        ("growth.as_of", len(growth.as_of), grown),
        ("growth.node_counts", len(growth.node_counts), grown),
        ("growth.node_ids, bytes", len(growth.node_ids), 4 * nodes),
        ("growth.parents, bytes", len(growth.parents), 4 * nodes),
        ("growth.tokens, bytes", len(growth.tokens), 4 * nodes),
        ("growth.acceptance, bytes", len(growth.acceptance), 4 * nodes),
        ("growth.sources", len(growth.sources), nodes if growth.sources else 0),
        ("growth.complete", len(growth.complete), grown if growth.complete else 0),
        ("bounds.epochs", len(bounds.epochs), bounded),
        ("bounds.allow", len(bounds.allow), bounded),
        ("bounds.alone", len(bounds.alone), bounded if bounds.alone else 0),
        ("close_epochs", len(message.close_epochs), len(message.close_session_ids)),
    ]


def _bounds(message: target_pb2.RoundCommands) -> _Bounds:
    bounds = message.bounds
    alone = bounds.alone or [False] * len(bounds.session_ids)
    ids = zip(bounds.session_ids, bounds.epochs, strict=True)
    return dict(zip(ids, zip(bounds.allow, alone, strict=True), strict=True))


def _open_command(incarnation: int, opening: common_pb2.SessionOpen, owner: RoundOwner, bounds: _Bounds) -> Command:
    """Return the command that opens a session, within the bounds that the same message sets; takes these out."""
    key, epoch, limits = (incarnation, opening.session_id), opening.epoch, opening.limits
    ids = about(session_id=opening.session_id, epoch=epoch)
    logger.debug("session %d, epoch %d is opened", opening.session_id, epoch, extra=ids)
    try:
        mode = mode_from_proto(limits.mode)
    except ValueError as error:
        return _refusal(owner, incarnation, opening.session_id, epoch, f"limits.mode: {error}")
    allow, is_alone = bounds.pop((opening.session_id, epoch), (WITHOUT_LIMIT, False))
    try:
        request = OpenRequest(
            key=key,
            epoch=epoch,
            prompt=uints_from_bytes(opening.prompt).tolist(),
            output=uints_from_bytes(opening.output).tolist(),
            sampling=SamplingSpec.from_proto(opening.sampling),
            weights=opening.weights,
            mode=mode,
            sync_wait_ms=limits.sync_wait_ms,
            max_nodes=min(limits.max_nodes or WITHOUT_BOUND, WITHOUT_BOUND),
            max_depth=min(limits.max_depth or WITHOUT_BOUND, WITHOUT_BOUND),
            allow=min(allow, WITHOUT_LIMIT),
            is_alone=is_alone,
            sources=sources_from_proto(opening.sources, default=ALL_SOURCES),
        )
    except ValueError as error:
        message = f"prompt, output or sampling: {error}"
        return _refusal(owner, incarnation, opening.session_id, epoch, message)
    return OpenCommand(owner, request)


def _refusal(owner: RoundOwner, incarnation: int, session_id: int, epoch: int, message: str) -> RefuseCommand:
    return RefuseCommand(owner, (incarnation, session_id), epoch, SessionFault(Code.INVALID_ARGUMENT, message))


def _place_commands(message: target_pb2.RoundCommands, owner: RoundOwner, places: int) -> Iterator[Command]:
    columns = message.places
    for session_id, epoch, place, change in zip(
        columns.session_ids, columns.epochs, columns.places, columns.changes, strict=True
    ):
        if place >= places:
            fault = f"places.places: {place} given, below {places} needed"
            yield _refusal(owner, message.incarnation, session_id, epoch, fault)
        elif change not in _CHANGES:
            fault = f"places.changes: {change} given, 1 (taken), 2 (left) or 3 (resent) needed"
            yield _refusal(owner, message.incarnation, session_id, epoch, fault)
        else:
            yield PlaceCommand((message.incarnation, session_id), epoch, place, _CHANGES[change])


def _bounds_commands(incarnation: int, owner: RoundOwner, bounds: _Bounds) -> Iterator[Command]:
    for (session_id, epoch), (allow, is_alone) in bounds.items():
        if allow > WITHOUT_LIMIT:
            fault = f"bounds.allow: {allow} given, at most {WITHOUT_LIMIT} needed"
            yield _refusal(owner, incarnation, session_id, epoch, fault)
        else:
            yield BoundsCommand((incarnation, session_id), epoch, allow, is_alone)


def _grow_commands(
    message: target_pb2.RoundCommands, owner: RoundOwner, *, vocab_size: int, places: int
) -> Iterator[Command]:
    if not message.growth.session_ids:
        return
    growth = _unpack_growth(message)
    if faults := _growth_faults(growth, vocab_size=vocab_size, places=places):
        for number, fault in faults.items():
            yield _refusal(owner, *growth.keys[number], growth.epochs[number], fault)
        growth = growth.without(faults)
    if growth.keys:
        yield growth


def _unpack_growth(message: target_pb2.RoundCommands) -> Growth:
    growth = message.growth
    node_ids = uints_from_bytes(growth.node_ids).astype(np.int64)
    nodes = len(node_ids)
    drafters = np.zeros(nodes, np.int64)
    drafters[: len(growth.sources)] = growth.sources
    # A number that a newer peer knows, and what has none.
    drafters[(drafters < 1) | (drafters > _MOST_SOURCE)] = int(GrowthSource.MODEL)
    try:
        has_any = growth.HasField("distributions")
        distributions = unpack_distributions(growth.distributions, nodes) if has_any else ()
    except ValueError as error:
        raise InvalidRequest([FieldViolation("growth", str(error))]) from error
    return Growth(
        keys=[(message.incarnation, session_id) for session_id in growth.session_ids],
        epochs=list(growth.epochs),
        places=list(growth.places),
        as_of=list(growth.as_of),
        counts=list(growth.node_counts),
        node_ids=node_ids,
        parents=uints_from_bytes(growth.parents).astype(np.int64),
        tokens=uints_from_bytes(growth.tokens).astype(np.int64),
        acceptances=floats_from_bytes(growth.acceptance),
        drafters=drafters,
        distributions=distributions,
        complete=list(growth.complete),
    )


def _growth_faults(growth: Growth, *, vocab_size: int, places: int) -> dict[int, str]:
    """Return what is wrong with sessions' growth, by the index of each."""
    node_ids, parents, tokens, acceptances = growth.node_ids, growth.parents, growth.tokens, growth.acceptances
    owners = np.repeat(np.arange(len(growth.keys)), growth.counts)
    of_sessions = [
        (f"growth.places: below {places} needed", np.greater_equal(growth.places, places)),
        (f"growth.as_of: 1 to {_MOST} needed", np.less(growth.as_of, 1) | np.greater(growth.as_of, _MOST)),
        (f"growth.node_counts: at most {MOST_NODES} needed", np.greater(growth.counts, MOST_NODES)),
    ]
    of_nodes = [
        (f"growth.node_ids: 1 to {_MOST} needed", (node_ids < 1) | (node_ids > _MOST)),
        (f"growth.parents: at most {_MOST} needed", parents > _MOST),
        (f"growth.tokens: ids below {vocab_size} needed", tokens >= vocab_size),
        # NaN is in no range.
        ("growth.acceptance: 0 to 1 needed", ~((acceptances >= 0) & (acceptances <= 1))),
    ]
    faults = {number: fault for fault, is_wrong in of_sessions for number in np.flatnonzero(is_wrong).tolist()}
    faults |= {number: fault for fault, is_wrong in of_nodes if is_wrong.any() for number in owners[is_wrong].tolist()}
    for number, token, distribution in zip(owners, tokens.tolist(), growth.distributions, strict=False):
        fault = None if distribution is None else distribution.fault(token, vocab_size)
        if fault is not None:
            faults[int(number)] = f"growth.distributions: {fault}"
    return faults
