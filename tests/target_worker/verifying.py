"""A verifier, trees of all kinds for it, and a loop that decodes by it: what its tests share."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return make_verifier(checkpoint)


PROMPT = [5, 9, 33, 2, 17, 40, 8]


Tree = tuple[list[int], list[int]]


NO_TREE: Tree = ([], [])


TARGET_ONLY = SamplingSpec(temperature=1.0, verification=VerificationRule.TARGET_ONLY)


def make_verifier(checkpoint: Path, **overrides: Any) -> Verifier:
    steps: dict[str, Any] = {"max_step_tokens": 64}
    steps |= {name: overrides.pop(name) for name in ("max_step_tokens", "max_prefill_tokens") if name in overrides}
    config: dict[str, Any] = {"num_slots": 512, "max_num_seqs": 8, "max_tree_nodes": 16, "torch_threads": 1} | overrides
    return Verifier(ModelRunner(EngineConfig(model_path=checkpoint, **config)), **steps)


def open_request(
    number: int, spec: SamplingSpec, *, epoch: int = 1, prompt: Sequence[int] = PROMPT, output: Sequence[int] = ()
) -> OpenRequest:
    return OpenRequest(key=(7, number), epoch=epoch, prompt=prompt, output=output, sampling=spec)


def tree_request(number: int, length: int, tree: Tree = NO_TREE, *, epoch: int = 1) -> TreeRequest:
    return TreeRequest(key=(7, number), epoch=epoch, length=length, tokens=tree[0], parents=tree[1])


def random_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """Nodes anywhere, half of them with the token that plain decoding has at that depth."""
    tokens, parents, depths = [], [], [0]
    for number in range(rng.randint(0, 12)):
        parent = rng.randint(0, number)
        depth = depths[parent] + 1
        depths.append(depth)
        right = expected[depth - 1] if depth <= len(expected) else rng.randrange(61)
        tokens.append(right if rng.random() < 0.5 else rng.randrange(61))
        parents.append(parent)
    return tokens, parents


def oracle_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The continuation itself, a wrong sibling before each right node, beyond the end of the output as well."""
    tokens, parents, last = [], [], 0
    for token in [*expected[:6], 1, 2]:
        tokens += [(token + 1) % 61, token]
        parents += [last, last]
        last = len(tokens)
    return tokens, parents


def adversarial_tree(rng: random.Random, expected: Sequence[int]) -> Tree:
    """The right first token twice, one of them under the wrong parent, and a right chain below a wrong node."""
    right = [*expected[:3], 4, 4, 4]
    wrong = (right[0] + 1) % 61
    return [wrong, right[0], right[1], right[0], right[1], wrong, right[2]], [0, 1, 1, 0, 4, 4, 5]


def no_tree(_rng: random.Random, _expected: Sequence[int]) -> Tree:
    return NO_TREE


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)
    results: list[TreeResult] = field(default_factory=list)


def decode(
    verifier: Verifier,
    number: int,
    spec: SamplingSpec,
    expected: Sequence[int],
    make_tree: Callable[[random.Random, Sequence[int]], Tree],
) -> Decoded:
    rng, out = random.Random(number), Decoded()
    while len(out.tokens) < spec.max_new_tokens and not (out.tokens and out.tokens[-1] in spec.stop_token_ids):
        tree = make_tree(rng, expected[len(out.tokens) :])
        result = verifier.step([tree_request(number, len(PROMPT) + len(out.tokens), tree)]).results[0]
        if result.outcome is Outcome.DEFERRED:
            continue
        assert result.outcome is Outcome.ACCEPTED, result.fault
        check_path(tree, result)
        out.tokens += result.token_ids
        out.results.append(result)
    return out


def check_path(tree: Tree, result: TreeResult) -> None:
    tokens, parents = tree
    assert [tokens[node - 1] for node in result.accepted_nodes] == result.token_ids[: len(result.accepted_nodes)]
    assert [parents[node - 1] for node in result.accepted_nodes] == [0, *result.accepted_nodes[:-1]][
        : len(result.accepted_nodes)
    ]
    assert len(result.token_ids) - len(result.accepted_nodes) in (0, 1)
