from __future__ import annotations

import pytest
import torch
from tests.kernels.tensors import first_path, links_of, recorded, walk_outputs

from outrider.kernels.verify_tree import verify_tree_greedy, verify_tree_greedy_reference


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("verify_tree_greedy")["cases"]:
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


def test_random_trees_against_brute_force(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for round_ in range(24):
        nodes, path_nodes, requests = 1 + round_ % 9, 1 + round_ % 4, 3
        parents = [
            [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))]
            for _ in range(requests)
        ]
        candidates = torch.randint(0, 3, (requests, nodes), generator=generator)
        targets = torch.randint(0, 3, (requests, nodes), generator=generator)
        predicts, index, accepted = walk_outputs(requests, nodes, path_nodes, device)
        verify_tree_greedy(
            predicts, index, accepted, *(tensor.to(device) for tensor in (candidates, *links_of(parents), targets))
        )
        touched = set()
        for request in range(requests):
            wanted = targets[request].tolist()
            path = first_path(candidates[request].tolist(), parents[request], wanted, path_nodes)
            rows = [request * nodes + node for node in path]
            assert int(accepted[request]) == len(rows) - 1
            assert index[request].tolist() == rows + [-7] * (path_nodes - len(rows))
            assert predicts[rows].tolist() == [wanted[node] for node in path]
            touched.update(rows)
        untouched = [row for row in range(requests * nodes) if row not in touched]
        assert (predicts[untouched] == -7).all()


def test_malformed_links_do_no_harm(device: torch.device) -> None:
    # Request 0: the children form a cycle; 1: a row out of range, then a good sibling; 2: the root's row out of
    # range; 3 and 5: links to node n, where the next request's root holds what is wanted; 4: a negative candidate that
    # equals a negative choice.
    candidates = [[0, 1, 2], [0, 5, 5], [0, 1, 2], [0, 1, 2], [1, -4, 2], [0, 2, 2], [1, 0, 0]]
    rows = [[0, 1, 2], [3, 99, 5], [-1, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19, 20]]
    child = [[1, -1, -1], [1, -1, -1], [1, -1, -1], [3, -1, -1], [1, -1, -1], [1, -1, -1], [-1, -1, -1]]
    sibling = [[-1, 2, 1], [-1, 2, -1], [-1, -1, -1], [-1, -9, -1], [-1, 9, -1], [-1, 3, -1], [-1, -1, -1]]
    targets = [[9, 9, 9], [5, 0, 6], [1, 1, 1], [1, 1, 1], [-4, 1, 1], [1, 1, 1], [0, 0, 0]]
    predicts, index, accepted = walk_outputs(7, 3, 3, device)
    columns = [torch.tensor(column, device=device) for column in (candidates, rows, child, sibling, targets)]
    verify_tree_greedy(predicts, index, accepted, *columns)
    assert accepted.tolist() == [0, 1, 0, 0, 0, 0, 0]
    paths = [[0], [3, 5], [], [9], [12], [15], [18]]
    assert index.tolist() == [path + [-7] * (3 - len(path)) for path in paths]
    assert predicts.tolist() == [9, -7, -7, 5, -7, 6, -7, -7, -7, 1, -7, -7, -4, -7, -7, 1, -7, -7, 0, -7, -7]


def _check_wild_links(
    device: torch.device,
    sizes: list[tuple[int, int, int]],
    dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32),
) -> None:
    """Links, rows and tokens drawn at random, cycles and ranges included, against the reference; (bs, n, S)."""
    generator = torch.Generator().manual_seed(4)
    for turn, (requests, nodes, path_nodes) in enumerate(sizes):

        def draw(low: int, high: int, dtype: torch.dtype, shape: tuple[int, int] = (requests, nodes)) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator).to(dtype)

        dtype = dtypes[turn % len(dtypes)]
        candidates, targets = draw(-1, 2, dtype), draw(-1, 2, dtype)
        rows = torch.arange(requests * nodes).view(requests, nodes).to(dtype)
        outside = torch.tensor([-2, -1, requests * nodes, requests * nodes + 1]).to(dtype)[draw(0, 4, torch.int64)]
        foreign = draw(0, requests * nodes, dtype)
        rows = torch.where(draw(0, 5, dtype) == 0, torch.where(draw(0, 2, dtype) == 0, outside, foreign), rows)
        columns = [candidates, rows, draw(-1, nodes + 1, dtype), draw(-1, nodes + 1, dtype), targets]
        found, wanted = (walk_outputs(requests, nodes, path_nodes, place) for place in (device, torch.device("cpu")))
        verify_tree_greedy(*found, *(column.to(device) for column in columns))
        verify_tree_greedy_reference(*wanted, *columns)
        assert [output.tolist() for output in found[1:]] == [output.tolist() for output in wanted[1:]]
        # A row that stands in two requests' paths is written by both, with the same token.
        assert found[0].tolist() == wanted[0].tolist()


@pytest.mark.parametrize("nodes", [20, 64])
def test_last_siblings_and_chains(device: torch.device, nodes: int) -> None:
    """A root with n - 1 children of which the last one is wanted, and a chain that is wanted as a whole."""
    star, chain = links_of([[-1] + [0] * (nodes - 1)]), links_of([list(range(-1, nodes - 1))])
    targets = torch.full((1, nodes), 5)
    for links, candidates, path in (
        (star, [[0] * (nodes - 1) + [5]], [0, nodes - 1]),
        (chain, [[5] * nodes], list(range(nodes))),
    ):
        predicts, index, accepted = walk_outputs(1, nodes, nodes, device)
        columns = [column.to(device) for column in (torch.tensor(candidates), *links, targets)]
        verify_tree_greedy(predicts, index, accepted, *columns)
        assert accepted.tolist() == [len(path) - 1]
        assert index.tolist() == [path + [-7] * (nodes - len(path))]
        assert predicts.tolist() == [5 if node in path else -7 for node in range(nodes)]


def test_strides_and_larger_buffers(device: torch.device) -> None:
    candidates = torch.tensor([[0, 9, 4, 9, 5, 9]], device=device)[:, ::2]
    rows, child, sibling = (tensor.to(device) for tensor in links_of([[-1, 0, 0]]))
    targets = torch.tensor([[5, 1, 8]], device=device)
    wide = torch.full((16,), -7, dtype=torch.int64, device=device)
    index = torch.full((2, 8), -7, dtype=torch.int32, device=device)
    accepted = torch.full((4,), -7, dtype=torch.int32, device=device)
    verify_tree_greedy(wide[::2], index[:, ::2], accepted[::2], candidates.int(), rows, child, sibling, targets)
    assert wide.tolist()[:6:2] == [5, -7, 8] and wide[1::2].eq(-7).all()
    assert index.tolist() == [[0, -7, 2, -7, -7, -7, -7, -7], [-7] * 8]
    assert accepted.tolist() == [1, -7, -7, -7]


def test_triton_wild_links(triton_device: torch.device) -> None:
    _check_wild_links(triton_device, [(3, 6, 4), (2, 33, 40), (2, 70, 5), (1, 1, 1), (4, 3, 9)] * 3)


def test_every_size_on_a_gpu(cuda: torch.device) -> None:
    # Every other S and every other dtype is a kernel to compile.
    sizes = [(1 + nodes % 7, nodes, 9) for nodes in (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256)] * 3
    sizes += [(requests, 5, 9) for requests in (1, 2, 63, 64, 65, 257)] * 3 + [
        (2, 1000, 1000),
        (3, 7, 2000),
        (2, 64, 1),
    ]
    _check_wild_links(cuda, sizes, (torch.int64,))
    _check_wild_links(cuda, [(3, 6, 4), (3, 64, 9), (2, 200, 9)], (torch.int32,))


def test_no_requests_is_no_work() -> None:
    empty = torch.zeros(0, 4, dtype=torch.int64)
    verify_tree_greedy(*walk_outputs(0, 4, 2, torch.device("cpu")), *[empty] * 5)
