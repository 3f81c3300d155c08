"""The walk on the host against the operator, and where it ends."""

import random
from itertools import pairwise

import pytest
import torch

from outrider.kernels.verify_tree import verify_tree_greedy
from outrider.target_worker.walk import walk

NO_STOP: frozenset[int] = frozenset()


def by_operator(choices: list[int], tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    count = len(choices)
    children = [[number for number, parent in enumerate(parents, start=1) if parent == node] for node in range(count)]
    first = [below[0] if below else -1 for below in children]
    following = [-1] * count
    for below in children:
        for left, right in pairwise(below):
            following[left] = right
    predicts = torch.zeros(count, dtype=torch.int32)
    accept_index = torch.zeros((1, count), dtype=torch.int32)
    accepted = torch.zeros(1, dtype=torch.int32)
    verify_tree_greedy(
        predicts,
        accept_index,
        accepted,
        torch.tensor([[-1, *tokens]]),
        torch.arange(count)[None],
        torch.tensor([first]),
        torch.tensor([following]),
        torch.tensor([choices]),
    )
    path = accept_index[0, : int(accepted) + 1].tolist()
    return path[1:], [int(predicts[node]) for node in path]


def test_is_the_walk_of_verify_tree_greedy() -> None:
    rng, longest = random.Random(0), 0
    for _ in range(300):
        count = rng.randint(0, 12)
        parents = [rng.randint(0, number) for number in range(count)]
        tokens = [rng.randrange(3) for _ in parents]
        choices = [rng.randrange(3) for _ in range(count + 1)]
        walked = walk(choices, tokens, parents, stop_token_ids=NO_STOP, room=99)
        assert walked == by_operator(choices, tokens, parents)
        longest = max(longest, len(walked[0]))
    assert longest >= 4


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
    assert walk([5, 6, 7, 8], [5, 6, 7], [0, 1, 2], stop_token_ids=stop, room=room) == expected


def test_of_equal_siblings_the_first_is_taken() -> None:
    assert walk([4, 0, 1, 1], [4, 4, 4], [0, 0, 0], stop_token_ids=NO_STOP, room=9) == ([1], [4, 0])
