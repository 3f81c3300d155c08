from __future__ import annotations

import itertools
from typing import Any

import torch
from tests.kernels.tensors import POISON, first_path, walk_outputs

from outrider.kernels.backend import INTERPRETED
from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.verify_coupled import verify_coupled

# Arguments by name; Any, as they are also taken apart, replaced and left out.
Columns = dict[str, Any]
# Per request, the parents of its nodes (the root's is -1).
Trees = list[list[int]]


def _columns(logits: torch.Tensor, generator: torch.Generator) -> Columns:
    """Sampling arguments for `logits` [T, V]: greedy, plain and filtered rows by turns."""
    turn = torch.arange(logits.shape[0]) % 4
    return {
        "logits": logits,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (len(turn),), generator=generator),
        "positions": torch.randint(0, 10_000, (len(turn),), generator=generator),
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3])[turn],
        "top_k": torch.tensor([0, 0, 3, 0])[turn],
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.8])[turn],
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.01])[turn],
    }


def _random_trees(requests: int, most_nodes: int, generator: torch.Generator) -> Trees:
    def below(bound: int) -> int:
        return int(torch.randint(0, bound, (1,), generator=generator))

    return [[-1, *(below(node) for node in range(1, 1 + below(most_nodes)))] for _ in range(requests)]


def _padded(trees: Trees, width: int, generator: torch.Generator, vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Candidates, rows, first children and next siblings [bs, n] of `trees`, whose rows stand tree after tree."""
    shape = (len(trees), width)
    candidates = torch.randint(0, vocab_size, shape, generator=generator)
    rows, child, sibling = (torch.full(shape, -1) for _ in range(3))
    first = 0
    for request, parents in enumerate(trees):
        rows[request, : len(parents)] = torch.arange(first, first + len(parents))
        for node in range(len(parents) - 1, 0, -1):
            sibling[request, node] = child[request, parents[node]]
            child[request, parents[node]] = node
        first += len(parents)
    return candidates, rows, child, sibling


def _outputs(count: int, requests: int, path_nodes: int) -> Columns:
    outputs = walk_outputs(requests, 1, path_nodes, torch.device("cpu"))
    named = dict(zip(("predicts", "accept_index", "accept_token_num"), outputs, strict=True))
    return {**named, "predicts": torch.full((count,), POISON, dtype=torch.int32)}


def _links(padded: tuple[torch.Tensor, ...]) -> Columns:
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    return dict(zip(names, padded, strict=True))


def _run(device: torch.device, columns: Columns, links: Columns, outputs: Columns) -> tuple[torch.Tensor, Columns]:
    """The choices and what was written, back on the host."""
    moved = {name: value.to(device) for name, value in {**columns, **links, **outputs}.items()}
    choices = verify_coupled(**moved)
    return choices.cpu(), {name: moved[name].cpu() for name in outputs}


def test_random_trees_against_brute_force(device: torch.device) -> None:
    generator, vocab_size = torch.Generator().manual_seed(3), 5
    # Choices take the interpreter long.
    for round_ in range(2 if INTERPRETED else 40):
        trees = _random_trees(1 + round_ % 4, 9, generator)
        width, path_nodes = max(map(len, trees)) + round_ % 3, 1 + round_ % 4
        starts = list(itertools.accumulate(map(len, trees), initial=0))
        count = starts[-1] + 2  # two rows that belong to no tree
        columns = _columns(torch.randn(count, vocab_size, generator=generator), generator)
        padded = _padded(trees, width, generator, 3)
        choices, written = _run(device, columns, _links(padded), _outputs(count, len(trees), path_nodes))
        assert torch.equal(choices, coupled_choice(**columns))
        off_path = torch.ones(count, dtype=torch.bool)
        for request, (parents, first) in enumerate(zip(trees, starts, strict=False)):
            targets = choices[first : first + len(parents)].tolist()
            path = first_path(padded[0][request].tolist(), parents, targets, path_nodes)
            rows = [first + node for node in path]
            assert int(written["accept_token_num"][request]) == len(path) - 1
            assert written["accept_index"][request].tolist() == rows + [POISON] * (path_nodes - len(path))
            assert written["predicts"][rows].tolist() == [targets[node] for node in path]
            off_path[rows] = False
        assert (written["predicts"][off_path] == POISON).all()


def _forced(tokens: list[int], vocab_size: int = 8) -> Columns:
    """Sampling arguments of rows that choose `tokens`, whatever the noise."""
    logits = torch.full((len(tokens), vocab_size), -torch.inf)
    logits[torch.arange(len(tokens)), tokens] = 0.0
    return _columns(logits, torch.Generator().manual_seed(4))


def test_malformed_links_do_no_harm(device: torch.device) -> None:
    # Request 0: children in a cycle; 1: a row out of range, then a good sibling; 2: the root's row is -1; 3: links
    # outside [0, n); 4: a candidate outside the vocabulary, below 0 and above.
    links = _links(tuple(map(torch.tensor, (
        [[0, 1, 2], [0, 5, 5], [0, 1, 2], [0, 1, 2], [0, -4, 99]],
        [[0, 1, 2], [3, 99, 5], [-1, -1, 8], [6, 7, 8], [9, 10, 11]],
        [[1, -1, -1], [1, -1, -1], [1, -1, -1], [3, -1, -1], [1, -1, -1]],
        [[-1, 2, 1], [-1, 2, -1], [-1, -1, -1], [-1, -9, -1], [-1, 2, -1]],
    ))))  # fmt: skip
    columns = _forced([7, 7, 7, 5, 0, 6, 1, 1, 1, 4, 1, 1])
    choices, written = _run(device, columns, links, _outputs(12, 5, 3))
    assert choices.tolist() == [7, 7, 7, 5, 0, 6, 1, 1, 1, 4, 1, 1]
    assert written["accept_token_num"].tolist() == [0, 1, 0, 0, 0]
    assert written["accept_index"].tolist() == [[0, -7, -7], [3, 5, -7], [-7, -7, -7], [6, -7, -7], [9, -7, -7]]
    assert written["predicts"].tolist() == [7, -7, -7, 5, -7, 6, 1, -7, -7, 4, -7, -7]


def test_nothing_to_walk_and_nothing_to_choose() -> None:
    generator = torch.Generator().manual_seed(5)
    no_trees = _links(tuple(torch.zeros(0, 4, dtype=torch.int64) for _ in range(4)))
    columns = _columns(torch.randn(3, 5, generator=generator), generator)
    assert torch.equal(_run(torch.device("cpu"), columns, no_trees, _outputs(3, 0, 2))[0], coupled_choice(**columns))
    no_rows = _columns(torch.zeros(0, 5), generator)
    absent = _links(tuple(torch.full((2, 3), -1) for _ in range(4)))
    choices, written = _run(torch.device("cpu"), no_rows, absent, _outputs(0, 2, 2))
    assert choices.shape == (0,)
    assert written["accept_token_num"].tolist() == [0, 0]
    assert (written["accept_index"] == POISON).all()


def test_cuda_graph_replays_a_step_of_new_trees(cuda: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    trees = _random_trees(16, 40, generator)
    count, width = sum(map(len, trees)), max(map(len, trees))

    def arguments() -> tuple[Columns, Columns, Columns]:
        columns = _columns(torch.randn(count, 3000, generator=generator) * 4, generator)
        links = _links(_padded(trees, width, generator, 3000))
        # First children hold the choice of their parents, so that walks get somewhere.
        child, rows = links["retrive_next_token"], links["retrive_index"]
        choices = coupled_choice(**columns)
        for request, node in (child >= 0).nonzero().tolist():
            links["candidates"][request, child[request, node]] = choices[rows[request, node]]
        return columns, links, _outputs(count, len(trees), width)

    held = {name: value.cuda() for part in arguments() for name, value in part.items()}
    verify_coupled(**held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = verify_coupled(**held)
    for _ in range(3):
        columns, links, outputs = arguments()
        for name, value in {**columns, **links, **outputs}.items():
            held[name].copy_(value)
        graph.replay()
        choices, written = _run(torch.device("cpu"), columns, links, outputs)
        assert torch.equal(replayed.cpu(), choices)
        assert int(written["accept_token_num"].max()) >= 2
        for name, value in written.items():
            assert torch.equal(held[name].cpu(), value), name
