"""The learned policy beside fixed trees: which settings, which trees, and how they are compared."""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.simulation.fixed_policies import fixed_tree, fixed_way
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualFigures, simulate
from rich.console import Console
from rich.table import Table

from outrider.coordinator.messages import SpeculationMode
from outrider.coordinator.rounds import Way
from outrider.coordinator.verify_loop import VerifyLoop

# What a pair of an 8B shape and its 160M draft takes on two GPUs of one host, by order of magnitude; a draft that is
# far away and often wrong; a target whose rows are dear, as on a CPU.
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "near": {"target_step_ms": 4.0, "target_row_us": 10.0, "target_stair_rows": 16},
    "far": {
        "target_step_ms": 4.0,
        "target_row_us": 10.0,
        "target_stair_rows": 16,
        "draft_rtt_ms": 2.0,
        "rank_rates": (0.5, 0.15, 0.08, 0.05),
    },
    "dear": {"target_step_ms": 3.0, "target_row_us": 60.0, "draft_step_ms": 1.2},
    # Not among the twelve: the target itself is far away.
    "distant": {"target_step_ms": 4.0, "target_row_us": 10.0, "target_stair_rows": 16, "target_rtt_ms": 3.0},
    "distant-dear": {"target_step_ms": 3.0, "target_row_us": 60.0, "draft_step_ms": 1.2, "target_rtt_ms": 6.0},
}
COMPARED = ("near", "far", "dear")
SESSIONS = (1, 4, 16, 64)
_COMMON = {"target_rtt_ms": 0.3, "draft_rtt_ms": 0.3, "target_jitter": 0.03}
# Sessions to seconds of warm-up, in which the policy learns, and of measurement.
_SECONDS = {1: (3.0, 5.0), 4: (2.0, 3.0), 16: (1.0, 1.2), 64: (0.6, 0.6)}
LEARNED, OFF = "learned", "off"
# Nodes of every session, sent at once, or when that many are there.
_SIZES = (1, 2, 4, 8, 16, 24)
# The learned policy with its rounds timed in one way, whatever trials would say.
WAYS = {"waits": Way.WAIT, "never waits": Way.NEVER_WAIT, "two groups": Way.TWO_GROUPS, "ahead": Way.AHEAD}
FIXED = (OFF, *(f"{size} at once" for size in _SIZES), *(f"{size} waits" for size in _SIZES))
# What the learned policy promises: this share of the best fixed tree.
_PROMISED = 0.95


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        setting: a key of SETTINGS.
        scale: of the seconds.
    """

    setting: str
    sessions: int
    policy: str
    scale: float = 1.0

    def settings(self) -> Settings:
        """What is simulated."""
        warmup_s, duration_s = _SECONDS[max(known for known in SESSIONS if known <= self.sessions)]
        mode = SpeculationMode.OFF if self.policy == OFF else SpeculationMode.ASYNC
        return Settings(
            sessions=self.sessions,
            mode=mode,
            warmup_s=warmup_s * self.scale,
            duration_s=duration_s * self.scale,
            **{**_COMMON, **SETTINGS[self.setting]},  # pyright: ignore[reportArgumentType]
        )

    def loop_type(self) -> type[VerifyLoop]:
        """Who decides."""
        if self.policy in (LEARNED, OFF):
            return VerifyLoop
        if self.policy in WAYS:
            return fixed_way(WAYS[self.policy])
        size, _, kind = self.policy.partition(" ")
        return fixed_tree(int(size), waits=kind == "waits")

    def run(self) -> VirtualFigures:
        """Its figures."""
        return simulate(self.settings(), self.loop_type())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One setting: the learned policy and the best of the fixed trees."""

    setting: str
    sessions: int
    off: float
    learned: float
    best: float
    best_policy: str

    @property
    def share(self) -> float:
        """Of the best fixed tree's tokens a second."""
        return self.learned / self.best


def verdicts(figures: Mapping[Case, VirtualFigures]) -> list[Verdict]:
    """One for each setting, in their order."""
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for case, found in figures.items():
        rates.setdefault((case.setting, case.sessions), {})[case.policy] = found.tokens_per_s
    found_verdicts = []
    for (setting, sessions), own in rates.items():
        best = max((policy for policy in own if policy != LEARNED), key=lambda policy: own[policy])
        found_verdicts.append(
            Verdict(
                setting=setting,
                sessions=sessions,
                off=own[OFF],
                learned=own[LEARNED],
                best=own[best],
                best_policy=best,
            )
        )
    return found_verdicts


def mean_shares(figures: Mapping[Case, VirtualFigures]) -> dict[str, float]:
    """Policy to its tokens a second by those of the best fixed tree at each setting, on the mean over settings."""
    best = {(verdict.setting, verdict.sessions): verdict.best for verdict in verdicts(figures)}
    shares: dict[str, list[float]] = {}
    for case, found in figures.items():
        shares.setdefault(case.policy, []).append(found.tokens_per_s / best[case.setting, case.sessions])
    return {policy: fmean(own) for policy, own in shares.items()}


def broken_promises(figures: Mapping[Case, VirtualFigures]) -> list[str]:
    """What the learned policy promises and has not kept; empty where all is well."""
    broken = []
    for verdict in verdicts(figures):
        where = f"{verdict.setting}, {verdict.sessions} sessions"
        if verdict.share < _PROMISED:
            broken.append(f"{where}: {verdict.share:.1%} of '{verdict.best_policy}'")
        if verdict.learned < verdict.off:
            broken.append(f"{where}: {verdict.learned / verdict.off:.1%} of what plain decoding gives")
    means = mean_shares(figures)
    broken += [
        f"on the mean {means[LEARNED]:.1%}, '{policy}' {mean:.1%}"
        for policy, mean in means.items()
        if policy != LEARNED and mean >= means[LEARNED]
    ]
    broken += [f"{case}: {found.wrong_tokens} wrong tokens" for case, found in figures.items() if found.wrong_tokens]
    return broken


def table(figures: Mapping[Case, VirtualFigures]) -> Table:
    """A row for each setting."""
    shown = Table(title="tokens/s on virtual time")
    for column in ("setting", "sessions", "off", "learned", "best fixed", "which", "share"):
        shown.add_column(column, justify="left" if column in ("setting", "which") else "right")
    shown.add_column("nodes/session", justify="right")
    shown.add_column("busy", justify="right")
    for verdict in verdicts(figures):
        own = next(
            found
            for case, found in figures.items()
            if (case.setting, case.sessions, case.policy) == (verdict.setting, verdict.sessions, LEARNED)
        )
        shown.add_row(
            verdict.setting,
            str(verdict.sessions),
            f"{verdict.off:,.0f}",
            f"{verdict.learned:,.0f}",
            f"{verdict.best:,.0f}",
            verdict.best_policy,
            f"{verdict.share:.1%}",
            f"{own.rows_per_step / verdict.sessions - 1:.1f}",
            f"{own.target_busy:.0%}",
        )
    return shown


def _means_table(figures: Mapping[Case, VirtualFigures]) -> Table:
    shown = Table(title="share of the best fixed tree, mean over settings")
    shown.add_column("policy")
    shown.add_column("mean", justify="right")
    for policy, mean in sorted(mean_shares(figures).items(), key=lambda item: -item[1]):
        shown.add_row(policy, f"{mean:.1%}")
    return shown


def compare(cases: Sequence[Case], *, jobs: int = 1) -> dict[Case, VirtualFigures]:
    """Runs all, so many at a time; the long ones first."""
    if jobs == 1:
        return {case: case.run() for case in cases}
    order = sorted(cases, key=lambda case: -case.sessions)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        found = dict(zip(order, pool.map(Case.run, order, chunksize=1), strict=True))
    return {case: found[case] for case in cases}


def run(arguments: Sequence[str]) -> int:
    """The command line; the exit code says whether the promises are kept."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/policies.py", description="The learned policy beside fixed trees."
    )
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), default=list(COMPARED), help="default those of the twelve"
    )
    parser.add_argument("--sessions", nargs="+", type=int, default=list(SESSIONS), help="default 1 4 16 64")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=(*FIXED, *WAYS),
        default=list(FIXED),
        help="to compare with (default fixed trees)",
    )
    parser.add_argument("--seconds-scale", type=float, default=1.0, help="of warm-up and measurement (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="every figure on standard output, tables on the other")
    chosen = parser.parse_args(arguments)
    policies = [LEARNED, *dict.fromkeys((OFF, *chosen.policies))]
    cases = [
        Case(setting=setting, sessions=sessions, policy=policy, scale=chosen.seconds_scale)
        for setting in chosen.settings
        for sessions in chosen.sessions
        for policy in policies
    ]
    figures = compare(cases, jobs=chosen.jobs)
    console = Console(stderr=chosen.json)
    console.print(table(figures), _means_table(figures))
    broken = broken_promises(figures)
    for line in broken:
        sys.stderr.write(f"not kept: {line}\n")
    if chosen.json:
        rows = [{**asdict(case), **asdict(found)} for case, found in figures.items()]
        sys.stdout.write(json.dumps({"runs": rows, "not_kept": broken}, indent=2) + "\n")
    return 1 if broken else 0
