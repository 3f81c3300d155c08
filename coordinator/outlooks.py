"""What growth a free target may expect: of which draft, when, and what it is worth to the sessions of the next batch.

Sessions that expect it of one draft at one time are one outlook. `firing.py` says whether to wait for it.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from outrider.coordinator.draft_peer import DraftPeer
from outrider.coordinator.firing import GrowthForecast, Outlook
from outrider.coordinator.group import Bools, Group
from outrider.coordinator.rows import Ints
from outrider.coordinator.tree_choice import TreeChoice

# A draft that has answered none of a session's last commits is waited for at every so many of them only.
_RETRY_COMMITS = 8
_NOBODY = -1


def outlooks(trees: TreeChoice, group: Group, drafts: Mapping[str, DraftPeer], now_ns: int) -> list[Outlook]:
    """What S sessions may expect.

    Args:
        trees: of their target.
        group: the sessions.
        drafts: by worker id.
        now_ns: the time.
    """
    states, rows, peers = group.states, group.rows, list(drafts.values())
    unanswered = states.unanswered[rows]
    is_due = group.is_async & ((unanswered <= 1) | (unanswered % _RETRY_COMMITS == 0))
    speakers = _speakers(group, states.draft[rows], peers, drafts)
    speakers[~is_due] = _NOBODY
    if not peers or speakers.max() == _NOBODY:
        return []
    # A last entry stands for nobody, which is what -1 finds.
    has_model = np.array([*(peer.has_model for peer in peers), True])[speakers]
    widths = np.array([*(peer.width for peer in peers), 0.0])[speakers]
    leaves = trees.leaf_values(group, widths=widths, by_model=has_model)
    counted = (speakers != _NOBODY) & (leaves.values > 0) & (has_model | (unanswered > 0))
    last_ns = np.array([*(peer.last_growth_ns for peer in peers), 0])[speakers]
    # The step that the draft is in may expand what has just become the root, although it does not know of it yet; else
    # it has to hear of it first.
    in_step = [bool(peer.link.step_latency.left_ns(now_ns - peer.last_growth_ns)) for peer in peers]
    by_itself = states.was_drafted[rows] & leaves.has_tree & np.array([*in_step, False])[speakers]
    answers = (unanswered > 0) & ~by_itself
    since_ns = np.where(answers, states.committed_ns[rows], last_ns)
    return _together(peers, speakers[counted], since_ns[counted], answers[counted], leaves.values[counted])


def _speakers(group: Group, numbers: Ints, peers: list[DraftPeer], drafts: Mapping[str, DraftPeer]) -> Ints:
    """[S] the place of the draft that is expected to speak of each session next; -1 where there is none."""
    speakers = np.full(len(group), _NOBODY)
    for place, peer in enumerate(peers):
        speakers[numbers == peer.number] = place
    for at in np.flatnonzero(numbers < 0).tolist():
        own = [peer for worker_id in group.sessions[at].draft_epochs if (peer := drafts.get(worker_id)) is not None]
        # A trie answers a commit at once and then says no more: what there is to wait for is a model's.
        if (speaker := max(own, key=lambda peer: (peer.has_model, peer.last_growth_ns), default=None)) is not None:
            speakers[at] = peers.index(speaker)
    return speakers


def _together(
    peers: list[DraftPeer], speakers: Ints, since_ns: Ints, answers: Bools, values: npt.NDArray[np.float64]
) -> list[Outlook]:
    sums: defaultdict[tuple[int, int, bool], float] = defaultdict(float)
    kinds = zip(speakers.tolist(), since_ns.tolist(), answers.tolist(), strict=True)
    for kind, value in zip(kinds, values.tolist(), strict=True):
        sums[kind] += value
    found = []
    for (speaker, since, is_answer), value in sums.items():
        peer = peers[speaker]
        step = peer.link.step_latency
        forecast = GrowthForecast(since_ns=since, latency=peer.response if is_answer else step, step=step)
        found.append(Outlook(forecast=forecast, value=value))
    return found
