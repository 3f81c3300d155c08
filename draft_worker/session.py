"""One session at a draft worker: its committed tokens, its tree, and which of both have KV.

The session's row of the slot table holds the KV of committed tokens 0 to `kv_len` - 1 and, once all have it, the KV
of the expanded nodes. The invariant that everything here keeps: the tree has nodes only where `kv_len` equals the
committed length; otherwise the tokens from `kv_len` on (prompt, gaps, the target's final token) are *pending*, a chain
whose last row gives the root its children.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.draft_worker.draft_forest import DraftForest
from outrider.draft_worker.draft_tree import DraftTree
from outrider.draft_worker.session_checks import final_tokens, new_tokens
from outrider.engine.kv_slots import SlotTable
from outrider.grammar.matcher import SessionGrammar
from outrider.growth_source import ALL_SOURCES, GrowthSource
from outrider.sampling import SamplingSpec


class GrowthMode(Enum):
    """How a session's tree grows."""

    ASYNC = "async"
    """Without being asked, until credit or depth is used up."""
    SYNC = "sync"
    """One tree of fixed size after every commit, level by level, afresh."""


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """Bounds of one session's tree; see `SpeculationLimits` in common.proto.

    Raises:
        ValueError: a bound below 1.
    """

    mode: GrowthMode = GrowthMode.ASYNC
    max_live_nodes: int = 64
    max_depth: int = 16
    sync_nodes: int = 24

    def __post_init__(self) -> None:
        for name in ("max_live_nodes", "max_depth", "sync_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """What opens a session.

    Attributes:
        key: names the session in its worker: coordinator's incarnation and session id.
        owner: what its growth is handed to; opaque here.
        epoch: counts the opens of this session.
        prompt: at least one token.
        output: tokens committed so far.
        sources: by which of the worker's sources it may grow.
    """

    key: tuple[int, int]
    owner: Any
    epoch: int
    prompt: Sequence[int]
    output: Sequence[int]
    sampling: SamplingSpec
    limits: GrowthLimits
    sources: Collection[GrowthSource] = ALL_SOURCES


class DraftSession:
    """The state of one open session.

    Args:
        start: what opened it.
        slots: the slot table; the session takes a row of it.
        forest: where its tree grows, under the same number.
        max_model_len: most tokens of a session.

    Raises:
        OutOfSlots: no row is free.
    """

    def __init__(self, start: SessionStart, slots: SlotTable, forest: DraftForest, *, max_model_len: int) -> None:
        self.key, self.owner, self.epoch = start.key, start.owner, start.epoch
        self.sampling, self.limits = start.sampling, start.limits
        self.tokens = [*start.prompt, *start.output]
        self.prompt_len = len(start.prompt)
        self.kv_len = 0
        self.is_sync = start.limits.mode is GrowthMode.SYNC
        """Whether it grows one tree a round."""
        self.is_ranked = not replace(start.sampling, logprobs=None).reads_logits
        """Whether children are found by rank under log q + G, of logits as they are."""
        self.is_stepwise = self.is_sync or not self.is_ranked
        """Whether nothing of it can be begun before its last step is finished."""
        self.grammar: SessionGrammar | None = None
        """That its output has to match; None where it may be anything."""
        self.starved = False
        """Waits for slots, without KV."""
        self.level = 0
        """Sync mode: steps the round's tree has had, its root's included; -1 once it is sent."""
        self.least_value = 0.0
        """Sync mode: nodes of a lower path value cannot have children among the round's best."""
        self._slots = slots
        self._counts = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        self._counted_length = 0
        self.row = slots.acquire_row()
        forest.records[self.row] = np.frombuffer(start.sampling.record, dtype=np.int32)
        self.tree = DraftTree(
            self.tokens[-1],
            len(self.tokens) - 1,
            max_depth=start.limits.max_depth,
            max_children=start.limits.max_live_nodes,
            last_position=min(self.prompt_len + start.sampling.max_new_tokens, max_model_len) - 1,
            final_tokens=final_tokens(start.sampling),
            forest=forest,
            number=self.row,
        )

    @property
    def length(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.tokens)

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt has KV."""
        return self.kv_len >= self.prompt_len

    @property
    def root_is_open(self) -> bool:
        """Whether the committed tokens can be continued at all. A stop token within the prompt stops nothing."""
        if self.length == self.prompt_len:
            return self.tree.position < self.tree.last_position
        return self.tree.root_is_open

    @property
    def wants_prefill(self) -> bool:
        """Whether committed tokens lack KV, and a tree is to grow from them."""
        return self.kv_len < self.length and self.level >= 0 and not self.starved and self.root_is_open

    def commit(self, position: int, token_ids: Sequence[int], calibration: AcceptanceCalibration) -> None:
        """Moves the root along tokens that the target has committed; dead branches give their slots back.

        Args:
            position: committed length before the tokens. What the session already has is skipped.
            token_ids: the tokens, at least one.
            calibration: is told which children were hit.

        Raises:
            CommitMismatch: tokens are missing before `position`, or differ from what was committed.
        """
        token_ids = new_tokens(self.tokens, position, token_ids)
        if token_ids:
            self._reroot(token_ids, calibration)

    def token_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The distinct committed tokens, ascending, and how often each occurs in the output."""
        if self._counted_length != self.length:
            tokens, inverse = np.unique(np.array(self.tokens, dtype=np.int64), return_inverse=True)
            counts = np.bincount(inverse[self.prompt_len :], minlength=len(tokens)).astype(np.int64)
            self._counts, self._counted_length = (tokens, counts), self.length
        return self._counts

    def drop_kv(self) -> None:
        """Gives all slots back and forgets the tree; everything is pending again."""
        self._slots.truncate(self.row, 0)
        self.kv_len = 0
        self.tree.clear()
        self.least_value = 0.0
        self.level = min(self.level, 0)

    def starve(self) -> None:
        """Gives all slots back until there are enough for the session."""
        self.drop_kv()
        self.starved = True

    def close(self) -> None:
        """Gives the row and its slots back; a step that it is in may still run, and gives it nothing."""
        self.tree.close()
        self._slots.release_row(self.row)

    def _reroot(self, token_ids: Sequence[int], calibration: AcceptanceCalibration) -> None:
        had_tree = self.kv_len == self.length
        seen, kept, path = self.tree.reroot(token_ids)
        calibration.observe_parents(seen)
        # KV of nodes that are in flight counts: whatever reads it or takes its slots runs after them.
        if self.is_sync:
            # A round's tree depends on the committed tokens alone, so nothing survives but the path's KV.
            self.tree.clear()
            path = min(path, len(token_ids) - 1)
            self.level, self.least_value, kept = 0, 0.0, kept[:path]
        self.tokens.extend(token_ids)
        if had_tree:
            self._slots.retain(self.row, self.kv_len, kept)
            self.kv_len += path
