"""What a target that drafts by itself has grown: it comes with a verify result, and is grafted right after its commits.

Nothing waits for it, and nothing depends on it. Growth that cannot be used is dropped; the result that brought it
counts all the same.
"""

import logging
from collections.abc import Mapping

import numpy as np

from outrider.coordinator.growth import growth_batch
from outrider.coordinator.growth_arrival import note_grafted
from outrider.coordinator.messages import GrowthBatch, SpeculationMode
from outrider.coordinator.mirror import graft
from outrider.coordinator.session import Session
from outrider.v1 import target_pb2

logger = logging.getLogger(__name__)

_ANY_TOKEN = 1 << 31


def resident_growth(response: target_pb2.VerifyResponse, vocab_size: int | None) -> GrowthBatch | None:
    """What a result brings along; None where that is nothing, or nothing can be made of it.

    Args:
        vocab_size: of the target; None takes any token.
    """
    if not response.HasField("growth") or not response.growth.session_ids:
        return None
    try:
        growth = growth_batch(response.growth, _ANY_TOKEN if vocab_size is None else vocab_size)
    except ValueError as error:
        logger.warning("step %d: what the target has drafted is dropped: %s", response.step, error)
        return None
    if len(set(growth.session_ids)) < len(growth.session_ids) or (growth.parents >= growth.node_ids).any():
        logger.warning("step %d: what the target has drafted is dropped: sessions or nodes out of order", response.step)
        return None
    return growth


def graft_resident(worker_id: str, growth: GrowthBatch, sessions: Mapping[int, Session]) -> tuple[int, int]:
    """Adds what a target has drafted to the mirrors of its sessions, after their commits.

    Args:
        worker_id: of the target.
        growth: of its result.
        sessions: that it has, by id.

    Returns:
        Nodes that came, and those that were dropped.
    """
    wanted = [
        session if (session := sessions.get(session_id)) is not None and _is_wanted(session, worker_id, epoch) else None
        for session_id, epoch in zip(growth.session_ids, growth.epochs, strict=True)
    ]
    grafted = graft(worker_id, growth, [None if session is None else session.mirror for session in wanted])
    note_grafted(worker_id, growth, wanted, grafted)
    nodes = len(growth.node_ids)
    return nodes, nodes - int(np.sum(grafted))


def _is_wanted(session: Session, worker_id: str, epoch: int) -> bool:
    is_current = session.target_id == worker_id and session.target_epoch == epoch and not session.is_finished
    return is_current and session.mode is not SpeculationMode.OFF
