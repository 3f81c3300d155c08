"""A target that drafts by itself: a draft head beside it, with KV in the target's slots.

    forward, walks, commits -> extend the head's KV by what was committed -> grow a tree below every new root

The head is one more layer: its entry of index i is made of the target's hidden state there and of token i + 1, and lies
in the slot of key index i. After every step each slot of a session's row has the target's KV and the head's; so
prefixes that are shared (`SessionKv`), sessions that are cut and sessions that are computed anew need nothing else.

A tree's nodes take slots behind the session's own while it grows. Where there are none, no tree is grown. What was
drafted changes no token: a tree is a proposal like any other.

Shapes: T rows of a forward, N hidden, S sessions that grow, k nodes of a level.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.engine.batch import BatchBuilder
from outrider.engine.decoder_weights import TREE_POSITIONS
from outrider.engine.eagle import EagleHead, load_eagle_head
from outrider.engine.model_runner import ModelRunner
from outrider.errors import OutOfSlots
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.sampling import VerificationRule
from outrider.target_worker.planning import Work
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.resident_growth import GrownTree
from outrider.target_worker.resident_trees import grow_trees
from outrider.target_worker.sessions import Outcome, Session, TreeResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Kept:
    """What a session keeps of a forward: `rows` of it, whose slots stand at `first_index` and on."""

    session: Session
    rows: Sequence[int]
    first_index: int


class ResidentDraft:
    """Follows a verifier's steps and drafts for its sessions.

    Args:
        head: the draft head.
        runner: the target, whose layers are tapped from now on; nothing may be captured yet.
        config: of the trees.

    Attributes:
        head: as given.
        key_cache, value_cache: [num_slots, Hkv, D] of the head.
        grows: whether trees are grown; if not, the head's KV alone is kept up.
        trees: grown so far.
        missed: trees that found no slots.
    """

    def __init__(self, head: EagleHead, runner: ModelRunner, config: ResidentConfig) -> None:
        self.head, self._runner, self._config = head, runner, config
        runner.tap(head.taps)
        # Zeros, not empty: what lies in a slot never written is multiplied by a weight of 0, and 0 * NaN is NaN.
        shape = (runner.slots.num_slots, head.kv_heads, head.head_dim)
        self.key_cache, self.value_cache = (
            torch.zeros(shape, dtype=runner.embedding.dtype, device=runner.device) for _ in range(2)
        )
        self._top_k = min(config.top_k, runner.vocab_size)
        self.calibration = AcceptanceCalibration(branching=self._top_k)
        self._ranker = CandidateRanker(
            self.calibration, top_k=self._top_k, vocab_size=runner.vocab_size, device=runner.device
        )
        self.grows = True
        self.trees = self.missed = 0

    @classmethod
    def load(cls, config: ResidentConfig, runner: ModelRunner) -> ResidentDraft:
        """With the head in the configuration's folder.

        Raises:
            CheckpointError: the folder has no head that fits the target.
        """
        head = load_eagle_head(
            config.head,
            embedding=runner.embedding,
            output=runner.output,
            target_layers=runner.num_layers,
            max_positions=runner.info.max_model_len + TREE_POSITIONS,
            attend=runner.attend,
            fixed=runner.config.deterministic,
        )
        return cls(head, runner, config)

    @torch.inference_mode()
    def follow(
        self, works: Sequence[Work], results: Sequence[TreeResult], first_rows: Mapping[int, int]
    ) -> list[TreeResult]:
        """Extends the head's KV by what a step has left its sessions, and drafts on.

        It must be called after the step's commits and before the target's next forward.

        Args:
            works: of the step.
            results: of the first of `works`, in their order.
            first_rows: by id of a work, its first row of the forward whose hidden states are there; works that are not
                in it are left alone.

        Returns:
            The results, with what was grown.
        """
        results = list(results)
        kept: list[_Kept] = []
        places: list[int | None] = []
        for place, work in enumerate(works):
            result = results[place] if place < len(results) else None
            if (first_row := first_rows.get(id(work))) is None:
                continue
            rows = _kept_rows(work, result, first_row)
            kept.append(_Kept(session=work.session, rows=rows, first_index=work.context))
            committed = result is not None and result.outcome is Outcome.ACCEPTED
            places.append(place if committed else None)
            if committed:
                self._observe(work.session, results[place].token_ids)
        if not any(part.rows for part in kept):
            return results
        hidden = self._extend(kept)
        lasts = np.cumsum([len(part.rows) for part in kept]) - 1
        growing = [
            (place, part.session, int(last))
            for part, place, last in zip(kept, places, lasts, strict=True)
            if place is not None and self._may_grow(part.session)
        ]
        if self.grows and len(growing) <= self._config.max_sessions:
            self._grow(growing, hidden, results)
        return results

    def _extend(self, kept: Sequence[_Kept]) -> torch.Tensor:
        """The head over what sessions keep, session after session; its rows [T, N]."""
        builder = BatchBuilder()
        rows: list[int] = []
        for part in kept:
            if part.rows:
                begin = part.first_index + 1
                tokens = part.session.tokens[begin : begin + len(part.rows)]
                builder.add_chain(part.session.row, tokens, part.first_index, want_last_logits=False)
                rows.extend(part.rows)
        batch = builder.build()
        step = self._runner.attention_step(batch)
        features = self._runner.features.index_select(0, self._put(np.array(rows, dtype=np.int64)))
        assert step.batch.positions is not None
        return self.head.forward(
            self.head.fuse(features),
            self._put(batch.token_ids),
            positions=step.batch.positions,
            write_slots=step.write_slots,
            batch=step.batch,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
        )

    def _may_grow(self, session: Session) -> bool:
        """Whether a tree could save the session a step."""
        goes_on = not session.closing and session.tokens[-1] not in session.stop_token_ids
        wants = session.draft is not None and session.sampling.rule is not VerificationRule.REJECTION
        return goes_on and wants and session.limit - len(session.tokens) > 1

    def _observe(self, session: Session, token_ids: Sequence[int]) -> None:
        if session.drafted is not None:
            session.drafted.observe(self.calibration, token_ids)
            session.drafted = None

    def _grow(
        self, growing: Sequence[tuple[int, Session, int]], hidden: torch.Tensor, results: list[TreeResult]
    ) -> None:
        slots = self._runner.slots
        growing = [entry for entry in growing if self._reserve(entry[1])]
        if not growing:
            return
        sessions = [session for _, session, _ in growing]
        try:
            levels = _Levels(self, self._runner, sessions, depth=self._config.depth, top_k=self._top_k)
            grown = grow_trees(
                self.head,
                levels.step,
                self._ranker,
                RankedSessions(sessions, self._runner.device),
                hidden.index_select(0, self._put(np.array([last for _, _, last in growing], dtype=np.int64))),
                depth=self._config.depth,
                top_k=self._top_k,
            )
        finally:
            for session in sessions:
                slots.truncate(session.row, session.root_index)
        for number, (place, session, _) in enumerate(growing):
            tree = GrownTree(
                tokens=grown.tokens[number],
                buckets=grown.buckets[number],
                acceptance=grown.acceptance[number],
                values=grown.values[number],
                above=grown.above[number],
            )
            results[place] = self._told(session, tree, results[place])

    def _told(self, session: Session, tree: GrownTree, result: TreeResult) -> TreeResult:
        """The result with the best nodes of a tree."""
        assert session.draft is not None
        limits, config = session.draft, self._config
        room = session.limit - 1 - len(session.tokens)
        columns = tree.best(
            most=min(config.nodes, limits.max_nodes or config.nodes),
            max_depth=min(limits.max_depth or config.depth, room),
            min_value=config.min_value,
        )
        session.drafted = tree
        self.trees += 1
        nodes = tree.nodes(columns, as_of=len(session.tokens), first_id=session.next_node_id)
        session.next_node_id += len(nodes.node_ids)
        return replace(result, growth=nodes)

    def _reserve(self, session: Session) -> bool:
        """Takes the slots of a tree; False where there are none."""
        try:
            self._runner.slots.extend(session.row, (self._config.depth - 1) * self._top_k)
        except OutOfSlots:
            self.missed += 1
            return False
        return True

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._runner.device, non_blocking=True)


class _Levels:
    """The head over one level after the other: what each row sees, and where it stores.

    Args:
        draft: whose head and caches.
        runner: whose slot table.
        sessions: S, their rows extended by the slots of a tree.
        depth: levels.
        top_k: k.
    """

    def __init__(
        self, draft: ResidentDraft, runner: ModelRunner, sessions: Sequence[Session], *, depth: int, top_k: int
    ) -> None:
        self._draft, self._top_k = draft, top_k
        device = runner.device
        roots = np.array([session.root_index for session in sessions], dtype=np.int32)
        rows = np.array([session.row for session in sessions])
        self._most = int(roots.max()) + (depth - 1) * top_k
        table = runner.slots.table[rows, : self._most]
        nodes = np.arange((depth - 1) * top_k)
        slots = runner.slots.table[rows[:, None], roots[:, None] + nodes].astype(np.int64)
        self._table = torch.from_numpy(table).to(device)
        self._slots = torch.from_numpy(slots).to(device)
        self._roots = torch.from_numpy(roots).to(device)
        self._prefix = self._roots.repeat_interleave(top_k)
        self._starts = torch.arange(len(sessions) + 1, dtype=torch.int32, device=device) * top_k

    def step(self, level: int, hidden: torch.Tensor, tokens: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """See `resident_trees.Step`."""
        end = level * self._top_k
        batch = TreeAttentionBatch(
            slot_table=self._table,
            query_start=self._starts,
            tree_start=self._roots,
            prefix_len=self._prefix,
            key_len=self._roots + end,
            tree_mask=masks,
            max_query_len=self._top_k,
            max_key_len=self._most,
        )
        return self._draft.head.forward(
            hidden,
            tokens,
            # The entry of a token stands one before it.
            positions=self._prefix + (level - 1),
            write_slots=self._slots[:, end - self._top_k : end].flatten(),
            batch=batch,
            key_cache=self._draft.key_cache,
            value_cache=self._draft.value_cache,
        )


def _kept_rows(work: Work, result: TreeResult | None, first_row: int) -> list[int]:
    """The forward's rows whose slots the session keeps.

    Args:
        work: the session's part.
        result: what became of it; None where it was not asked for.
        first_row: of the work in the forward.
    """
    rows = list(range(first_row, first_row + work.prefill))
    if result is not None and result.outcome is Outcome.ACCEPTED:
        root = first_row + work.prefill
        # The last emitted token is the next root, which has no KV yet.
        rows += [root, *(root + node for node in result.accepted_nodes[: len(result.token_ids) - 1])]
    return rows
