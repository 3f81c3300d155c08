from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.tensors import POISON, links_of, recorded, walk_outputs

from outrider.kernels.tree_sampling import (
    tree_speculative_sampling_target_only,
    tree_speculative_sampling_target_only_reference,
)

_LINKS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")


def _random_case(
    requests: int, nodes: int, vocab_size: int, *, device: torch.device, hit: float = 0.7
) -> dict[str, Any]:
    """Random trees whose children have distinct tokens and, in most families, one with a large probability."""
    on_device = torch.Generator(device).manual_seed(nodes * 1009 + vocab_size)
    generator = torch.Generator().manual_seed(nodes * 1009 + vocab_size)
    width = torch.rand(requests, nodes, generator=generator)
    parents = [[-1, *(int(width[b, i] ** 0.5 * i) for i in range(1, nodes))] for b in range(requests)]
    # A step that shares no factor with V gives siblings, whose indices differ by less than V, distinct tokens.
    step = next(
        step
        for step in range(vocab_size // 3 + 1, vocab_size + 2)
        if torch.tensor(step).gcd(torch.tensor(vocab_size)) == 1
    )
    start = torch.randint(0, vocab_size, (requests, 1), generator=generator)
    candidates = (start + torch.arange(nodes) * step) % vocab_size
    rows, child, sibling = links_of(parents)
    probabilities = torch.rand(requests, nodes, vocab_size, generator=on_device, device=device)
    # Half of the entries are 0, and some first children hold most of the mass.
    probabilities *= probabilities > 0.5
    probabilities[..., 0] += 0.1
    favoured = (torch.rand(requests, nodes, generator=generator) < hit) & (child >= 0)
    request, node = favoured.nonzero(as_tuple=True)
    token = candidates[request, child[request, node]]
    probabilities[request.to(device), node.to(device), token.to(device)] = vocab_size / 2.0
    probabilities /= probabilities.sum(2, keepdim=True)
    return {
        "candidates": candidates.to(device),
        "retrive_index": rows.to(device),
        "retrive_next_token": child.to(device),
        "retrive_next_sibling": sibling.to(device),
        "uniform_samples": torch.rand(requests, nodes, generator=generator).to(device),
        "uniform_samples_for_final_sampling": torch.rand(requests, generator=generator).to(device),
        "target_probs": probabilities,
        "draft_probs": None,
    }


def _run(case: dict[str, Any], path: int, *, reference: bool = False, **thresholds: Any) -> list[list]:
    requests, nodes = case["candidates"].shape
    outputs: Any = walk_outputs(requests, nodes, path, case["candidates"].device)
    operator: Any = (
        tree_speculative_sampling_target_only_reference if reference else tree_speculative_sampling_target_only
    )
    operator(*outputs, **case, **thresholds)
    return [output.tolist() for output in outputs]


def test_recorded_cases(device: torch.device) -> None:
    for case in recorded("tree_speculative_sampling_target_only")["cases"]:
        given, expected = case["inputs"], case["expected"]
        links = [
            torch.tensor(given[name], device=device)
            for name in ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        ]
        requests, nodes = links[0].shape
        if "target_probs" in given:
            target = torch.tensor(given["target_probs"], device=device)
            coins = [
                torch.tensor(given[name], device=device)
                for name in ("uniform_samples", "uniform_samples_for_final_sampling")
            ]
        else:
            logits = torch.ones(requests, nodes, 20)
            logits[..., 18] = 10
            for request, node, token in given["peaks"]:
                logits[request, node] = 1
                logits[request, node, token] = 10
            target = (logits / 0.01).softmax(-1).to(device)
            assert target.argmax(-1).tolist() == given["target_probs_argmax"]
            coins = [torch.rand(requests, nodes).to(device), torch.rand(requests).to(device)]
        for draft in (torch.zeros_like(target), None):
            outputs = walk_outputs(requests, nodes, given["num_spec_step"], device)
            outputs[0].fill_(-1)
            outputs[1].fill_(-1)
            thresholds = given["threshold_single"], given["threshold_acc"]
            arguments: list[Any] = [*outputs, *links, *coins, target, draft, *thresholds]
            tree_speculative_sampling_target_only(*arguments)
            found = {
                "predicts": outputs[0].tolist(),
                "predicts_0": int(outputs[0][0]),
                "accept_index": outputs[1].tolist(),
                "accept_token_num": outputs[2].tolist(),
            }
            assert {name: found[name] for name in expected} == expected, case["name"]


# requests, nodes, V, S: odd sizes, one of everything, a family wider than a warp, and several blocks of V.
_SMALL = [(2, 1, 1, 1), (1, 1, 5, 3), (3, 5, 111, 3), (2, 9, 16, 1), (2, 80, 111, 6), (1, 7, 9000, 4)]
_LARGE = [(257, 3, 111, 4), (5, 256, 32000, 12), (1, 64, 128256, 8), (33, 63, 32000, 7), (3, 17, 128256, 4)]


def _check_against_reference(case: dict[str, Any], path: int, **thresholds: Any) -> None:
    found = _run(case, path, **thresholds)
    assert found == _run(case, path, reference=True, **thresholds)
    # A draft of zeros gives the same verdict, and ends up holding the rejected children's probabilities.
    drafts = [torch.zeros_like(case["target_probs"]) for _ in range(2)]
    assert found == _run({**case, "draft_probs": drafts[0]}, path, **thresholds)
    assert found == _run({**case, "draft_probs": drafts[1]}, path, reference=True, **thresholds)
    assert torch.equal(drafts[0], drafts[1])
    # Any other draft counts in the final row only.
    drafts = [case["target_probs"].flip(0, 1) * 0.5 for _ in range(2)]
    found = _run({**case, "draft_probs": drafts[0]}, path, **thresholds)
    assert found == _run({**case, "draft_probs": drafts[1]}, path, reference=True, **thresholds)
    assert torch.equal(drafts[0], drafts[1])


@pytest.mark.parametrize(("requests", "nodes", "vocab_size", "path"), _SMALL)
def test_triton_small_trees(requests: int, nodes: int, vocab_size: int, path: int, triton_device: torch.device) -> None:
    _check_against_reference(_random_case(requests, nodes, vocab_size, device=triton_device), path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*_SMALL, *_LARGE], ids=str)
def test_large_trees(shape: tuple[int, int, int, int], dtype: torch.dtype, cuda: torch.device) -> None:
    requests, nodes, vocab_size, path = shape
    case = _random_case(requests, nodes, vocab_size, device=cuda)
    case["target_probs"] = case["target_probs"].to(dtype)
    if dtype == torch.bfloat16:
        case = {name: value.int() if name in _LINKS else value for name, value in case.items()}
    _check_against_reference(case, path)
    _check_against_reference(case, path, threshold_single=0.6, threshold_acc=0.7)


def test_the_random_trees_are_walked() -> None:
    """The sweeps above would say little if nothing were ever accepted, or everything."""
    accepted = torch.tensor(_run(_random_case(40, 30, 111, device=torch.device("cpu")), 6)[2])
    assert len(accepted.unique()) >= 5 and 0.5 < accepted.float().mean() < 4.5


def test_thresholds(device: torch.device) -> None:
    """Children 1, 2, 3 of the root with p = 0.2, 0.3, 0.1; expected: the accepted child, 0 for none."""
    rows, child, sibling = links_of([[-1, 0, 0, 0]])
    target = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3]).expand(1, 4, 5).to(device)
    for coin, single, total, expected in (
        (0.1, 1.0, 1.0, 1),
        (0.4, 1.0, 1.0, 2),
        (0.55, 1.0, 1.0, 3),
        (0.7, 1.0, 1.0, 0),
        (0.7, 1.0, 0.8, 3),
        (0.7, 1.0, 0.5, 2),
        (0.7, 0.25, 1.0, 2),
        (0.7, 0.15, 1.0, 1),
        (0.999, 1.0, 0.0, 1),
    ):
        case = {
            "candidates": torch.arange(4, device=device)[None],
            "retrive_index": rows.to(device),
            "retrive_next_token": child.to(device),
            "retrive_next_sibling": sibling.to(device),
            "uniform_samples": torch.full((1, 4), coin, device=device),
            "uniform_samples_for_final_sampling": torch.zeros(1, device=device),
            "target_probs": target,
            "draft_probs": None,
        }
        _, index, accepted = _run(case, 2, threshold_single=single, threshold_acc=total)
        assert (index[0][1] if accepted[0] else 0) == expected, (coin, single, total)


def test_final_token(device: torch.device) -> None:
    """A lone root, so the final token is drawn from max(p - q, 0); with S = 1 from p."""
    for target, draft, uniform, path, expected in (
        ([0.0, 0.5, 0.0, 0.5], [0.0] * 4, 0.0, 2, 1),
        ([0.0, 0.5, 0.0, 0.5], [0.0] * 4, 0.49, 2, 1),
        ([0.0, 0.5, 0.0, 0.5], [0.0] * 4, 0.51, 2, 3),
        ([0.0, 0.5, 0.5, 0.0], [0.0] * 4, 1.0, 2, 2),
        ([0.0, 0.5, 0.0, 0.5], [1.0, 0.5, 1.0, 0.2], 0.0, 2, 3),
        ([0.0, 0.5, 0.0, 0.5], [1.0, 0.5, 1.0, 0.2], 0.0, 1, 1),
        ([0.1, 0.2, 0.3, 0.4], [1.0] * 4, 0.5, 2, 3),
        ([0.0] * 4, [0.0] * 4, 0.5, 2, 3),
        ([float("nan"), 0.5, 0.5, float("nan")], [0.0] * 4, 0.9, 2, 2),
    ):
        case = {
            "candidates": torch.zeros(1, 1, dtype=torch.int32, device=device),
            "retrive_index": torch.zeros(1, 1, dtype=torch.int32, device=device),
            "retrive_next_token": torch.full((1, 1), -1, device=device),
            "retrive_next_sibling": torch.full((1, 1), -1, device=device),
            "uniform_samples": torch.zeros(1, 1, device=device),
            "uniform_samples_for_final_sampling": torch.tensor([uniform], device=device),
            "target_probs": torch.tensor([[target]], device=device),
            "draft_probs": torch.tensor([[draft]], device=device),
        }
        assert _run(case, path) == [[expected], [[0] + [POISON] * (path - 1)], [0]], (target, draft)


def test_malformed_links_do_no_harm(device: torch.device) -> None:
    # 0: siblings in a cycle, rejected (their mass counts each of n visits); 1: a node that is its own child;
    # 2: the root's row out of range; 3: links outside [0, n); 4: candidates out of range, then a good sibling;
    # 5: a row out of range, then a good sibling; 6: duplicate siblings.
    candidates = [[0, 1, 2], [2, 1, 1], [0, 1, 2], [0, 1, 2], [0, -1, 2], [0, 1, 2], [0, 1, 1]]
    rows = [[0, 1, 2], [3, 4, 5], [-1, 7, 8], [9, 10, 11], [12, 13, 14], [15, 99, 17], [18, 19, 20]]
    child = [[1, -1, -1], [0, -1, -1], [1, -1, -1], [7, -1, -1], [1, -1, -1], [1, -1, -1], [1, -1, -1]]
    sibling = [[-1, 2, 1], [-1, -1, -1], [-1, -1, -1], [-1, -9, -1], [-1, 2, -1], [-1, 2, 9], [-1, 2, -1]]
    target = torch.tensor([0.1, 0.05, 0.4, 0.45]).expand(7, 3, 4).to(device)
    coins = torch.tensor([0.9, 0.2, 0.2, 0.2, 0.39, 0.39, 0.9]).view(7, 1).expand(7, 3).to(device)
    columns = [torch.tensor(column, device=device) for column in (candidates, rows, child, sibling)]
    for draft in (None, torch.zeros(7, 3, 4, device=device)):
        predicts, index, accepted = walk_outputs(7, 3, 3, device)
        final = torch.full((7,), 0.99, device=device)
        arguments: list[Any] = [predicts, index, accepted, *columns, coins, final, target, draft]
        tree_speculative_sampling_target_only(*arguments)
        assert accepted.tolist() == [0, 2, 0, 0, 1, 1, 0]
        poison = POISON
        assert index.tolist() == [
            [0, poison, poison],
            [3, 3, 3],
            [poison, poison, poison],
            [9, poison, poison],
            [12, 14, poison],
            [15, 17, poison],
            [18, poison, poison],
        ]
        expected = [poison] * 21
        for row, token in ((0, 3), (3, 3), (9, 3), (12, 2), (14, 3), (15, 2), (17, 3), (18, 3)):
            expected[row] = token
        assert predicts.tolist() == expected


def _check_random_links(device: torch.device, requests: int, nodes: int) -> None:
    """Links, tokens and rows of any value: the walk ends, and kernel and reference agree on what it did."""
    generator = torch.Generator().manual_seed(nodes)
    case = _random_case(requests, nodes, 16, device=device)
    for name, low, high in (
        ("candidates", -2, 18),
        ("retrive_index", -2, requests * nodes + 2),
        ("retrive_next_token", -2, nodes + 2),
        ("retrive_next_sibling", -2, nodes + 2),
    ):
        case[name] = torch.randint(low, high, (requests, nodes), generator=generator).to(device)
    case["target_probs"] = torch.rand(requests, nodes, 16, generator=generator).softmax(2).to(device)
    # Two requests may claim one row: each is judged alone.
    for request in range(requests):
        alone = {name: None if value is None else value[request : request + 1] for name, value in case.items()}
        for path in (1, 3, nodes + 4):
            assert _run(alone, path) == _run(alone, path, reference=True)


def test_triton_random_links(triton_device: torch.device) -> None:
    _check_random_links(triton_device, requests=3, nodes=7)


def test_many_random_links(cuda: torch.device) -> None:
    _check_random_links(cuda, requests=40, nodes=50)


def test_strides_and_larger_buffers(device: torch.device) -> None:
    case = _random_case(2, 5, 12, device=device)
    draft = torch.zeros(2, 5, 12, device=device)
    expected = _run({**case, "draft_probs": draft}, 4, reference=True)
    spread: dict[str, Any] = {}
    for name, value in case.items():
        if value is not None:
            wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), 3, dtype=value.dtype, device=device)
            wide[..., ::2] = value
            spread[name] = wide[..., ::2]
            if value.dtype == torch.int64:
                spread[name] = spread[name].int()
    wide_draft = torch.zeros(2, 5, 24, device=device)
    padded_draft = torch.zeros(2, 6, 17, device=device)
    for strided in (wide_draft[..., ::2], padded_draft[:, 1:, 3:15]):
        predicts = torch.full((40,), POISON, dtype=torch.int64, device=device)
        index = torch.full((3, 8), POISON, dtype=torch.int32, device=device)
        accepted = torch.full((6,), POISON, dtype=torch.int32, device=device)
        tree_speculative_sampling_target_only(
            predicts[::2], index[:, ::2], accepted[::2], **spread, draft_probs=strided
        )
        assert predicts[:20:2].tolist() == expected[0] and predicts[1::2].eq(POISON).all()
        assert index[:2, ::2].tolist() == expected[1] and index[:, 1::2].eq(POISON).all()
        assert accepted.tolist() == [expected[2][0], POISON, expected[2][1], POISON, POISON, POISON]
        assert torch.equal(strided, draft)
    assert wide_draft[..., 1::2].eq(0).all()


def test_only_visited_rows_matter(device: torch.device) -> None:
    case = _random_case(2, 6, 20, device=device)
    before = _run(case, 4)
    visited = {row for path in before[1] for row in path if row != POISON}
    unvisited = [row for row in range(12) if row not in visited]
    assert unvisited
    case["target_probs"].view(12, -1)[unvisited] = float("nan")
    assert _run(case, 4) == before


def test_same_bits_run_to_run_and_in_a_graph(cuda: torch.device) -> None:
    case = _random_case(64, 64, 128256, device=cuda)
    first = _run(case, 8)
    for _ in range(20):
        assert _run(case, 8) == first
    for request in range(0, 64, 7):
        alone: dict[str, Any] = {}
        alone |= {name: None if value is None else value[request : request + 1] for name, value in case.items()}
        alone["retrive_index"] = alone["retrive_index"] - request * 64
        tokens, _, accepted = _run(alone, 8)
        assert tokens == first[0][request * 64 : request * 64 + 64] and accepted == first[2][request : request + 1]
    outputs: Any = walk_outputs(64, 64, 8, cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_speculative_sampling_target_only(*outputs, **case)
    for round_ in range(3):
        for output in outputs:
            output.fill_(POISON)
        case["uniform_samples"].copy_(torch.rand(64, 64))
        graph.replay()
        assert [output.tolist() for output in outputs] == _run(case, 8), round_


def test_no_requests_is_no_work() -> None:
    links, coins = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4)
    arguments: list[Any] = [*walk_outputs(0, 4, 2, torch.device("cpu")), *[links] * 4]
    arguments += [coins, torch.zeros(0), torch.zeros(0, 4, 9), None]
    tree_speculative_sampling_target_only(*arguments)
