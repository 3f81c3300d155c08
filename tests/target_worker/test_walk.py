"""Where a walk ends for its session."""

import pytest

from outrider.target_worker.walk import Walk, emit

NO_STOP: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("stop", "room", "expected"),
    [
        (NO_STOP, 9, ([1, 2, 3], [5, 6, 7, 8])),
        (NO_STOP, 4, ([1, 2, 3], [5, 6, 7, 8])),
        (NO_STOP, 3, ([1, 2, 3], [5, 6, 7])),
        (NO_STOP, 1, ([1], [5])),
        (frozenset({6}), 9, ([1, 2], [5, 6])),
        (frozenset({8}), 9, ([1, 2, 3], [5, 6, 7, 8])),
        (frozenset({9}), 9, ([1, 2, 3], [5, 6, 7, 8])),
    ],
)
def test_ends_at_a_stop_token_and_at_the_limit(
    stop: frozenset[int], room: int, expected: tuple[list[int], list[int]]
) -> None:
    walk = Walk(nodes=[1, 2, 3], tokens=[5, 6, 7, 8])
    assert emit(walk, stop_token_ids=stop, room=room) == expected
