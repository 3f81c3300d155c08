"""What a message of growth says of its S sessions, as loops over the columns of their rows.

Machine code where numba is there; a message has few sessions, so without it the same loops do in plain Python.
"""

from typing import Any

from outrider.compiled import compiled

_NOT_WANTED = -1


@compiled
def hear_again(  # noqa: PLR0917
    rows: Any, as_of: Any, view: Any, known: Any, length: Any, least: Any, is_only: bool, found: Any
) -> bool:
    """Growth of sessions of which the worker has spoken before.

    Args:
        rows: [S] 0 where it is not wanted.
        as_of: [S]
        view: [rows] of the worker's ids; -1 where it has not spoken yet.
        known: [rows] committed length that the worker knows of; raised.
        length: [rows] committed tokens.
        least: [rows] what all workers know of; raised.
        is_only: there is no other worker.
        found: [S] becomes the view of each; -1 where it is not wanted, or from the future.

    Returns:
        False where that was not all: nothing is raised then.
    """
    for session in range(len(rows)):
        row = rows[session]
        if row == 0 or as_of[session] > length[row]:
            found[session] = _NOT_WANTED
            continue
        found[session] = view[row]
        if view[row] < 0 or (as_of[session] > known[row] and not is_only):
            return False
    for session in range(len(rows)):
        row = rows[session]
        if found[session] >= 0 and as_of[session] > known[row]:
            known[row] = least[row] = as_of[session]
    return True


@compiled
def note_known(  # noqa: PLR0917
    rows: Any, as_of: Any, unanswered: Any, length: Any, was_drafted: Any, found: Any
) -> int:
    """Commits that are answered by growth that knows all.

    Args:
        rows: [S] 0 where it is not wanted.
        as_of: [S]
        unanswered: [rows] commits; set to 0.
        length: [rows] committed tokens.
        was_drafted: [rows] whether it may have grown without an answer.
        found: [S] gets the rows whose answer tells how long one takes.

    Returns:
        How many these are.
    """
    count = 0
    for session in range(len(rows)):
        row = rows[session]
        if unanswered[row] == 1 and as_of[session] == length[row] and not was_drafted[row]:
            found[count] = row
            count += 1
    for session in range(len(rows)):
        row = rows[session]
        if unanswered[row] > 0 and as_of[session] == length[row]:
            unanswered[row] = 0
    return count


@compiled
def count_expanded(parents: Any, counts: Any) -> int:
    """How many nodes have got children, which stand together.

    Args:
        parents: [N]
        counts: [S] nodes of each session.
    """
    expanded, node = 0, 0
    for session in range(len(counts)):
        before = _NOT_WANTED
        for _ in range(counts[session]):
            expanded += parents[node] != before
            before = parents[node]
            node += 1
    return expanded
