"""Figures of recorded rounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.rounds.driving import Round

from outrider.kernels.verification.report import RoundTime

# Parts of a round: the moments between which they lie.
_PARTS = {
    "graft_to_pack_ms": (RoundTime.BEGAN, RoundTime.PACKED),
    "forward_ms": (RoundTime.PACKED, RoundTime.FORWARDED),
    "choose_walk_ms": (RoundTime.FORWARDED, RoundTime.WALKED),
    "re_root_report_ms": (RoundTime.WALKED, RoundTime.ENDED),
}


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of the rounds that count.

    Returns:
        rounds: how many.
        round_ms: from the end of a round to the end of the next one, as [median, 99th percentile]; so are:
        exposed_ms: the part of it in which the device neither forwards, chooses nor walks,
        graft_to_pack_ms, forward_ms, choose_walk_ms, re_root_report_ms: parts of a round,
        growth_steps_ms: those of a resident drafter before it,
        idle_ms: what is left.
        tokens_per_s: of all sessions.
        tokens_per_round, accepted_per_round: of a session.
        selected_rows: nodes verified in a round, of all sessions.
        sessions_per_round: with verified rows.
    """
    pairs = [(before, round_) for before, round_ in itertools.pairwise(rounds) if round_.measured]
    if not pairs:
        return {"rounds": 0}
    times = np.array([round_.times_ns for _, round_ in pairs], np.int64)
    walls = times[:, RoundTime.ENDED] - [before.times_ns[RoundTime.ENDED] for before, _ in pairs]
    useful = times[:, RoundTime.WALKED] - times[:, RoundTime.PACKED]
    drafted = np.array([round_.drafted_ns for _, round_ in pairs])
    counts = np.array([(r.sessions, r.rows, r.tokens, r.accepted) for _, r in pairs])
    sessions, rows, tokens, accepted = counts.sum(0).tolist()
    found: dict[str, Any] = {
        "rounds": len(pairs),
        "round_ms": _quantiles(walls),
        "exposed_ms": _quantiles(walls - useful),
        "growth_steps_ms": _quantiles(drafted),
        "idle_ms": _quantiles(walls - drafted - (times[:, RoundTime.ENDED] - times[:, RoundTime.BEGAN])),
    }
    found |= {name: _quantiles(times[:, end] - times[:, begin]) for name, (begin, end) in _PARTS.items()}
    return found | {
        "tokens_per_s": tokens / (int(walls.sum()) / 1e9),
        "tokens_per_round": tokens / max(sessions, 1),
        "accepted_per_round": accepted / max(sessions, 1),
        "selected_rows": (rows - sessions) / len(pairs),
        "sessions_per_round": sessions / len(pairs),
    }


def _quantiles(values_ns: Any) -> list[float]:
    return [round(float(value) / 1e6, 4) for value in np.percentile(values_ns, (50, 99))]
