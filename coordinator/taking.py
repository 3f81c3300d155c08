"""Tokens that a step gave its sessions, appended to them.

Of most sessions nothing is asked but whether these tokens end it: what is done for those is what cannot be left out,
and where that is known of all of them at once (`goes_on_plainly`) it is done when the next batch has left. The others
take theirs with care (`Session.take_with_care`).
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
from outrider.coordinator.session import Undelivered
from outrider.coordinator.verdicts import Verdicts

if TYPE_CHECKING:
    from outrider.coordinator.rounds import Step

# Of a tuple of its fields, without a call in Python.
_undelivered = partial(tuple.__new__, Undelivered)


def goes_on_plainly(group: Group, verdicts: Verdicts, lengths: Ints) -> bool:
    """Whether S sessions go on, all of them, and nobody looks at what they have got before clients do.

    Args:
        group: the sessions.
        verdicts: [S] with tokens.
        lengths: [S] committed tokens before.
    """
    accepted, emitted = verdicts.accepted.counts, verdicts.token_ids.counts
    if not group.is_plain or not all_go_on(*map(entries, (lengths, emitted, accepted, group.ends))):
        return False
    values = verdicts.token_ids.values
    if group.stop_ids and not group.stop_ids.isdisjoint([values[end] for end in (np.cumsum(emitted) - 1).tolist()]):
        return False
    return not any(session.tap for session in group.sessions)


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
    accepted = np.minimum(verdicts.accepted.counts, verdicts.token_ids.counts).tolist()
    logprobs = verdicts.logprobs or repeat(None)
    told = map(_undelivered, zip(kept, repeat(None), logprobs, verdicts.accepted, repeat(step), repeat(())))
    columns = zip(group.sessions, verdicts.token_ids, told, nodes.tolist(), accepted, strict=True)
    for place, (session, token_ids, news, drafted, right) in enumerate(columns):
        if session.undelivered is not None:
            session.deliver()
        own = session.token_ids
        if (
            session.is_plain
            and session.tap is None
            and token_ids[-1] not in session.stop_ids
            and len(own) + len(token_ids) < session.end
        ):
            own += token_ids
            session.undelivered = news
            session.accepted_tokens += right
        else:
            kept[place] = session.take_with_care(verdicts[place], step)
            session.accepted_tokens += min(right, len(kept[place]))
        session.flight = None
        session.verify_steps += 1
        session.drafted_tokens += drafted
        if session.cached_tokens is None:
            session.cached_tokens = verdicts.cached_tokens[place] if verdicts.cached_tokens else 0
    return kept


def take_plainly(group: Group, verdicts: Verdicts, step: "Step", nodes: Ints) -> None:
    """The same of sessions that go on plainly, of which this is all that is left to do."""
    logprobs, cached_tokens = verdicts.logprobs or repeat(None), verdicts.cached_tokens or repeat(0)
    told = map(
        _undelivered, zip(verdicts.token_ids, repeat(None), logprobs, verdicts.accepted, repeat(step), repeat(()))
    )
    counts = zip(nodes.tolist(), verdicts.accepted.counts.tolist(), cached_tokens, strict=False)
    for session, token_ids, news, (drafted, accepted, cached) in zip(
        group.sessions, verdicts.token_ids, told, counts, strict=True
    ):
        if session.undelivered is not None:
            session.deliver()
        session.token_ids += token_ids
        session.undelivered = news
        session.verify_steps += 1
        session.drafted_tokens += drafted
        session.accepted_tokens += accepted
        if session.cached_tokens is None:
            session.cached_tokens = cached
