"""Fit the curves of `outrider.drafting.acceptance_prior` on the embedded pair.

    python recipes/acceptance_prior.py            prints what belongs between the marks of that module
    python recipes/acceptance_prior.py --write    puts it there

Draft and target are asked at every position of 48 held-out prompts and of what the target adds to each of them: the
draft for its best children, the target for its choice. The numbers are those of greatest likelihood, greedy at
temperature 0 and coupled at 0.6 and 1 (in units of the logits one table serves every temperature).

Shapes: R positions, k children of each, best first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from outrider.drafting import acceptance_prior
from outrider.drafting.acceptance_calibration import BINS, GAP_EDGES, RULES, SURPRISE_EDGES, AcceptanceCalibration
from outrider.kernels.coupled_sampling import coupled_choice, coupled_topk_scored
from outrider.models import embedded_draft_path, embedded_target_path, held_out_prompts

CHILDREN = 4
_TEMPERATURES = (0.0, 0.6, 1.0)
# Benchmarks take their prompts from the first half by default.
_FIRST_PROMPT = 48
# The context that a position has at least.
_FIRST_POSITION = 16
_NEW_TOKENS = 128
_BEGIN, _END = "# fitted: begin\n", "# fitted: end\n"
FloatArray = npt.NDArray[np.float64]
Curve = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The draft's children at R positions, and which of them the target chooses.

    Attributes:
        temperature: of both models.
        log_q: [R, k] float32.
        scores: [R, k] float32 log q + G; log q itself at temperature 0.
        hit: [R] index of the target's choice, -1 where it is none of the children.
    """

    temperature: float
    log_q: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    hit: npt.NDArray[np.int64]


@torch.inference_mode()
def ask(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompt: Sequence[int],
    *,
    seed: int,
    temperature: float,
    tokens: int,
) -> Positions:
    """Ask both models at every position of a prompt and of the tokens that the target adds to it."""
    ids, cache = torch.tensor([prompt]), None
    new = ids
    for _ in range(tokens):
        step = target(new, past_key_values=cache)
        cache = step.past_key_values
        new = coupled_choice(step.logits[0, -1:], *_columns(ids.shape[1], 1, seed, temperature))[None]
        ids = torch.cat([ids, new], dim=1)
    log_p, logits = (model(ids).logits[0, _FIRST_POSITION - 1 : -1] for model in (target, draft))
    columns = _columns(_FIRST_POSITION, len(logits), seed, temperature)
    children, log_q, scores = coupled_topk_scored(logits, *columns, k=CHILDREN)
    right = (children == coupled_choice(log_p, *columns)[:, None]).numpy()
    return Positions(
        temperature=temperature,
        log_q=log_q.numpy(),
        scores=scores.numpy(),
        hit=np.where(right.any(1), right.argmax(1), -1),
    )


def _columns(first: int, count: int, seed: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Seeds, positions, temperature, top-k, top-p, min-p of so many rows."""
    zeros = torch.zeros(count)
    return zeros.long() + seed, torch.arange(first, first + count), zeros + temperature, zeros.long(), zeros + 1, zeros


def counts(asked: Sequence[Positions]) -> tuple[FloatArray, FloatArray]:
    """Return trials and hits [rules, k, BINS], filed as a draft worker does."""
    calibration = AcceptanceCalibration(branching=CHILDREN)
    shape = (len(RULES), CHILDREN, BINS)
    trials, hits = np.zeros(np.prod(shape)), np.zeros(np.prod(shape))
    for positions in asked:
        temperature = np.full(len(positions.hit), positions.temperature, dtype=np.float32)
        buckets = calibration.buckets(positions.log_q, positions.scores, temperature)
        accepted = positions.hit[:, None] == np.arange(CHILDREN)
        trials += np.bincount(buckets.ravel(), minlength=len(trials))
        hits += np.bincount(buckets[accepted], minlength=len(hits))
    return trials.reshape(shape), hits.reshape(shape)


def fit(asked: Sequence[Positions]) -> dict[str, tuple[float, ...]]:
    """Return the numbers of `acceptance_prior`, by name."""
    trials, hits = counts(asked)
    surprise, gap = (acceptance_prior.bin_centers(edges) for edges in (SURPRISE_EDGES, GAP_EDGES))
    ranks = np.arange(1, CHILDREN)[:, None]
    greedy = {"GREEDY_BEST": slice(0, 1), "GREEDY_SECOND": slice(1, 2), "GREEDY_OTHERS": slice(2, None)}
    found = {
        name: _fitted(lambda x: x[0] * np.exp(-x[1] * surprise), (0.8, 0.5), trials[0, rank], hits[0, rank])
        for name, rank in greedy.items()
    }
    found["COUPLED_BEST"] = _fitted(lambda x: 1 - x[0] * np.exp(-x[1] * gap), (0.6, 0.6), trials[1, 0], hits[1, 0])
    found["COUPLED_OTHERS"] = _fitted(
        lambda x: x[0] * x[2] ** (ranks - 1.0) * np.exp(-x[1] * gap), (0.3, 0.8, 0.6), trials[1, 1:], hits[1, 1:]
    )
    return found


def _fitted(curve: Curve, start: tuple[float, ...], trials: FloatArray, hits: FloatArray) -> tuple[float, ...]:
    """Return the curve's parameters: shares of at most 1, but for the second, which is how fast it falls."""

    def loss(parameters: FloatArray) -> float:
        share = np.clip(curve(parameters), 1e-6, 1 - 1e-6)
        return -float((hits * np.log(share) + (trials - hits) * np.log(1 - share)).sum())

    bounds = [(1e-3, 5.0 if place == 1 else 1.0) for place in range(len(start))]
    found = minimize(loss, np.array(start), bounds=bounds, method="L-BFGS-B")
    return tuple(round(float(value), 3) for value in found.x)


def as_code(found: dict[str, tuple[float, ...]]) -> str:
    """Return the lines between the marks of `acceptance_prior`."""
    return "".join(f"{name} = ({', '.join(f'{value:g}' for value in values)})\n" for name, values in found.items())


def with_numbers(source: str, code: str) -> str:
    """Return the module's source with other numbers between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    head, begin, rest = source.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError("acceptance_prior.py has lost the marks between which its numbers stand")
    return f"{head}{begin}{code}{end}{tail}"


def main() -> None:
    """Print the numbers, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into src/outrider/drafting/acceptance_prior.py")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(embedded_target_path() / "tokenizer.json"))
    target, draft = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (embedded_target_path(), embedded_draft_path())
    )
    code = as_code(
        fit([
            ask(target, draft, tokenizer.encode(text).ids, seed=seed, temperature=temperature, tokens=_NEW_TOKENS)
            for temperature in _TEMPERATURES
            for seed, text in list(enumerate(held_out_prompts()))[_FIRST_PROMPT:]
        ])
    )  # fmt: skip
    sys.stdout.write(code)
    if options.write:
        path = Path(acceptance_prior.__file__).resolve()
        path.write_text(with_numbers(path.read_text(encoding="utf-8"), code), encoding="utf-8")


if __name__ == "__main__":
    main()
