"""Sessions whose draft is the target's own and never leaves it: which they are, and what is counted of them.

A target that introduces itself with `one_graph` drafts in the graph that verifies. Of a session that lets it, no nodes
are sent: the batch says `resident`, and the answer has the tokens, and how many nodes were drafted and accepted. Nodes
that other sources have grown for such a session are not sent: the target verifies one tree, and this one is there
without a message. A session is not resident where the target could not draft for it in a graph (a grammar, a rule with
coins), where it may not speculate, and where it names its sources and a head is none of them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from outrider.coordinator.commits import Committed
from outrider.coordinator.messages import ResidentCount
from outrider.coordinator.mirror import TreeMirror
from outrider.coordinator.session import Session
from outrider.coordinator.source_mix import Count
from outrider.growth_source import GrowthSource


def is_resident(session: Session) -> bool:
    """Whether a target that can draft for the session in its own graph is to do so."""
    return session.lets_target_draft and session.may_speculate


def resident_flags(sessions: Sequence[Session]) -> npt.NDArray[np.bool_]:
    """[S] which of the sessions are resident."""
    return np.array([is_resident(session) for session in sessions], dtype=np.bool_)


def credit(committed: Committed, resident: Mapping[int, ResidentCount]) -> None:
    """Counts what targets drafted themselves, in the round, in its sessions and of their source."""
    for place, session in enumerate(committed.sessions):
        count = resident.get(session.session_id)
        if count is None or not count.drafted:
            continue
        accepted = min(count.accepted, int(committed.emitted[place]))
        committed.nodes[place] += count.drafted
        committed.accepted[place] += accepted
        session.drafted_tokens += count.drafted
        session.accepted_tokens += accepted
        if isinstance(session.mirror, TreeMirror):
            _credit_source(session.mirror, count.drafted, accepted)


def _credit_source(mirror: TreeMirror, drafted: int, accepted: int) -> None:
    mix = mirror.forest.mix
    for counts in (mix.counts[mirror.row], mix.totals):
        # It never came here, so that it is no part of what the models' share is found from.
        counts[Count.DRAFTED, GrowthSource.EAGLE] += drafted
        # Column 0 has what no model has grown.
        for column in (0, GrowthSource.EAGLE):
            counts[Count.SUBMITTED, column] += drafted
            counts[Count.ACCEPTED, column] += accepted
