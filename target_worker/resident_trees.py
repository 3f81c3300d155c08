"""Trees of candidates, grown level by level from a draft head: EAGLE-2's way, with calibrated values.

Of each level the k nodes of highest path value are expanded, k children each. Where a tree of S sessions stands is the
same for all: k candidates below the root, then k groups of k a level. Nothing comes to the host between the levels,
unless paths are asked for.

A node's row of the head is (hidden state of the row that proposed it, its token), at the position before its own: the
head's entry for position i is that of token i + 1. Rows see the session's tokens and, through a mask, their own path.

Shapes: S sessions, k children and beams, D levels, G = 1 + (D - 1) k groups, N hidden, W mask words.
Source: EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.target_worker.resident_choice import CandidateRanker, Candidates, Paths, RankedSessions

ROOT = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateTrees:
    """All candidates of S trees, on the host. Column c of a tree is child c % k of group c // k.

    Attributes:
        tokens: [S, G, k] int32, -1 for none.
        buckets: [S, G, k] int32, of the calibration.
        acceptance: [S, G, k] float32 given the parent.
        values: [S, G, k] float32 of the path.
        above: [S, G] int32, the column of each group's parent; `ROOT` for the first.
    """

    tokens: npt.NDArray[np.int32]
    buckets: npt.NDArray[np.int32]
    acceptance: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    above: npt.NDArray[np.int32]

    @classmethod
    def of(cls, packed: npt.NDArray[np.int32], *, depth: int, top_k: int) -> CandidateTrees:
        """From what `grow_trees` gives, [S, words], copied to the host."""
        groups = 1 + (depth - 1) * top_k
        width = groups * top_k

        def part(place: int, dtype: Any = np.int32) -> npt.NDArray[Any]:
            columns = np.ascontiguousarray(packed[:, place * width : (place + 1) * width])
            return columns.view(dtype).reshape(-1, groups, top_k)

        return cls(
            tokens=part(0),
            buckets=part(1),
            acceptance=part(2, np.float32),
            values=part(3, np.float32),
            above=packed[:, 4 * width :],
        )


class TreeHead(Protocol):
    """What a tree is grown with."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, N] to [R, V]."""
        ...

    def ranking_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same, or its first columns, where all others are -inf."""
        ...


Step = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Level (from 1), hidden [S k, N], tokens [S k], masks [S k, W]: the hidden states of that level's nodes [S k, N]."""


@torch.inference_mode()
def grow_trees(
    head: TreeHead,
    step: Step,
    ranker: CandidateRanker,
    sessions: RankedSessions,
    hidden: torch.Tensor,
    *,
    depth: int,
    top_k: int,
    bits: torch.Tensor,
) -> torch.Tensor:
    """Grows one tree a session, as one row of `CandidateTrees.of`, [S, words] int32 on the device.

    Args:
        head: gives logits.
        step: runs the head over one level.
        ranker: ranks children.
        sessions: S.
        hidden: [S, N] the head's at each root.
        depth: D.
        top_k: k.
        bits: of `own_bits`.
    """
    count = hidden.shape[0]
    paths: Paths | None = [[[]] for _ in sessions.sessions] if sessions.needs_paths else None
    logits = head.logits if sessions.ranks_all else head.ranking_logits
    rows = logits(hidden)
    vocab_size = rows.shape[1]
    found = ranker.rank(sessions, rows, depth=0, paths=paths)
    values = found.acceptance
    levels = [_Level(found, values, torch.full((count, 1), ROOT, device=hidden.device))]
    words = bits.shape[1]
    masks = torch.zeros((count, 1, words), dtype=torch.int64, device=hidden.device)
    first = 0
    for level in range(1, depth):
        best = values.view(count, -1).topk(top_k, dim=1)
        # Rows of no session may hold anything: what they rank has to be a token all the same.
        tokens = found.tokens.reshape(count, -1).gather(1, best.indices).clamp(0, vocab_size - 1)
        beam = best.indices // top_k
        parent = hidden.view(count, -1, hidden.shape[1]).gather(1, _wide(beam, hidden.shape[1]))
        masks = masks.gather(1, _wide(beam, words)) | bits[(level - 1) * top_k : level * top_k]
        hidden = step(level, parent.flatten(0, 1), tokens.flatten(), masks.flatten(0, 1))
        if paths is not None:
            paths = _extended(paths, beam[: len(paths)].tolist(), tokens[: len(paths)].tolist())
        above = first + best.indices
        first += values.numel() // count
        found = ranker.rank(sessions, logits(hidden), depth=level, paths=paths)
        values = (best.values[:, :, None] * found.acceptance.view(count, top_k, top_k)).view(count, -1)
        levels.append(_Level(found, values, above))
    return _packed(levels, count)


@dataclass(frozen=True, slots=True)
class _Level:
    found: Candidates
    values: torch.Tensor
    above: torch.Tensor


def _wide(index: torch.Tensor, width: int) -> torch.Tensor:
    """[S, k] for a gather along the middle of [S, b, width]."""
    return index[:, :, None].expand(-1, -1, width)


def own_bits(depth: int, top_k: int, device: torch.device) -> torch.Tensor:
    """[(D - 1) k, W] int64: of row i bit i alone, the mask of a node without ancestors."""
    rows = (depth - 1) * top_k
    bits = np.zeros((rows, max(1, -(-rows // 64))), dtype=np.uint64)
    places = np.arange(rows)
    bits[places, places // 64] = np.uint64(1) << (places % 64).astype(np.uint64)
    return torch.from_numpy(bits.view(np.int64)).to(device)


def _extended(paths: Paths, beams: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Paths:
    return [
        [[*of_session[beam], token] for beam, token in zip(its_beams, its_tokens, strict=True)]
        for of_session, its_beams, its_tokens in zip(paths, beams, tokens, strict=True)
    ]


def _packed(levels: Sequence[_Level], count: int) -> torch.Tensor:
    """[S, words] int32: tokens, buckets, acceptance and values of all candidates, and what is above each group."""
    columns = [level.found.tokens for level in levels], [level.found.buckets for level in levels]
    floats = [level.found.acceptance for level in levels], [level.values for level in levels]
    parts = [torch.cat([each.reshape(count, -1) for each in column], 1).to(torch.int32) for column in columns]
    parts += [torch.cat([each.reshape(count, -1) for each in column], 1).view(torch.int32) for column in floats]
    above = torch.cat([level.above for level in levels], 1).to(torch.int32)
    return torch.cat([*parts, above], dim=1)
