"""Whether a target's answer is as most are, as one loop over its columns.

For where numba is there; whatever does not pass it, `answers.py` looks at entry by entry, and says what is wrong.
"""

from typing import Any

from outrider.compiled import compiled


@compiled
def is_usual(  # noqa: PLR0917
    outcomes: Any,
    token_counts: Any,
    accepted_counts: Any,
    tokens: Any,
    accepted: Any,
    node_counts: Any,
    outcome: int,
    vocab_size: int,
) -> bool:
    """Whether all S sessions have this outcome, with tokens and accepted nodes as a walk of their tree gives them.

    Args:
        outcomes: [S]
        token_counts: [S]
        accepted_counts: [S]
        tokens: [T] session by session.
        accepted: [A] numbers of accepted nodes, session by session.
        node_counts: [S] nodes of each tree.
        outcome: that each has to have.
        vocab_size: ids from here on stand for no token.
    """
    token, node = 0, 0
    for session in range(len(outcomes)):
        emitted, taken = token_counts[session], accepted_counts[session]
        if (
            outcomes[session] != outcome
            or not 0 < emitted <= len(tokens) - token
            or not emitted - 1 <= taken <= emitted
        ):
            return False
        for _ in range(emitted):
            if not 0 <= tokens[token] < vocab_size:
                return False
            token += 1
        if taken > len(accepted) - node:
            return False
        before = 0
        for _ in range(taken):
            if not before < accepted[node] <= node_counts[session]:
                return False
            before = accepted[node]
            node += 1
    return token == len(tokens) and node == len(accepted)
