"""Tokens that a step gave its sessions, appended to them.

Of most sessions nothing is asked but whether these tokens end it, and that is found for all of them at once; what is
done for each is what cannot be left out. The others take theirs with care (`Session.take_with_care`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from outrider.coordinator.group import Group
from outrider.coordinator.rows import Ints
from outrider.coordinator.session import Undelivered
from outrider.coordinator.verdicts import Verdicts

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Step

# Of a tuple of its fields, without a call in Python.
_undelivered = partial(tuple.__new__, Undelivered)


def take(group: Group, verdicts: Verdicts, step: "Step", nodes: Ints) -> list[Sequence[int]]:
    """Appends what the target accepted; clients hear of it when the next batch has left (`Session.deliver`).

    Args:
        group: S sessions.
        verdicts: [S] with tokens.
        step: whose they are.
        nodes: [S] of the trees that were verified.

    Returns:
        [S] tokens that are kept.
    """
    kept = list(verdicts.token_ids)
    careful = _careful(group, kept)
    accepted = list(map(min, map(len, verdicts.accepted), map(len, kept)))
    logprobs = verdicts.logprobs or repeat(None)
    told = map(_undelivered, zip(kept, repeat(None), logprobs, verdicts.accepted, repeat(step), repeat(())))
    columns = zip(group.sessions, verdicts.token_ids, told, nodes.tolist(), accepted, strict=True)
    for place, (session, token_ids, news, drafted, right) in enumerate(columns):
        if session.undelivered is not None:
            session.deliver()
        if place in careful:
            kept[place] = session.take_with_care(verdicts[place], step)
            session.accepted_tokens += min(right, len(kept[place]))
        else:
            session.token_ids.extend(token_ids)
            session.undelivered = news
            session.accepted_tokens += right
        session.flight = None
        session.verify_steps += 1
        session.drafted_tokens += drafted
    first = group.states.told_ns[group.rows] == 0
    if first.any():
        _note_cached(group, verdicts, np.flatnonzero(first).tolist())
    return kept


def _careful(group: Group, token_ids: Sequence[Sequence[int]]) -> set[int]:
    """Places of the sessions that are watched, whose text is looked at, or that these tokens may end."""
    counts = np.array(list(map(len, token_ids)))
    is_careful = ~group.is_plain | (group.states.length[group.rows] + counts >= group.ends)
    is_careful |= np.array([session.tap is not None for session in group.sessions])
    if stop_ids := group.stop_ids:
        is_careful |= np.array([new[-1] in stop_ids for new in token_ids])
    return set(np.flatnonzero(is_careful).tolist())


def _note_cached(group: Group, verdicts: Verdicts, places: Sequence[int]) -> None:
    """How much of the prompt the first target had, of sessions that have their first tokens."""
    for place in places:
        session = group.sessions[place]
        if session.cached_tokens is None:
            session.cached_tokens = verdicts.cached_tokens[place] if verdicts.cached_tokens else 0
