"""The walk of many trees at once against a plain walk of one, and where it ends for its session."""

import random

import pytest
import torch

from outrider.target_worker.walk import accepted_paths, emit

NO_STOP: frozenset[int] = frozenset()


def plain_walk(choices: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    path, node = [], 0
    while True:
        matching = [
            number
            for number, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1)
            if parent == node and token == choices[node]
        ]
        if not matching:
            return path
        node = matching[0]
        path.append(node)


def test_every_tree_of_a_batch_is_walked_as_if_alone() -> None:
    rng, longest = random.Random(0), 0
    for _ in range(60):
        trees, choices = [], []
        for _ in range(rng.randint(1, 6)):
            count = rng.randint(0, 12)
            parents = [rng.randint(0, number) for number in range(count)]
            trees.append(([rng.randrange(3) for _ in parents], parents))
            choices.append([rng.randrange(3) for _ in range(count + 1)])
        flat = [choice for row in choices for choice in row]
        paths, on_host = accepted_paths(torch.tensor(flat), trees)
        assert on_host == flat
        assert paths == [plain_walk(row, *tree) for row, tree in zip(choices, trees, strict=True)]
        longest = max(longest, *map(len, paths))
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
    assert emit([1, 2, 3], [5, 6, 7, 8], stop_token_ids=stop, room=room) == expected


def test_of_equal_siblings_the_first_is_taken() -> None:
    assert accepted_paths(torch.tensor([4, 0, 1, 1]), [([4, 4, 4], [0, 0, 0])])[0] == [[1]]
