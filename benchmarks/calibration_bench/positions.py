"""What draft and target say at every position of a text: the draft's children, and which of them the target chooses.

Contexts are of two kinds: held-out text itself, where every position is asked of both models whatever they said
before, and what the target writes on its own. The service meets the second kind; but at temperature 0 an 11 M parameter
model soon repeats itself, which any draft can predict, so the first kind is what compares temperatures.

Shapes: R positions, k children of each, V vocabulary size, N tokens of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.calibration_bench.texts import FIRST_POSITION, Text
from benchmarks.calibration_bench.workers import Pair, Run, runs_of
from transformers import LlamaForCausalLM

from outrider.kernels.coupled_sampling import coupled_choice, coupled_topk_scored
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.sampling import SamplingSpec

CHILDREN = 4
_LEAST_SAME = 0.97


class Rule(StrEnum):
    """How children are ranked, and what makes one right."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    TARGET_ONLY = "target_only"


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The children at R positions.

    Attributes:
        rule: by which they were ranked.
        temperature: of both sides.
        log_q: [R, k] float32, best first.
        scores: [R, k] float32 log q + G; log q itself where there is no noise.
        hit: [R] index of the child that the target chooses, -1 if it is none of them.
        is_own: [R] whether the target wrote what stands before.
    """

    rule: Rule
    temperature: float
    log_q: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    hit: npt.NDArray[np.int64]
    is_own: npt.NDArray[np.bool_]

    def only(self, own: bool) -> Positions:
        """Those of one kind of context."""
        rows = self.is_own == own
        return Positions(
            rule=self.rule,
            temperature=self.temperature,
            log_q=self.log_q[rows],
            scores=self.scores[rows],
            hit=self.hit[rows],
            is_own=self.is_own[rows],
        )


class Asker:
    """Asks both models, each position of a text in one forward."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._target = LlamaForCausalLM.from_pretrained(embedded_target_path(), dtype=torch.float32)
        self._draft = LlamaForCausalLM.from_pretrained(embedded_draft_path(), dtype=torch.float32)

    @torch.inference_mode()
    def ask(self, texts: Sequence[Text], *, temperature: float, tokens: int) -> dict[Rule, Positions]:
        """All positions of the texts and of what the target adds to each of them, by rule.

        Args:
            texts: whose seeds are their numbers.
            temperature: 0 has one rule, above it there are two.
            tokens: that the target adds.
        """
        sampling = SamplingSpec(temperature=temperature, max_new_tokens=tokens)
        runs = runs_of([text.ids for text in texts], [text.number for text in texts], sampling)
        self._pair.continue_plainly(runs)
        rules = (Rule.COUPLED, Rule.TARGET_ONLY) if temperature else (Rule.GREEDY,)
        parts: dict[Rule, list[Positions]] = {rule: [] for rule in rules}
        for text, run in zip(texts, runs, strict=True):
            ids = torch.tensor([[*text.ids, *run.output]])
            log_p, log_q = (
                model(ids).logits[0, FIRST_POSITION - 1 : -1].float() for model in (self._target, self._draft)
            )
            is_own = np.arange(FIRST_POSITION, ids.shape[1]) >= len(text.ids)
            columns = _columns(len(log_p), text.number, temperature)
            chosen = coupled_choice(log_p, *columns)
            _check_written(chosen[torch.from_numpy(is_own)], run)
            for rule in rules:
                parts[rule].append(_positions(rule, log_q, chosen, columns, is_own))
        return {rule: _joined(some) for rule, some in parts.items()}


def _check_written(chosen: torch.Tensor, run: Run) -> None:
    """What a forward over the whole text chooses is what the worker wrote, but for a near tie now and then."""
    same = (chosen == torch.tensor(run.output)).float().mean().item()
    if same < _LEAST_SAME:
        raise RuntimeError(f"the worker's own tokens are chosen again at {same:.3f} of the positions only")


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _columns(count: int, seed: int, temperature: float) -> Columns:
    """Of `count` rows: seeds, positions, temperature, top-k, top-p, min-p."""
    return (
        torch.full((count,), seed, dtype=torch.int64),
        torch.arange(FIRST_POSITION, FIRST_POSITION + count),
        torch.full((count,), temperature),
        torch.zeros(count, dtype=torch.int64),
        torch.ones(count),
        torch.zeros(count),
    )


def _positions(
    rule: Rule, logits: torch.Tensor, chosen: torch.Tensor, columns: Columns, is_own: npt.NDArray[np.bool_]
) -> Positions:
    temperature = float(columns[2][0])
    if rule is Rule.TARGET_ONLY:
        log_q, tokens = (logits / temperature).log_softmax(-1).topk(CHILDREN)
        scores = log_q
    else:
        tokens, log_q, scores = coupled_topk_scored(logits, *columns, k=CHILDREN)
    right = (tokens == chosen[:, None]).numpy()
    return Positions(
        rule=rule,
        temperature=temperature,
        log_q=log_q.numpy(),
        scores=scores.numpy(),
        hit=np.where(right.any(1), right.argmax(1), -1),
        is_own=is_own,
    )


def _joined(parts: Sequence[Positions]) -> Positions:
    return Positions(
        rule=parts[0].rule,
        temperature=parts[0].temperature,
        log_q=np.concatenate([part.log_q for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        hit=np.concatenate([part.hit for part in parts]),
        is_own=np.concatenate([part.is_own for part in parts]),
    )
