"""What a one-graph target's answer says of its own drafts: how many nodes, and how many of them were right.

Which nodes they were the coordinator never learns, so numbers of accepted nodes are counted here and go no further.
"""

from collections.abc import Mapping
from dataclasses import replace

from outrider.coordinator.messages import ResidentCount, VerifyResult
from outrider.coordinator.verdicts import Verdicts
from outrider.v1 import target_pb2

RESIDENT = -1
"""In the place of the count of nodes that were sent of a session: none, the target has them."""
# More a target cannot have: masks are words.
_MOST_DRAFTED = 64


def expected_counts(
    response: target_pb2.VerifyResponse, sent: Mapping[int, int]
) -> tuple[Mapping[int, int], dict[int, int]]:
    """The trees that an answer is about, and what of them was drafted by the target itself.

    Args:
        response: the answer.
        sent: nodes that each session of the batch sent, or `RESIDENT`.

    Returns:
        Nodes of every session's tree, and of the resident ones alone.

    Raises:
        ValueError: not one count a session, or one that no target has.
    """
    drafted = response.drafted_counts
    if drafted and len(drafted) != len(response.session_ids):
        raise ValueError(f"drafted_counts: {len(drafted)} given, {len(response.session_ids)} sessions")
    if drafted and max(drafted) > _MOST_DRAFTED:
        raise ValueError(f"drafted_counts: {max(drafted)} given, at most {_MOST_DRAFTED} needed")
    told = dict(zip(response.session_ids, drafted, strict=False))
    own = {session_id: told.get(session_id, 0) for session_id, count in sent.items() if count == RESIDENT}
    return {**sent, **own}, own


def counted_apart(result: VerifyResult, drafted: Mapping[int, int]) -> VerifyResult:
    """The result, with resident sessions' accepted nodes as counts: here nobody knows the nodes that have the numbers.

    Args:
        drafted: nodes of each resident session.
    """
    if not drafted:
        return result
    verdicts = Verdicts.of(result.verdicts)
    numbers = list(zip(verdicts.session_ids, verdicts.accepted, strict=True))
    resident = {own: ResidentCount(drafted[own], len(accepted)) for own, accepted in numbers if own in drafted}
    verdicts = Verdicts(
        session_ids=verdicts.session_ids,
        epochs=verdicts.epochs,
        accepted=[() if own in drafted else accepted for own, accepted in numbers],
        token_ids=verdicts.token_ids,
        deferred=verdicts.deferred,
        faults=verdicts.faults,
        logprobs=verdicts.logprobs,
        cached_tokens=verdicts.cached_tokens,
    )
    return replace(result, verdicts=verdicts, resident=resident)
