"""The root and nodes of one session's tree as rows of a forward's logits, and what applies to these rows.

Shapes: T rows of all sessions (root and nodes, session after session).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.draft_distribution import DraftDistribution
from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import Session
from outrider.target_worker.synthetic import DecidedPath
from outrider.tree import node_depths


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeRows:
    """The root and n nodes of one session's tree.

    Attributes:
        session: whose; its last token is the root.
        tokens: [n] of nodes 1 to n.
        parents: [n] node numbers, 0 the root.
        distributions: [n] the q each node's token was drawn from, where the rule needs it; otherwise empty.
    """

    session: Session
    tokens: Sequence[int]
    parents: Sequence[int]
    distributions: Sequence[DraftDistribution | None] = ()

    @classmethod
    def of(
        cls,
        session: Session,
        tokens: Sequence[int],
        parents: Sequence[int],
        distributions: Sequence[DraftDistribution | None] = (),
    ) -> NodeRows:
        """The rows of one tree."""
        return cls(session=session, tokens=tokens, parents=parents, distributions=distributions)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """[n + 1], the root's 0 first."""
        return node_depths(self.parents)

    @functools.cached_property
    def decided(self) -> DecidedPath | None:
        """What is accepted whatever the target chooses, under the synthetic rule; None under the others."""
        coins = self.session.coins
        return None if coins is None else coins.decide(self.tokens, self.parents, root=self.session.root_index)

    @property
    def sampling(self) -> SamplingSpec:
        """See `PathRows`."""
        return self.session.sampling

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """See `PathRows`."""
        return self.session.stop_token_ids

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """See `PathRows`."""
        return self.session.counts()

    @property
    def count(self) -> int:
        """Rows: n + 1."""
        return len(self.tokens) + 1

    def paths(self) -> list[list[int]]:
        """[n + 1] the tokens from below the root to each row's own."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    def bans_stop(self) -> np.ndarray:
        """[n + 1] bool: the row chooses a token before which fewer than min_new_tokens are out."""
        session = self.session
        out_before = len(session.tokens) - session.prompt_len + self.depths
        return out_before < session.sampling.min_new_tokens
