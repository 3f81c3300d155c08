"""Growth as it arrives from a draft worker: whose it is, what it says of its draft, and who is told."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.coordinator import clock
from outrider.coordinator.messages import GrowthBatch
from outrider.coordinator.mirror import graft
from outrider.coordinator.session import Session
from outrider.growth_source import GrowthSource

if TYPE_CHECKING:
    from outrider.coordinator.draft_peer import DraftPeer
    from outrider.coordinator.totals import Totals

Owners = Sequence[Session | None]
"""[S] of a message's sessions; None where its growth is not wanted."""


def take_growth(
    peer: "DraftPeer",
    growth: GrowthBatch,
    sessions: Mapping[int, Session],
    *,
    drafts: Mapping[str, "DraftPeer"],
    totals: "Totals",
) -> Owners:
    """Adds what a draft has grown. It may be late, for sessions that have ended, or of old epochs.

    Args:
        peer: the draft.
        growth: its message.
        sessions: by id.
        drafts: all of them, by worker id.
        totals: where it is counted.
    """
    _note_step(peer, growth, totals)
    worker_id = peer.worker_id
    owners = [
        session if session is not None and session.draft_epochs.get(worker_id) == epoch else None
        for session, epoch in zip(map(sessions.get, growth.session_ids), growth.epochs, strict=True)
    ]
    if not peer.has_model:
        peer.note_answers(
            growth, [own if own is not None and _is_waited_for(peer, own, drafts) else None for own in owners]
        )
    elif _is_by_model(growth):
        peer.note_answers(growth, owners)
    else:
        _note_rests(growth, owners)
    grafted = graft(worker_id, growth, [None if session is None else session.mirror for session in owners])
    totals.dropped_nodes += len(growth.node_ids) - sum(grafted)
    note_grafted(worker_id, growth, owners, grafted)
    return owners


def note_grafted(worker_id: str, growth: GrowthBatch, owners: Owners, grafted: Sequence[int]) -> None:
    """Tells who counts, records or watches it; `grafted`: [S] nodes."""
    for session, as_of, nodes, new in zip(owners, growth.as_of, growth.node_counts, grafted, strict=True):
        if session is None:
            continue
        session.grafted_nodes += new
        if session.tap is not None:
            session.tap.note_growth(worker_id, as_of=as_of)
        if session.request.trace:
            session.note_growth(worker_id, as_of=as_of, nodes=nodes, grafted=new)


def _note_rests(growth: GrowthBatch, owners: Owners) -> None:
    """A trie has said all that there will be of a commit: the model beside it rests, and is not waited for."""
    for session, as_of, is_all in zip(owners, growth.as_of, growth.complete, strict=True):
        if session is not None and is_all and as_of == session.rows.length[session.row]:
            session.rows.unanswered[session.row] = 0


def _is_by_model(growth: GrowthBatch) -> bool:
    return growth.is_step and (growth.sources is None or bool((growth.sources == GrowthSource.MODEL).any()))


def _note_step(peer: "DraftPeer", growth: GrowthBatch, totals: "Totals") -> None:
    # What a trie beside a model finds comes before the model's step, and says nothing of when that ends.
    is_step = peer.has_model and _is_by_model(growth)
    if is_step or not peer.has_model:
        peer.last_growth_ns = clock.now_ns()
    if is_step:
        totals.demand.note_growth(
            sessions=len(growth.session_ids),
            expanded=peer.note_width(growth),
            step_ns=peer.link.step_latency.mean_ns,
        )


def _is_waited_for(peer: "DraftPeer", session: Session, drafts: Mapping[str, "DraftPeer"]) -> bool:
    """Whether it is this draft's growth that a free target would wait for."""
    if len(session.draft_epochs) == 1 or peer.has_model:
        return True
    return not any(drafts[worker_id].has_model for worker_id in session.draft_epochs)
