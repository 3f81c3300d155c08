"""The verification rules in plain Python, one session at a time: what rounds are held against.

Each function returns the numbers of the accepted nodes, root to leaf, and the emitted tokens. A tree's root is 0, its
nodes are 1 to n. Arguments: `length` committed tokens, root included; `logits` [n + 1, V] with the processors applied.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from tests.target_worker.plain_decoding import choice

from outrider.drafting.draft_distribution import DraftDistribution
from outrider.kernels.chain_sampling import chain_uniforms_reference
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_uint32_reference
from outrider.kernels.sampling.filtered_probs import filtered_probs_reference
from outrider.sampling import SamplingSpec, VerificationRule

Path = tuple[list[int], list[int]]


def reference_path(
    spec: SamplingSpec,
    length: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    q: Sequence[DraftDistribution],
    logits: torch.Tensor,
) -> Path:
    """Verify a tree by the rule of its session.

    Args:
        spec: the session's parameters.
        length: committed tokens.
        tokens: [n].
        parents: [n] node numbers.
        q: [n] under `rejection`, where the tree is a chain.
        logits: [n + 1, V].
    """
    if spec.is_synthetic:
        return _synthetic(spec, length, tokens, parents, logits)
    match spec.rule:
        case VerificationRule.COUPLED:
            return _coupled(spec, length, tokens, parents, logits)
        case VerificationRule.TARGET_ONLY:
            return _target_only(spec, length, tokens, parents, logits)
        case VerificationRule.REJECTION:
            return _rejection(spec, length, tokens, q, logits)
        case rule:
            raise AssertionError(f"{rule} is no rule of a choice")


def _coupled(
    spec: SamplingSpec, length: int, tokens: Sequence[int], parents: Sequence[int], logits: torch.Tensor
) -> Path:
    def accept(node: int, children: list[int], position: int) -> int | None:
        chosen = choice(logits[node], position, spec)
        return next((child for child in children if tokens[child - 1] == chosen), None)

    nodes = _walk(length, parents, accept)
    end = nodes[-1] if nodes else 0
    return nodes, [*(tokens[node - 1] for node in nodes), choice(logits[end], length + len(nodes), spec)]


def _synthetic(
    spec: SamplingSpec, length: int, tokens: Sequence[int], parents: Sequence[int], logits: torch.Tensor
) -> Path:
    rates, rejected = spec.synthetic_rates, list[int]()

    def accept(_node: int, children: list[int], position: int) -> int | None:
        rate = rates[min(position - length, len(rates) - 1)]
        if children and _coin(spec, position, STREAM_COINS) >= rate:
            rejected.append(tokens[children[0] - 1])
            return None
        return children[0] if children else None

    nodes = _walk(length, parents, accept)
    final = choice(logits[nodes[-1] if nodes else 0], length + len(nodes), spec)
    if final in rejected:
        below = (token for token in range(final - 1, -1, -1) if token not in spec.stop_token_ids)
        final = next(below, final + 1)
    return nodes, [*(tokens[node - 1] for node in nodes), final]


def _target_only(
    spec: SamplingSpec, length: int, tokens: Sequence[int], parents: Sequence[int], logits: torch.Tensor
) -> Path:
    probs, rejected = _probs(spec, logits), list[int]()

    def accept(node: int, children: list[int], position: int) -> int | None:
        rejected.clear()
        coin, running = _coin(spec, position, STREAM_COINS), 0.0
        for child in children:
            probability = float(probs[node, tokens[child - 1]])
            running += probability
            if probability > 0 and (coin * spec.threshold_acc < running or probability >= spec.threshold_single):
                rejected.clear()
                return child
            rejected.append(tokens[child - 1])
        return None

    nodes = _walk(length, parents, accept)
    residual = probs[nodes[-1] if nodes else 0].copy()
    residual[rejected] = 0
    final = _draw(residual, _coin(spec, length, STREAM_RESIDUAL))
    return nodes, [*(tokens[node - 1] for node in nodes), final]


def _rejection(
    spec: SamplingSpec, length: int, tokens: Sequence[int], q: Sequence[DraftDistribution], logits: torch.Tensor
) -> Path:
    probs, count = _probs(spec, logits), len(tokens)
    offset = torch.tensor([length | spec.choice_index << 32])
    coins, finals = (column[0].tolist() for column in chain_uniforms_reference(_seed(spec), offset, 1, count + 1))
    for place, (token, drawn_from) in enumerate(zip(tokens, q, strict=True)):
        dense = np.zeros(probs.shape[1])
        dense[drawn_from.token_ids] = drawn_from.probabilities()
        if coins[place] * dense[token] >= probs[place, token]:
            residual = np.maximum(probs[place] - dense, 0)
            final = _draw(residual if residual.any() else probs[place], finals[place])
            return [*range(1, place + 1)], [*tokens[:place], final]
    return [*range(1, count + 1)], [*tokens, _draw(probs[count], finals[count])]


def _walk(length: int, parents: Sequence[int], accept: Callable[[int, list[int], int], int | None]) -> list[int]:
    """Return the path that `accept` takes, given a node, its children, and the index of the token behind the node."""
    nodes, node = list[int](), 0
    while True:
        children = [number for number, parent in enumerate(parents, start=1) if parent == node]
        accepted = accept(node, children, length + len(nodes))
        if accepted is None:
            return nodes
        nodes.append(accepted)
        node = accepted


def _probs(spec: SamplingSpec, logits: torch.Tensor) -> np.ndarray:
    """The filtered distributions as float64 [n + 1, V]."""
    filters = (spec.temperature, spec.top_k, spec.top_p, spec.min_p)
    return (
        filtered_probs_reference(logits, *(torch.tensor([value] * len(logits)) for value in filters)).double().numpy()
    )


def _seed(spec: SamplingSpec) -> torch.Tensor:
    return torch.from_numpy(np.array([spec.seed & (1 << 64) - 1], dtype=np.uint64).view(np.int64))


def _coin(spec: SamplingSpec, position: int, stream: int) -> float:
    choice_index = torch.tensor([spec.choice_index])
    word = philox_uint32_reference(_seed(spec), torch.tensor([position]), torch.tensor([[0]]), stream, choice_index)
    return (int(word) >> 8) * 2.0**-24


def _draw(weights: Iterable[float], uniform: float) -> int:
    """Return the first token at which the running sum passes the uniform's share of the whole."""
    sums = np.cumsum(np.asarray(weights, dtype=np.float64))
    return int(np.searchsorted(sums, uniform * sums[-1], side="right"))
