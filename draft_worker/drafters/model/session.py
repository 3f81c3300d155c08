"""A draft model's session as the host sees it; the tree is on the device."""

from collections import deque

from outrider.draft_worker.drafters.model.sync_tree import SyncTree
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import SessionStart
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.grammar.matcher import SessionGrammar
from outrider.sampling import VerificationRule


class ModelSession:
    """One open session.

    Args:
        start: what opened it.
        row: of the pool.
        generation: of the row.
        capacity: most nodes that are alive.

    Attributes:
        start, row, generation: as given.
        sampling: parameters of the request.
        tokens: committed token ids, prompt and output.
        prompt_len: tokens of the prompt.
        needs_host: whether the host has a part in choosing its children.
        has_processors: whether the device changes logits before children are chosen.
        grammar: what its output has to match; None where it may be anything.
        holds: reasons why it does not grow.
        sync_tree: the round's tree in sync mode; None in async mode, and once the tree is sent.
        sent_tree: the round's tree in sync mode, once it is sent.
        distributions: under rejection ids that were sent and the q of their nodes; those of all live nodes are there.
        ids_used: highest node id that an earlier row of the session had.
        committed_now, committed_before: tokens committed since the last launch, and between the two before it.
        counted_at: launches when `committed_now` was counted.
    """

    def __init__(self, start: SessionStart, row: int, generation: int, capacity: int) -> None:
        self.start, self.row, self.generation = start, row, generation
        self.sampling = start.sampling
        self.tokens = [*start.prompt, *start.output]
        self.prompt_len = len(start.prompt)
        self.needs_host = bool(self.sampling.grammar) or self.sampling.rule is not VerificationRule.COUPLED
        self.has_processors = self.sampling.has_processors
        self.grammar: SessionGrammar | None = None
        self.holds: set[str] = set()
        self.sync_tree: SyncTree | None = None
        self.sent_tree: Growth | None = None
        self.distributions: deque[tuple[int, DraftDistribution]] = deque(maxlen=capacity)
        self.ids_used = 0
        self.committed_now = self.committed_before = self.counted_at = 0
