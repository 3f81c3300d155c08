"""The children of a step's nodes, for each session by what its rule lets the target accept.

    greedy, coupled   the k best under log q + G, with the target's noise: what it will choose
    target_only       the k most likely under q: the target's coins are its own
    rejection         one token, drawn from the q that travels with it

q is what the target's p is of its own logits: after the same processors, temperature and filters. Under rejection it is
cut to its most likely tokens, renormalised and rounded to whole weights, and the token is drawn from these by whole
numbers, keyed by (seed, choice index, position): what travels is exactly what was drawn from.

Shapes: R rows of logits, one an expanded node; V vocabulary size; k children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.acceptance_calibration import AcceptanceCalibration
from outrider.compiled import IS_COMPILED
from outrider.draft_distribution import DraftDistribution
from outrider.draft_worker.child_kernels import MOST_BRANCHING, estimate_children
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.row_processors import grammar_masks, has_processors, processor_batch
from outrider.draft_worker.session import DraftSession
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.filtered_probs import filtered_probs
from outrider.kernels.grammar_mask import apply_grammar_masks
from outrider.kernels.noise import STREAM_DRAFT, philox_uint32
from outrider.kernels.processors import apply_processors
from outrider.sampling import VerificationRule

Rows = Sequence[tuple[DraftSession, DraftNode]]


@dataclass(frozen=True, slots=True)
class Children:
    """The children that one node may have.

    Attributes:
        tokens: [k] best first; -1 past the last that may be chosen.
        acceptance: [k] estimates given the parent.
        buckets: [k] where the calibration files them; None: it learns nothing from them.
        distribution: the q that the one token was drawn from, under rejection.
    """

    tokens: list[int]
    acceptance: list[float]
    buckets: npt.NDArray[np.int64] | None = None
    distribution: DraftDistribution | None = None


class ChildChooser:
    """Chooses children and estimates how likely the target accepts them.

    Args:
        calibration: gives the estimates.
        config: see there.
        vocab_size: V.

    Attributes:
        scored: how many tokens of a row are ranked.
    """

    def __init__(self, calibration: AcceptanceCalibration, config: GrowthConfig, *, vocab_size: int) -> None:
        self._calibration = calibration
        self._branching = min(config.branching, vocab_size)
        # The best child's estimate needs the second's score, whether or not that becomes a node.
        self.scored = min(max(config.branching, 2), vocab_size)
        self._drawn_from = min(config.rejection_top_k, vocab_size)
        self._chain_acceptance = [config.rejection_acceptance]
        self._choosers = {
            VerificationRule.COUPLED: self._choose_coupled,
            VerificationRule.TARGET_ONLY: self._choose_most_likely,
            VerificationRule.REJECTION: self._draw,
        }

    def choose(self, rows: Rows, logits: torch.Tensor) -> list[Children]:
        """The children of R nodes.

        Args:
            rows: [R] the nodes, each with its session.
            logits: [R, V] float32; may be changed.
        """
        masked, masks = grammar_masks(rows)
        if masks is not None or any(has_processors(session.sampling) for session, _ in rows):
            logits = logits.clone()  # not ours to change, and made under inference mode
            apply_processors(logits, processor_batch(rows, logits.device))
        if masks is not None:
            apply_grammar_masks(logits, *(torch.from_numpy(each).to(logits.device) for each in (masked, masks)))
        places: dict[VerificationRule, list[int]] = {}
        for place, (session, _) in enumerate(rows):
            places.setdefault(session.sampling.rule, []).append(place)
        chosen: dict[int, Children] = {}
        for rule, of_rule in places.items():
            part, of_part = rows, logits
            if len(of_rule) < len(rows):
                part = [rows[place] for place in of_rule]
                of_part = logits[torch.tensor(of_rule).to(logits.device)]
            chosen.update(zip(of_rule, self._choosers[rule](part, of_part), strict=True))
        return [chosen[place] for place in range(len(rows))]

    def _choose_coupled(self, rows: Rows, logits: torch.Tensor) -> list[Children]:
        columns = _SamplingColumns(rows, logits.device)
        found = coupled_topk_scored(
            logits,
            columns.seeds,
            columns.positions,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            choice_index=columns.choice_index,
            k=self.scored,
        )
        tokens, log_q, scores = (column.cpu().numpy() for column in found)
        learned = np.array([not session.is_sync for session, _ in rows])
        found, acceptance, buckets = self.ranked(tokens, log_q, scores, columns.host_temperature, learned)
        return [Children(*each) for each in zip(found.tolist(), acceptance.tolist(), buckets, strict=True)]

    def ranked(
        self,
        tokens: npt.NDArray[Any],
        log_q: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float32],
        temperature: npt.NDArray[np.float32],
        learned: npt.NDArray[np.bool_] | bool,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Tokens, estimates and calibration buckets of children that were ranked under log q + G, [R, k] each.

        Args:
            tokens: [R, `scored`] best first; -1 past the last that may be chosen.
            log_q: [R, `scored`].
            scores: [R, `scored`] log q + G.
            temperature: [R].
            learned: [R] or one bool: where the calibration answers from its prior alone (False).
        """
        calibration, branching = self._calibration, self._branching
        if IS_COMPILED and branching <= MOST_BRANCHING:
            if isinstance(learned, bool):
                learned = np.full(len(log_q), learned)
            buckets, acceptance = estimate_children(
                log_q,
                scores,
                temperature,
                learned,
                calibration.edges,
                calibration.prior,
                calibration.learned,
                branching,
            )
        else:
            buckets = calibration.buckets(log_q, scores, temperature)[:, :branching]
            acceptance = calibration.estimate(buckets, learned)
        return tokens[:, :branching].astype(np.int64), acceptance.astype(np.float64), np.ascontiguousarray(buckets)

    def _choose_most_likely(self, rows: Rows, logits: torch.Tensor) -> list[Children]:
        probs, ids = _probs(_SamplingColumns(rows, logits.device), logits).topk(self._branching)
        mass = probs.cpu().numpy()
        tokens = np.where(mass > 0, ids.cpu().numpy(), -1)
        with np.errstate(divide="ignore"):
            buckets = self._calibration.independent_buckets(np.log(mass))
        learned = np.array([not session.is_sync for session, _ in rows])
        acceptance = self._calibration.estimate(buckets, learned)
        return [Children(*columns) for columns in zip(tokens.tolist(), acceptance.tolist(), buckets, strict=True)]

    def _draw(self, rows: Rows, logits: torch.Tensor) -> list[Children]:
        columns = _SamplingColumns(rows, logits.device)
        probs, ids = _probs(columns, logits).topk(self._drawn_from)
        word = torch.zeros_like(columns.positions)[:, None]
        words = philox_uint32(columns.seeds, columns.positions, word, STREAM_DRAFT, columns.choice_index)
        found = zip(ids.cpu().numpy(), probs.cpu().numpy(), words[:, 0].tolist(), strict=True)
        return [self._drawn(token_ids, mass, word) for token_ids, mass, word in found]

    def _drawn(self, token_ids: npt.NDArray[np.int64], mass: npt.NDArray[np.float32], word: int) -> Children:
        # Ascending ids: which token a number stands for then hangs on no near tie.
        order = np.argsort(token_ids)
        order = order[mass[order] > 0]
        if not len(order):
            return Children([], [])
        q = DraftDistribution.quantised(token_ids[order], mass[order])
        return Children([q.draw(word)], self._chain_acceptance, distribution=q)


def _probs(columns: "_SamplingColumns", logits: torch.Tensor) -> torch.Tensor:
    """q [R, V] float32."""
    return filtered_probs(logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p)


class _SamplingColumns:
    """Sampling parameters of R rows as tensors."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        specs = [session.sampling for session, _ in rows]
        self._specs = specs
        self._device = device
        self.host_temperature = np.array([spec.temperature for spec in specs], dtype=np.float32)
        self.temperature = self._put(self.host_temperature)
        self.positions = self._ints([node.position + 1 for _, node in rows])
        self.seeds = self._put(np.array([spec.seed for spec in specs], dtype=np.uint64).view(np.int64))
        self.top_k = self._ints([spec.top_k for spec in specs])
        self.top_p = self._floats([spec.top_p for spec in specs])
        self.min_p = self._floats([spec.min_p for spec in specs])
        self.choice_index = self._ints([spec.choice_index for spec in specs])

    def _ints(self, values: list[int]) -> torch.Tensor:
        return self._put(np.array(values, dtype=np.int64))

    def _floats(self, values: list[float]) -> torch.Tensor:
        return self._put(np.array(values, dtype=np.float32))

    def _put(self, column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device, non_blocking=True)
