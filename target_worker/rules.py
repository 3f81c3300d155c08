"""The verification rules: what the target makes of the trees of one step, whichever rule each session has.

    coupled       one choice a node with the shared noise, and a walk along the choices; greedy at temperature 0
    target_only   one coin a node, held against the cumulative probability of its children
    rejection     min(1, p / q) along a chain, and a sample of max(p - q, 0) at the first rejection
    synthetic     the coupled choices, but a path that coins have decided (see `outrider.target_worker.synthetic`)

Every random number is a function of (seed, choice index, position) alone, under rejection of the root's position and
the node's number; each is used once in a session's committed tokens. So the same tree gives the same tokens, and what
is drawn at a position tells nothing of another's.

Shapes: T rows of all trees (root and nodes, tree after tree), V vocabulary size; bs trees of a rule, n rows of the
largest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from outrider.kernels.chain_sampling import chain_speculative_sampling
from outrider.kernels.filtered_probs import filtered_probs
from outrider.kernels.noise import STREAM_COINS, STREAM_RESIDUAL, philox_uint32
from outrider.kernels.tree_sampling import tree_speculative_sampling_target_only
from outrider.kernels.verify_coupled import verify_coupled
from outrider.sampling import VerificationRule
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.walk import ChoiceColumns, Walk, WalkOutputs, completed

# Rows of probabilities that exist at a time have at most so many entries: 256 MiB of float32.
_MOST_PROBABILITIES = 1 << 26


@torch.inference_mode()
def verify(logits: torch.Tensor, trees: Sequence[NodeRows]) -> list[Walk]:
    """The walk of every tree under its session's rule.

    Args:
        logits: [T, V] float32, processors applied.
        trees: of the sessions, in the order of the logits.
    """
    first_rows = np.cumsum([0, *(tree.count for tree in trees)])
    walks: dict[int, Walk] = {}
    for places, judge in _shares(trees, vocab_size=logits.shape[1]):
        part = [trees[place] for place in places]
        rows = logits
        if len(part) < len(trees):
            spans = [np.arange(first_rows[place], first_rows[place + 1]) for place in places]
            rows = logits[torch.from_numpy(np.concatenate(spans)).to(logits.device)]
        walks.update(zip(places, judge(rows, part), strict=True))
    return [walks[place] for place in range(len(trees))]


_Judge = Callable[[torch.Tensor, Sequence[NodeRows]], list[Walk]]


def _shares(trees: Sequence[NodeRows], *, vocab_size: int) -> Iterator[tuple[list[int], _Judge]]:
    """Which trees are judged together, and how: those of one rule, as far as their probabilities have room."""
    by_key: dict[object, list[int]] = {}
    for place, tree in enumerate(trees):
        spec = tree.session.sampling
        # Thresholds are numbers of a launch.
        thresholds = (spec.threshold_single, spec.threshold_acc)
        by_key.setdefault((spec.rule, thresholds if spec.rule is VerificationRule.TARGET_ONLY else None), []).append(
            place
        )
    for places in by_key.values():
        judge = _JUDGES[trees[places[0]].session.sampling.rule]
        most = len(places)
        if judge is not coupled_walks:
            widest = max(trees[place].count for place in places)
            most = max(1, _MOST_PROBABILITIES // (widest * vocab_size))
        for first in range(0, len(places), most):
            yield places[first : first + most], judge


def coupled_walks(logits: torch.Tensor, trees: Sequence[NodeRows]) -> list[Walk]:
    """The coupled rule's, and the synthetic one's."""
    columns = ChoiceColumns.of(trees, logits.device)
    outputs = WalkOutputs(columns.tree_rows)
    verify_coupled(
        logits,
        columns.seeds,
        columns.positions,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        choice_index=columns.choice_index,
        candidates=columns.candidates,
        retrive_index=columns.tree_rows,
        retrive_next_token=columns.first_child,
        retrive_next_sibling=columns.next_sibling,
        predicts=outputs.predicts,
        accept_index=outputs.accept_index,
        accept_token_num=outputs.accept_token_num,
    )
    return completed(outputs.walks(), trees)


def target_only_walks(logits: torch.Tensor, trees: Sequence[NodeRows]) -> list[Walk]:
    """The target_only rule's, of sessions with the same thresholds.

    The coin of a node is that of the position after it; the final token's is that of the position after the root.
    """
    columns = ChoiceColumns.of(trees, logits.device)
    outputs = WalkOutputs(columns.tree_rows)
    sampling = trees[0].session.sampling
    index = columns.tree_rows.clamp(min=0)
    tree_speculative_sampling_target_only(
        outputs.predicts,
        outputs.accept_index,
        outputs.accept_token_num,
        columns.candidates,
        columns.tree_rows,
        columns.first_child,
        columns.next_sibling,
        _coins(columns, STREAM_COINS)[index],
        _coins(columns, STREAM_RESIDUAL)[index[:, 0]],
        _probs(logits, columns, index),
        None,
        sampling.threshold_single,
        sampling.threshold_acc,
    )
    return outputs.walks()


def rejection_walks(logits: torch.Tensor, trees: Sequence[NodeRows]) -> list[Walk]:
    """The rejection rule's, of trees that are chains, every node with its distribution.

    The numbers of node i are those of (position after the root, i).
    """
    device = logits.device
    columns = ChoiceColumns.of(trees, device)
    index = columns.tree_rows.clamp(min=0)
    ids = columns.candidates[:, 1:].contiguous()
    roots = index[:, 0]
    tokens, _, emitted = chain_speculative_sampling(
        _draft_probs(trees, (len(trees), ids.shape[1], logits.shape[1]), device),
        ids,
        _probs(logits, columns, index),
        seed=columns.seeds[roots],
        offset=columns.positions[roots] | columns.choice_index[roots] << 32,
    )
    return [
        Walk(nodes=list(range(1, count + 1)), tokens=row[: count + 1])
        for row, count in zip(tokens.tolist(), emitted.tolist(), strict=True)
    ]


def _probs(logits: torch.Tensor, columns: ChoiceColumns, index: torch.Tensor) -> torch.Tensor:
    """[bs, n, V] the target's distributions at the rows of `index` [bs, n]."""
    flat = index.flatten()
    found = filtered_probs(
        logits[flat], columns.temperature[flat], columns.top_k[flat], columns.top_p[flat], columns.min_p[flat]
    )
    return found.view(*index.shape, -1)


def _draft_probs(trees: Sequence[NodeRows], shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """[bs, n - 1, V] the distributions that travelled, dense: each the float32 that was drawn from."""
    places, weights = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    for tree_place, tree in enumerate(trees):
        for node, distribution in enumerate(tree.distributions):
            assert distribution is not None
            places.append((tree_place * shape[1] + node) * shape[2] + distribution.token_ids.astype(np.int64))
            weights.append(distribution.probabilities())
    dense = torch.zeros(shape, dtype=torch.float32, device=device)
    flat = torch.from_numpy(np.concatenate(places)).to(device)
    dense.view(-1)[flat] = torch.from_numpy(np.concatenate(weights)).to(device)
    return dense


def _coins(columns: ChoiceColumns, stream: int) -> torch.Tensor:
    """[T] float32 in [0, 1), one of each row's position."""
    ids = torch.zeros_like(columns.positions)[:, None]
    words = philox_uint32(columns.seeds, columns.positions, ids, stream, columns.choice_index)
    return (words[:, 0] >> 8).float() * 2.0**-24


_JUDGES: dict[VerificationRule, _Judge] = {
    VerificationRule.COUPLED: coupled_walks,
    VerificationRule.TARGET_ONLY: target_only_walks,
    VerificationRule.REJECTION: rejection_walks,
}
