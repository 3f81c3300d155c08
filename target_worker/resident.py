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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.engine.decoder_weights import TREE_POSITIONS
from outrider.engine.eagle import EagleHead, load_eagle_head
from outrider.engine.model_runner import ModelRunner
from outrider.errors import OutOfSlots
from outrider.sampling import VerificationRule
from outrider.target_worker.planning import Work
from outrider.target_worker.resident_choice import CandidateRanker
from outrider.target_worker.resident_config import ResidentConfig
from outrider.target_worker.resident_eager import EagerDraft
from outrider.target_worker.resident_extension import HeadExtension
from outrider.target_worker.resident_growth import GrownTree
from outrider.target_worker.resident_head import HeadLayer, Kept
from outrider.target_worker.resident_program import MOST_ROWS, RoundProgram
from outrider.target_worker.resident_rounds import DraftRounds
from outrider.target_worker.resident_trees import CandidateTrees, own_bits
from outrider.target_worker.sessions import Outcome, Session, TreeResult

# Trees of a session of which no node came back for verification: its rows are worth more without them. Every so many
# steps of its own it is tried again.
_UNUSED_TREES, _PROBE_STEPS = 8, 8


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
        layer = HeadLayer.of(head, runner.slots.num_slots)
        self.key_cache, self.value_cache = layer.keys, layer.values
        top_k = min(config.top_k, runner.vocab_size)
        self.calibration = AcceptanceCalibration(branching=top_k)
        self._ranker = CandidateRanker(
            self.calibration, top_k=top_k, vocab_size=runner.vocab_size, device=runner.device
        )
        engine = runner.config
        graphs = engine.attention_backend_name == "triton" and not engine.enforce_eager
        self._extension = HeadExtension(layer, runner, graphs=graphs)
        self._tree_slots = config.tree_slots(top_k)
        if runner.steps is None:
            self._rounds = EagerDraft(layer, runner, self._ranker, config)
        else:
            bits = own_bits(config.depth, top_k, runner.device)
            self._rounds = DraftRounds(
                RoundProgram(layer, runner.steps.program, self._ranker, depth=config.depth, bits=bits),
                runner,
                tree_slots=self._tree_slots,
                max_sessions=min(config.max_sessions, engine.max_num_seqs),
                graphs=graphs,
            )
        self.grows = True
        self.trees = self.missed = 0

    def warm_up(self) -> None:
        """Compiles what drafting may need, and captures it."""
        self._extension.warm_up()
        if self.grows:
            self._rounds.warm_up()

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
            final_softcap=runner.final_softcap,
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
        kept: list[Kept] = []
        growing: dict[int, int] = {}
        for place, work in enumerate(works):
            result = results[place] if place < len(results) else None
            if (first_row := first_rows.get(id(work))) is None:
                continue
            rows = _kept_rows(work, result, first_row)
            if not rows:
                continue
            if result is not None and result.outcome is Outcome.ACCEPTED:
                self._observe(work, result.token_ids)
                if self._may_grow(work.session):
                    growing[len(kept)] = place
            kept.append(Kept(session=work.session, rows=rows, first_index=work.context))
        if not self.grows or len(growing) > self._config.max_sessions:
            growing.clear()
        growing = {number: place for number, place in growing.items() if self._reserve(kept[number].session)}
        try:
            grown = self._drafted(kept, growing)
        finally:
            for number in growing:
                session = kept[number].session
                self._runner.slots.truncate(session.row, session.root_index)
        for number, tree in grown.items():
            results[growing[number]] = self._told(kept[number].session, tree, results[growing[number]])
        return results

    def _drafted(self, kept: Sequence[Kept], growing: Collection[int]) -> dict[int, GrownTree]:
        """Extends the head by all that is kept; the trees of those that grow, by their number."""
        if not kept:
            return {}
        self._ranker.refresh()
        # What a round does not extend itself.
        rest: list[Kept] = []
        for number, part in enumerate(kept):
            rows = part.rows[:-MOST_ROWS] if number in growing else part.rows
            if rows:
                rest.append(replace(part, rows=rows))
        if rest:
            self._extension.run(rest)
        if not growing:
            return {}
        return self._trees(growing, self._rounds.run([kept[number].last(MOST_ROWS) for number in growing]))

    def _trees(self, numbers: Iterable[int], packed: npt.NDArray[np.int32]) -> dict[int, GrownTree]:
        grown = CandidateTrees.of(packed, depth=self._config.depth, top_k=self._ranker.top_k)
        return {
            number: GrownTree(
                tokens=grown.tokens[place],
                buckets=grown.buckets[place],
                acceptance=grown.acceptance[place],
                values=grown.values[place],
                above=grown.above[place],
            )
            for place, number in enumerate(numbers)
        }

    def _may_grow(self, session: Session) -> bool:
        """Whether a tree could save the session a step."""
        if (count := session.unused_trees) >= _UNUSED_TREES and (count + 1) % _PROBE_STEPS:
            return False
        goes_on = not session.closing and session.tokens[-1] not in session.stop_token_ids
        wants = session.draft is not None and session.sampling.rule is not VerificationRule.REJECTION
        return goes_on and wants and session.limit - len(session.tokens) > 1

    def _observe(self, work: Work, token_ids: Sequence[int]) -> None:
        session = work.session
        if session.drafted is not None:
            session.drafted.observe(self.calibration, token_ids)
            session.drafted = None
            was_asked = work.tree is not None and len(work.tree.tokens) > 0
            session.unused_trees = 0 if was_asked else session.unused_trees + 1
        elif session.unused_trees >= _UNUSED_TREES:
            session.unused_trees += 1

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
            self._runner.slots.extend(session.row, self._tree_slots)
        except OutOfSlots:
            self.missed += 1
            return False
        return True


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
