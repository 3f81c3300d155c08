"""The curves of `outrider.drafting.acceptance_calibration` before anything is observed, as fitted on the embedded pair.

The functions here are written by hand; the numbers are the embedded pair's, on prompts on which no benchmark reports by
default: `python recipes/acceptance_prior.py` fits them anew and prints what belongs between the two marks.

    greedy       best child: a exp(-b s); second: a exp(-b s); others: a exp(-b s)        s = -log q
    coupled      best child: 1 - a exp(-b g); others, rank r: a c^(r-1) exp(-b g)  g = gap, in logits
    independent  the draft's own probability, exp(-s)

Shapes: k children of a parent, best first; E edges, which part E + 1 bins of the number that counts.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# fitted: begin
GREEDY_BEST = (1, 0.325)
GREEDY_SECOND = (0.934, 0.998)
GREEDY_OTHERS = (1, 1.12)
COUPLED_BEST = (0.717, 0.926)
COUPLED_OTHERS = (0.355, 0.997, 0.702)
# fitted: end


def bin_centers(edges: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """[E + 1] a number that stands for each bin; the last bin has no upper end."""
    bounds = np.array((0.0, *edges))
    return np.append((bounds[:-1] + bounds[1:]) / 2, bounds[-1] * 1.2)


def greedy_prior(branching: int, edges: tuple[float, ...]) -> FloatArray:
    """[k, E + 1] by rank and bin of -log q."""
    ranks, surprise = np.arange(branching)[:, None], bin_centers(edges)
    best, second, others = (a * np.exp(-b * surprise) for a, b in (GREEDY_BEST, GREEDY_SECOND, GREEDY_OTHERS))
    return np.where(ranks == 0, best, np.where(ranks == 1, second, others)).astype(np.float32)


def coupled_prior(branching: int, edges: tuple[float, ...]) -> FloatArray:
    """[k, E + 1] by rank and bin of the gap."""
    ranks, gap = np.arange(branching)[:, None], bin_centers(edges)
    best = 1 - COUPLED_BEST[0] * np.exp(-COUPLED_BEST[1] * gap)
    first, fall, by_rank = COUPLED_OTHERS
    others = first * by_rank ** (ranks - 1.0) * np.exp(-fall * gap)
    return np.where(ranks == 0, best, others).astype(np.float32)


def independent_prior(branching: int, edges: tuple[float, ...]) -> FloatArray:
    """[k, E + 1] by rank and bin of -log q."""
    return np.tile(np.exp(-bin_centers(edges)), (branching, 1)).astype(np.float32)
