"""The gain of speculation: figures by category, with an interval that says how sure they are.

A prompt's time is that of its whole request. A category's speed is its output tokens over its requests' time, so that
long outputs count more than short ones; the gain is the ratio of both speeds. Its interval is a bootstrap over prompts:
2.5 to 97.5 % of the gains that equally many prompts, drawn with replacement, would have shown.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from outrider.coordinator.bench.measuring import Answer, Pair

ALL = "all"
Verdict = Literal["faster", "slower", "nothing gained", "not certain", "too few prompts"]
# An interval that ends below it holds no gain worth a drafter.
_LEAST_GAIN = 1.05
_RESAMPLES = 2000
# The interval of two prompts has three values: it says nothing.
_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Figures of one category, over the prompts that both modes have answered.

    Attributes:
        prompts: answered by both modes.
        failed: not answered by one of them.
        interval: of the speedup; None of too few prompts.
        acceptance_length: tokens that a verification committed.
        equal: prompts whose outputs are the same tokens.
    """

    prompts: int
    failed: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    speedup: float
    interval: tuple[float, float] | None
    off_ttft_ms: float
    on_ttft_ms: float
    acceptance_length: float
    equal: int

    @property
    def verdict(self) -> Verdict:
        """The judgement that the figures allow."""
        if self.interval is None:
            return "too few prompts"
        low, high = self.interval
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "nothing gained" if high < _LEAST_GAIN else "not certain"

    def text(self) -> str:
        """The speedup and its interval."""
        return f"{self.speedup:.2f}x" + ("" if self.interval is None else ", {:.2f} to {:.2f}".format(*self.interval))


def gains(pairs: Sequence[Pair]) -> dict[str, Gain]:
    """Return the figures of every category in order of appearance, then of all prompts under `ALL`.

    Categories without a prompt that both modes have answered are left out.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.prompt.prompt.category, []).append(pair)
    groups[ALL] = list(pairs)
    return {name: _gain(group) for name, group in groups.items() if any(pair.is_complete for pair in group)}


def _gain(group: Sequence[Pair]) -> Gain:
    pairs = [pair for pair in group if pair.is_complete]
    on = [pair.on.record for pair in pairs]
    steps = sum(record.verify_steps for record in on)
    return Gain(
        prompts=len(pairs),
        failed=len(group) - len(pairs),
        off_tokens_per_s=_speed([pair.off for pair in pairs]),
        on_tokens_per_s=_speed([pair.on for pair in pairs]),
        speedup=_speedup(pairs),
        interval=_interval(pairs) if len(pairs) >= _FEWEST else None,
        off_ttft_ms=1e3 * median(pair.off.record.ttft_from_send_s for pair in pairs),
        on_ttft_ms=1e3 * median(record.ttft_from_send_s for record in on),
        acceptance_length=1 + sum(record.accepted_tokens for record in on) / steps if steps else 1.0,
        equal=sum(pair.is_equal for pair in pairs),
    )


def _speed(answers: Sequence[Answer]) -> float:
    time_s = sum(answer.record.e2el_from_send_s for answer in answers)
    return sum(answer.record.output_tokens for answer in answers) / max(time_s, 1e-9)


def _speedup(pairs: Sequence[Pair]) -> float:
    return _speed([pair.on for pair in pairs]) / _speed([pair.off for pair in pairs])


def _interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    draw = random.Random(0)
    ratios = sorted(_speedup(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return ratios[round(0.025 * (_RESAMPLES - 1))], ratios[round(0.975 * (_RESAMPLES - 1))]


# ---------------------------------------------------------------------------------------------------------------- shown


_NOTES: Mapping[Verdict, str] = {
    "faster": "",
    "slower": "slower",
    "nothing gained": "none",
    "not certain": "?",
    "too few prompts": "few",
}


def table(found: Mapping[str, Gain]) -> Table:
    """Return the figures as a table of less than 80 columns."""
    shown = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    titles = ("category", "off tok/s", "on tok/s", "gain", "95 %", "accepted", "equal", "")
    for title in titles:
        shown.add_column(title, justify="left" if title in {"category", ""} else "right", no_wrap=True)
    for name, gain in found.items():
        if name == ALL:
            shown.add_section()
        interval = "" if gain.interval is None else "{:.2f}-{:.2f}".format(*gain.interval)
        shown.add_row(
            escape(name[:12]),
            f"{gain.off_tokens_per_s:.1f}",
            f"{gain.on_tokens_per_s:.1f}",
            f"{gain.speedup:.2f}x",
            interval,
            f"{gain.acceptance_length:.2f}",
            f"{gain.equal}/{gain.prompts}",
            _NOTES[gain.verdict],
        )
    return shown


def findings(found: Mapping[str, Gain], pairs: Sequence[Pair]) -> list[str]:
    """Return in sentences what was gained, where nothing was, and whether the tokens were equal."""
    lines = []
    if whole := found.get(ALL):
        lines.append(_whole(whole))
        said: dict[str, tuple[Verdict, ...]] = {
            "Nothing is gained in": ("nothing gained", "slower"),
            "Not certain, as the interval holds 1:": ("not certain",),
        }
        for words, verdicts in said.items():
            of = [f"{name} ({gain.text()})" for name, gain in found.items() if name != ALL and gain.verdict in verdicts]
            if of:
                lines.append(f"{words} {'; '.join(of)}.")
        lines.append(_equality(whole, pairs))
    failed = [pair for pair in pairs if not pair.is_complete]
    if failed:
        error = failed[0].off.record.error or failed[0].on.record.error or "no token came"
        lines.append(f"{len(failed)} of {len(pairs)} prompts were not answered, the first because: {error}")
    return lines


def _whole(gain: Gain) -> str:
    if gain.interval is None:
        return f"{gain.speedup:.2f} times the speed over {gain.prompts} prompts: too few to say more."
    figures = f"{gain.speedup:.2f} times the speed (95 % interval {gain.interval[0]:.2f} to {gain.interval[1]:.2f})"
    if gain.verdict == "faster":
        return f"Speculation gains: {figures}."
    if gain.acceptance_length == 1.0:
        return f"Speculation gains nothing: {figures}, and no draft token was accepted. Does a draft worker run?"
    if gain.verdict == "not certain":
        return f"A gain is not certain: {figures}. More prompts, longer outputs or a quieter machine would tell."
    accepted = f"{gain.acceptance_length:.2f} tokens a verification"
    return f"Speculation gains nothing: {figures}, at {accepted}. Try another draft, n-grams, or none."


def _equality(gain: Gain, pairs: Sequence[Pair]) -> str:
    if gain.equal == gain.prompts:
        return f"The tokens of all {gain.prompts} outputs are equal with and without speculation."
    unequal = [pair for pair in pairs if pair.is_complete and not pair.is_equal]
    places = ", ".join(f"{pair.prompt.prompt.id} from token {first_difference(pair)}" for pair in unequal[:3])
    more = f" and {len(unequal) - 3} more" if len(unequal) > 3 else ""
    return (
        f"{len(unequal)} of {gain.prompts} outputs differ ({places}{more}). Logits that are equal but for rounding "
        "cause this in 16-bit arithmetic; `--deterministic` of the service rules it out."
    )


def first_difference(pair: Pair) -> int | None:
    """Return the place, from 0, of the first token that differs; None where the outputs are equal."""
    if pair.is_equal:
        return None
    ids = zip(pair.off.token_ids, pair.on.token_ids, strict=False)
    shorter = min(len(pair.off.token_ids), len(pair.on.token_ids))
    return next((place for place, (off, on) in enumerate(ids) if off != on), shorter)


def document(found: Mapping[str, Gain], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures as they are written to JSON; the categories' keys are `Gain`'s attributes."""
    return {
        "categories": {name: vars(gain) | {"verdict": gain.verdict} for name, gain in found.items()},
        "findings": findings(found, pairs),
        "prompts": [
            {
                "id": pair.prompt.prompt.id,
                "category": pair.prompt.prompt.category,
                "prompt_tokens": len(pair.prompt.token_ids),
                "max_new_tokens": pair.prompt.max_new_tokens,
                "is_equal": pair.is_equal,
                "first_difference": first_difference(pair),
                "off": _answer(pair.off),
                "on": _answer(pair.on),
            }
            for pair in pairs
        ],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    record = answer.record
    return {
        "output_tokens": record.output_tokens,
        "ttft_ms": 1e3 * record.ttft_from_send_s if record.is_complete else None,
        "e2el_ms": 1e3 * record.e2el_from_send_s if record.is_complete else None,
        "verify_steps": record.verify_steps,
        "drafted_tokens": record.drafted_tokens,
        "accepted_tokens": record.accepted_tokens,
        "error": record.error,
    }
