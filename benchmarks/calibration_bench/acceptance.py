"""How many tokens a round of `sync` gives under each rule, on held-out text and on what the target writes itself.

text   one round from every sixteenth position of the prompts: the same contexts at every temperature
own    prompts continued; at temperature 0 the target soon repeats itself, and a draft that repeats too is right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.calibration_bench.texts import Text
from benchmarks.calibration_bench.workers import Pair, Run, runs_of

from outrider.sampling import SamplingSpec, VerificationRule

_PLAYED = (
    ("greedy", 0.0, VerificationRule.COUPLED),
    ("coupled", 0.6, VerificationRule.COUPLED),
    ("coupled", 1.0, VerificationRule.COUPLED),
    ("target_only", 0.6, VerificationRule.TARGET_ONLY),
    ("target_only", 1.0, VerificationRule.TARGET_ONLY),
    ("rejection", 0.6, VerificationRule.REJECTION),
    ("rejection", 1.0, VerificationRule.REJECTION),
)
# Tokens of context that make a repetition.
_REPEATED = 8
# As many rounds do not reach it.
_NO_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Tokens a round, the target's own one included.

    Attributes:
        rule: that judged.
        temperature: of both sides.
        text: on held-out text.
        text_standard_error: of `text`.
        text_to_greedy: `text` by that of the first rule.
        ratio_standard_error: of `text_to_greedy`.
        own: on the target's own output; None where none was asked for.
        own_start: in the rounds of its first quarter.
        repeated: share of the output's tokens before which stand eight that stood together before.
    """

    rule: str
    temperature: float
    text: float
    text_standard_error: float
    text_to_greedy: float
    ratio_standard_error: float
    own: float | None
    own_start: float | None
    repeated: float | None


def measure(pair: Pair, texts: Sequence[Text], *, tokens: int) -> list[Acceptance]:
    """Every rule at its temperatures; `tokens` is the length of each output, 0 leaves the outputs out."""
    found: list[Acceptance] = []
    greedy: list[int] = []
    for name, temperature, rule in _PLAYED:
        sampling = SamplingSpec(temperature=temperature, verification=rule, max_new_tokens=_NO_LIMIT)
        counts = _text_rounds(pair, texts, sampling)
        greedy = greedy or counts
        runs = _own_runs(pair, texts, replace(sampling, max_new_tokens=tokens)) if tokens else []
        mean, error = _mean(counts)
        ratio = mean / _mean(greedy)[0]
        found.append(
            Acceptance(
                rule=name,
                temperature=temperature,
                text=mean,
                text_standard_error=error,
                text_to_greedy=ratio,
                ratio_standard_error=_ratio_error(counts, greedy, ratio),
                own=_optional_mean([count for run in runs for count in run.rounds]),
                own_start=_optional_mean([count for run in runs for count in _first_rounds(run, tokens // 4)]),
                repeated=_optional_mean([share for run in runs if (share := repeated_share(run)) is not None]),
            )
        )
    return found


def _text_rounds(pair: Pair, texts: Sequence[Text], sampling: SamplingSpec) -> list[int]:
    begun = [(beginning, text.number) for text in texts for beginning in text.beginnings]
    runs = runs_of([prompt for prompt, _ in begun], [number for _, number in begun], sampling)
    pair.speculate(runs, most_rounds=1)
    return [run.rounds[0] for run in runs]


def _own_runs(pair: Pair, texts: Sequence[Text], sampling: SamplingSpec) -> list[Run]:
    runs = runs_of([text.ids for text in texts], [text.number for text in texts], sampling)
    pair.speculate(runs)
    return runs


def _ratio_error(counts: Sequence[int], greedy: Sequence[int], ratio: float) -> float:
    """Standard error of the ratio of two means over the same contexts, to first order."""
    residuals = [count - ratio * base for count, base in zip(counts, greedy, strict=True)]
    return _mean(residuals)[1] / _mean(greedy)[0]


def _optional_mean(values: Sequence[float]) -> float | None:
    return _mean(values)[0] if values else None


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, (spread / len(values)) ** 0.5


def _first_rounds(run: Run, tokens: int) -> list[int]:
    """Those that began before so many tokens."""
    counts, total = [], 0
    for count in run.rounds:
        if total >= tokens:
            break
        counts.append(count)
        total += count
    return counts


def repeated_share(run: Run) -> float | None:
    """See `Acceptance.repeated`; None for an output too short to tell."""
    places = range(_REPEATED, len(run.output))
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for place in places:
        before = tuple(run.output[place - _REPEATED : place])
        repeated += before in seen
        seen.add(before)
    return repeated / len(places) if places else None
