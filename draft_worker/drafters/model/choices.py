"""Children that the host has a part in choosing, for each session by what its rule lets the target accept.

    greedy, coupled   the k best under log q + G, with the target's noise
    target_only       the k most likely under q: the target's coins are its own
    rejection         one token, drawn from the q that travels with it

q is what the target's p is of its own logits: after the same processors, grammar, temperature and filters. Under
rejection it is cut to its most likely tokens, renormalised and rounded to whole weights, and the token is drawn from
these by whole numbers, keyed by (seed, choice index, position): what travels is exactly what was drawn from.

Shapes: L rows of logits, one an expanded node; V vocabulary; K children of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.draft_worker.drafters.model.session import ModelSession
from outrider.drafting.acceptance_calibration import AcceptanceCalibration
from outrider.drafting.config import GrowthConfig
from outrider.drafting.draft_distribution import DraftDistribution
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.noise import STREAM_DRAFT, philox_uint32
from outrider.kernels.sampling.filtered_probs import filtered_probs
from outrider.kernels.sampling.grammar_mask import apply_grammar_masks
from outrider.kernels.sampling.rows import SampledRows
from outrider.sampling import VerificationRule


@dataclass(frozen=True, slots=True)
class SessionNodes:
    """Nodes of one session.

    Attributes:
        session: whose nodes they are.
        length: committed tokens below which its tree hangs.
        node_paths: token ids from below the root to each node.
    """

    session: ModelSession
    length: int
    node_paths: list[list[int]]

    @property
    def count(self) -> int:
        """Nodes."""
        return len(self.node_paths)


@dataclass(frozen=True, slots=True)
class Children:
    """The children of L nodes.

    Attributes:
        tokens: [L, K] int32, best first; -1 behind the last that can be chosen.
        buckets: [L, K] int32, where the calibration files them; -1: it learns nothing from them.
        acceptances: [L, K] float32 estimates given the parent.
        distributions: [L] the q that the one child was drawn from, under rejection.
    """

    tokens: npt.NDArray[np.int32]
    buckets: npt.NDArray[np.int32]
    acceptances: npt.NDArray[np.float32]
    distributions: list[DraftDistribution | None]


class HostChoices:
    """Chooses children of nodes whose sessions need more than ranked logits.

    Args:
        calibration: gives the estimates.
        config: see there.
        vocab_size: V.
    """

    def __init__(self, calibration: AcceptanceCalibration, config: GrowthConfig, *, vocab_size: int) -> None:
        self._calibration, self._config = calibration, config
        self._branching = min(config.branching, vocab_size)
        self._ranked = min(max(config.branching, 2), vocab_size)
        self._drawn_from = min(config.rejection_top_k, vocab_size)

    def choose(self, parts: Sequence[SessionNodes], rows: SampledRows, logits: torch.Tensor) -> Children:
        """Return the children of L nodes.

        Args:
            parts: the nodes, session after session.
            rows: their sampling parameters.
            logits: [L, V] float32 after the device's processors; changed.
        """
        ban_stops_in_chains(parts, logits)
        masked, masks = grammar_masks(parts)
        if masks is not None:
            apply_grammar_masks(logits, *(torch.from_numpy(each).to(logits.device) for each in (masked, masks)))
        shape = len(logits), self._branching
        children = Children(
            np.full(shape, -1, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.float32), [None] * shape[0]
        )
        rules = [part.session.sampling.rule for part in parts for _ in range(part.count)]
        choosers = {
            VerificationRule.COUPLED: self._choose_ranked,
            VerificationRule.TARGET_ONLY: self._choose_likeliest,
            VerificationRule.REJECTION: self._draw,
        }
        for rule in dict.fromkeys(rules):
            places = np.array([place for place, other in enumerate(rules) if other is rule])
            choosers[rule](places, _Columns(rows, places, logits), children)
        return children

    def _choose_ranked(self, places: Any, columns: "_Columns", children: Children) -> None:
        found = coupled_topk_scored(
            columns.logits,
            columns.seeds,
            columns.positions,
            *columns.filters,
            choice_index=columns.choice_index,
            k=self._ranked,
        )
        tokens, log_q, scores = (column.cpu().numpy() for column in found)
        buckets = self._calibration.buckets(log_q, scores, columns.host_temperature)[:, : self._branching]
        children.tokens[places] = tokens[:, : self._branching]
        self._estimate(places, buckets, columns, children)

    def _choose_likeliest(self, places: Any, columns: "_Columns", children: Children) -> None:
        probs, ids = columns.probs().topk(self._branching)
        mass = probs.cpu().numpy()
        children.tokens[places] = np.where(mass > 0, ids.cpu().numpy(), -1)
        with np.errstate(divide="ignore"):
            buckets = self._calibration.independent_buckets(np.log(mass))
        self._estimate(places, buckets, columns, children)

    def _estimate(self, places: Any, buckets: Any, columns: "_Columns", children: Children) -> None:
        children.buckets[places] = buckets
        children.acceptances[places] = self._calibration.estimate(buckets, columns.host_fixed == 0)

    def _draw(self, places: Any, columns: "_Columns", children: Children) -> None:
        probs, ids = columns.probs().topk(self._drawn_from)
        word = torch.zeros_like(columns.positions, dtype=torch.int64)[:, None]
        words = philox_uint32(columns.seeds, columns.positions.long(), word, STREAM_DRAFT, columns.choice_index.long())
        found = zip(places.tolist(), ids.cpu().numpy(), probs.cpu().numpy(), words[:, 0].tolist(), strict=True)
        for place, token_ids, mass, number in found:
            q = draft_distribution(token_ids, mass)
            if q is not None:
                children.tokens[place, 0], children.distributions[place] = q.draw(number), q
                children.acceptances[place, 0] = self._config.rejection_acceptance


def ban_stops_in_chains(parts: Sequence[SessionNodes], logits: torch.Tensor) -> None:
    """Ban early stop tokens under rejection: the device knows none there, where they must not end a chain."""
    first = 0
    for part in parts:
        sampling, last = part.session.sampling, part.session.prompt_len + part.session.sampling.min_new_tokens
        if sampling.rule is VerificationRule.REJECTION and sampling.bans_stops:
            early = [place for place, path in enumerate(part.node_paths, first) if part.length + len(path) < last]
            for token in sampling.stop_token_ids:
                logits[early, token : token + 1] = -torch.inf
        first += part.count


def grammar_masks(parts: Sequence[SessionNodes]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
    """Return the rows of sessions whose output has to match a grammar, and which tokens may follow there.

    Rows after which nothing follows (the end, a path that breaks the grammar) are left out, and so are those of a
    grammar that cannot be followed here: what grows there may be wrong, and the target knows.

    Returns:
        [M] int32 and [M, W] int32; None where there are none.
    """
    places: list[int] = []
    masks: list[np.ndarray] = []
    first = 0
    for part in parts:
        session, grammar = part.session, part.session.grammar
        if grammar is not None and grammar.follow(session.tokens[session.prompt_len : part.length]):
            for place, path in enumerate(part.node_paths, first):
                if (mask := grammar.mask_after(path)) is not None:
                    places.append(place)
                    masks.append(mask)
        first += part.count
    return np.array(places, dtype=np.int32), np.stack(masks) if masks else None


def draft_distribution(token_ids: npt.NDArray[np.int64], mass: npt.NDArray[np.float32]) -> DraftDistribution | None:
    """Return the q of likely tokens [k] and their masses, or None if there is no mass."""
    # Ascending ids: no near tie then decides which token a number stands for.
    order = np.argsort(token_ids)
    order = order[mass[order] > 0]
    return DraftDistribution.quantised(token_ids[order], mass[order]) if len(order) else None


class _Columns:
    """Sampling parameters and logits of some rows."""

    def __init__(self, rows: SampledRows, places: npt.NDArray[np.int64], logits: torch.Tensor) -> None:
        chosen = torch.from_numpy(places).to(logits.device)
        self.logits, self.seeds = logits[chosen], rows.seeds[chosen]
        self.positions, self.choice_index = rows.positions[chosen], rows.choice_index[chosen]
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        self.filters = [column[chosen] for column in columns]
        self.host_temperature = self.filters[0].cpu().numpy()
        self.host_fixed = rows.fixed[chosen].cpu().numpy()

    def probs(self) -> torch.Tensor:
        """Return q, [L, V] float32."""
        return filtered_probs(self.logits, *self.filters)
