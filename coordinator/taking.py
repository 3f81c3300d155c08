"""Tokens that a step gave its sessions, appended to them.

Of most sessions nothing is asked but whether these tokens end it: what is done for those is what cannot be left out.
The others take theirs with care (`Session.take_with_care`).
"""

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

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
    accepted = list(map(min, map(len, verdicts.accepted), map(len, kept)))
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
