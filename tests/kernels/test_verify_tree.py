from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.kernels.verify_tree import verify_tree_greedy

_VECTORS = Path(__file__).parent / "vectors" / "verify_tree_greedy.json"


def _links(parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Retrieve links of trees given by their nodes' parents (the root's is -1)."""
    requests, nodes = len(parents), len(parents[0])
    child = torch.full((requests, nodes), -1)
    sibling = torch.full((requests, nodes), -1)
    for request, tree in enumerate(parents):
        for node in range(nodes - 1, 0, -1):
            sibling[request, node] = child[request, tree[node]]
            child[request, tree[node]] = node
    return torch.arange(requests * nodes).view(requests, nodes), child, sibling


def _outputs(requests: int, nodes: int, path: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    shapes = ((requests * nodes,), (requests, path), (requests,))
    return tuple(torch.full(shape, -7, dtype=torch.int32, device=device) for shape in shapes)


def _brute_force(
    candidates: list[int], parents: list[int], targets: list[int], base: int, path_nodes: int
) -> tuple[list[int], list[int]]:
    """Accepted rows and emitted tokens of one well-formed tree."""
    node, rows, emitted = 0, [base], []
    while True:
        emitted.append(targets[node])
        matching = [i for i in range(1, len(parents)) if parents[i] == node and candidates[i] == targets[node]]
        if not matching or len(rows) == path_nodes:
            return rows, emitted
        node = matching[0]
        rows.append(base + node)


def _check_vectors(device: torch.device) -> None:
    for case in json.loads(_VECTORS.read_text())["cases"]:
        given = {
            key: torch.tensor(value, device=device) for key, value in case["inputs"].items() if isinstance(value, list)
        }
        requests, nodes = given["candidates"].shape
        shapes = ((requests * nodes,), (requests, case["inputs"]["num_spec_step"]), (requests,))
        names = ("predicts", "accept_index", "accept_token_num")
        outputs = [
            torch.full(shape, case["init"][name], dtype=torch.int32, device=device)
            for shape, name in zip(shapes, names, strict=True)
        ]
        links = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "target_predict")
        verify_tree_greedy(*outputs, *(given[name] for name in links))
        for output, name in zip(outputs, names, strict=True):
            assert output.tolist() == case["expected"][name], (case["name"], name)


def _check_random_trees(device: torch.device, count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for round_ in range(count):
        nodes, path_nodes, requests = 1 + round_ % 9, 1 + round_ % 4, 3
        parents = [
            [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))]
            for _ in range(requests)
        ]
        candidates = torch.randint(0, 3, (requests, nodes), generator=generator)
        targets = torch.randint(0, 3, (requests, nodes), generator=generator)
        predicts, index, accepted = _outputs(requests, nodes, path_nodes, device)
        verify_tree_greedy(
            predicts, index, accepted, *(tensor.to(device) for tensor in (candidates, *_links(parents), targets))
        )
        touched = set()
        for request in range(requests):
            rows, emitted = _brute_force(
                candidates[request].tolist(), parents[request], targets[request].tolist(), request * nodes, path_nodes
            )
            assert int(accepted[request]) == len(rows) - 1
            assert index[request].tolist() == rows + [-7] * (path_nodes - len(rows))
            assert predicts[rows].tolist() == emitted
            touched.update(rows)
        untouched = [row for row in range(requests * nodes) if row not in touched]
        assert (predicts[untouched] == -7).all()


def _check_malformed(device: torch.device) -> None:
    # Request 0: the children form a cycle; 1: a row out of range, then a good sibling; 2: the root's row out of
    # range; 3: links outside [0, n); 4: a negative candidate that equals a negative choice.
    candidates = [[0, 1, 2], [0, 5, 5], [0, 1, 2], [0, 1, 2], [0, -4, 2]]
    rows = [[0, 1, 2], [3, 99, 5], [-1, 7, 8], [9, 10, 11], [12, 13, 14]]
    child = [[1, -1, -1], [1, -1, -1], [1, -1, -1], [3, -1, -1], [1, -1, -1]]
    sibling = [[-1, 2, 1], [-1, 2, -1], [-1, -1, -1], [-1, -9, -1], [-1, 9, -1]]
    targets = [[9, 9, 9], [5, 0, 6], [1, 1, 1], [1, 1, 1], [-4, 1, 1]]
    predicts, index, accepted = _outputs(5, 3, 3, device)
    columns = [torch.tensor(column, device=device) for column in (candidates, rows, child, sibling, targets)]
    verify_tree_greedy(predicts, index, accepted, *columns)
    assert accepted.tolist() == [0, 1, 0, 0, 0]
    assert index.tolist() == [[0, -7, -7], [3, 5, -7], [-7, -7, -7], [9, -7, -7], [12, -7, -7]]
    assert predicts.tolist() == [9, -7, -7, 5, -7, 6, -7, -7, -7, 1, -7, -7, -4, -7, -7]


def _check_strides_and_larger_buffers(device: torch.device) -> None:
    candidates = torch.tensor([[0, 9, 4, 9, 5, 9]], device=device)[:, ::2]
    rows, child, sibling = (tensor.to(device) for tensor in _links([[-1, 0, 0]]))
    targets = torch.tensor([[5, 1, 8]], device=device)
    wide = torch.full((16,), -7, dtype=torch.int64, device=device)
    index = torch.full((2, 8), -7, dtype=torch.int32, device=device)
    accepted = torch.full((4,), -7, dtype=torch.int32, device=device)
    verify_tree_greedy(wide[::2], index[:, ::2], accepted[::2], candidates.int(), rows, child, sibling, targets)
    assert wide.tolist()[:6:2] == [5, -7, 8] and wide[1::2].eq(-7).all()
    assert index.tolist() == [[0, -7, 2, -7, -7, -7, -7, -7], [-7] * 8]
    assert accepted.tolist() == [1, -7, -7, -7]


def test_recorded_cases() -> None:
    _check_vectors(torch.device("cpu"))


def test_random_trees_against_brute_force() -> None:
    _check_random_trees(torch.device("cpu"), count=60)


def test_malformed_links_do_no_harm() -> None:
    _check_malformed(torch.device("cpu"))


def test_strides_and_larger_buffers() -> None:
    _check_strides_and_larger_buffers(torch.device("cpu"))


def test_triton_recorded_cases(triton_device: torch.device) -> None:
    _check_vectors(triton_device)


def test_triton_random_trees(triton_device: torch.device) -> None:
    _check_random_trees(triton_device, count=24)


def test_triton_malformed_links(triton_device: torch.device) -> None:
    _check_malformed(triton_device)


def test_triton_strides_and_larger_buffers(triton_device: torch.device) -> None:
    _check_strides_and_larger_buffers(triton_device)


def test_no_requests_is_no_work() -> None:
    empty = torch.zeros(0, 4, dtype=torch.int64)
    verify_tree_greedy(*_outputs(0, 4, 2, torch.device("cpu")), *[empty] * 5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.zeros(5, dtype=torch.int32)}, "predicts: size 5 given, at least 6 needed"),
        ({1: torch.zeros(1, 3, dtype=torch.int32)}, "accept_index: size 1 given, at least 2 needed"),
        ({2: torch.zeros(1, dtype=torch.int32)}, "accept_token_num: size 1 given, at least 2 needed"),
        ({4: torch.zeros(2, 4, dtype=torch.int64)}, r"retrive_index: shape \[2, 4\] given, \[2, 3\] needed"),
        ({7: torch.zeros(2, 3)}, "target_predict: dtype torch.float32 given"),
    ],
)
def test_bad_arguments_are_named(changed: dict[int, torch.Tensor], message: str) -> None:
    links = torch.zeros(2, 3, dtype=torch.int64)
    arguments = [*_outputs(2, 3, 3, torch.device("cpu")), links, links, links, links, links]
    for place, tensor in changed.items():
        arguments[place] = tensor
    with pytest.raises(ValueError, match=message):
        verify_tree_greedy(*arguments)
