"""Tokens that a step gave its sessions, appended to them.

Of most sessions nothing is asked but whether these tokens end it, and most go on: they have theirs when the next batch
has left. The others (`careful_places`) take them at once, with care (`Session.take_with_care`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from outrider.compiled import entries
from outrider.coordinator.commit_kernels import all_go_on
from outrider.coordinator.group import Group
from outrider.coordinator.rows import Ints
from outrider.coordinator.session import Session, Undelivered
from outrider.coordinator.verdicts import Verdicts

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Step

# Of a tuple of its fields, without a call in Python.
_undelivered = partial(tuple.__new__, Undelivered)


def careful_places(group: Group, verdicts: Verdicts, lengths: Ints) -> list[int]:
    """Of S sessions those that these tokens may end, and those whose tokens somebody looks at.

    Args:
        group: the sessions.
        verdicts: [S] with tokens.
        lengths: [S] committed tokens before.
    """
    places = group.careful + [place for place, session in enumerate(group.sessions) if session.tap is not None]
    accepted, emitted = verdicts.accepted.counts, verdicts.token_ids.counts
    if not all_go_on(*map(entries, (lengths, emitted, accepted, group.ends))):
        places += np.flatnonzero((lengths + emitted >= group.ends) | (accepted > emitted)).tolist()
    if group.stop_ids:
        values, sessions = verdicts.token_ids.values, group.sessions
        last = [values[end] for end in (np.cumsum(emitted) - 1).tolist()]
        if not group.stop_ids.isdisjoint(last):
            places += [place for place, token in enumerate(last) if token in sessions[place].stop_ids]
    return sorted(set(places)) if places else places


def take_carefully(
    group: Group, verdicts: Verdicts, step: "Step", nodes: Ints, places: Sequence[int]
) -> list[Sequence[int]]:
    """Appends to these what the target accepted; clients hear of it when the next batch has left (`Session.deliver`).

    Args:
        group: S sessions.
        verdicts: [S] with tokens.
        step: whose they are.
        nodes: [S] of the trees that were verified.
        places: [C] of the sessions.

    Returns:
        [C] tokens that are kept.
    """
    kept = []
    for place in places:
        session, verdict = group.sessions[place], verdicts[place]
        if session.undelivered is not None:
            session.deliver()
        if session.is_plain and session.tap is None and not _ends(session, verdict.token_ids):
            session.token_ids += verdict.token_ids
            session.undelivered = Undelivered(verdict.token_ids, None, verdict.logprobs, verdict.accepted_nodes, step)
            kept.append(verdict.token_ids)
        else:
            kept.append(session.take_with_care(verdict, step))
        right = min(len(verdict.accepted_nodes), len(verdict.token_ids), len(kept[-1]))
        _count(session, int(nodes[place]), right, verdict.cached_tokens)
    return kept


def take_plainly(group: Group, verdicts: Verdicts, step: "Step", nodes: Ints, careful: Sequence[int]) -> None:
    """The same of all others; `careful`: places of those that have theirs."""
    logprobs, cached_tokens = verdicts.logprobs or repeat(None), verdicts.cached_tokens or repeat(0)
    token_ids, accepted = verdicts.token_ids, verdicts.accepted
    told = map(_undelivered, zip(token_ids, repeat(None), logprobs, accepted, repeat(step), repeat(())))
    counts = zip(nodes.tolist(), accepted.counts.tolist(), cached_tokens, strict=False)
    left_out = set(careful)
    columns = zip(group.sessions, token_ids, told, counts, strict=True)
    for place, (session, tokens, news, (drafted, right, cached)) in enumerate(columns):
        if place in left_out:
            continue
        if session.undelivered is not None:
            session.deliver()
        session.token_ids += tokens
        session.undelivered = news
        _count(session, drafted, right, cached)


def _ends(session: Session, token_ids: Sequence[int]) -> bool:
    return token_ids[-1] in session.stop_ids or len(session.token_ids) + len(token_ids) >= session.end


def _count(session: Session, drafted: int, accepted: int, cached: int) -> None:
    session.verify_steps += 1
    session.drafted_tokens += drafted
    session.accepted_tokens += accepted
    if session.cached_tokens is None:
        session.cached_tokens = cached
