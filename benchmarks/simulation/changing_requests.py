"""Clients whose requests are greedy for a while and sampled from then on, each sending one after the other.

Here the two kinds differ by how often the draft is right.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from statistics import fmean

from benchmarks.simulation import virtual_time
from benchmarks.simulation.path_model import Guess, PathModel
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import VirtualSimulation
from rich.console import Console
from rich.table import Table

from outrider.coordinator import clock
from outrider.coordinator.config import RoundTiming
from outrider.coordinator.rounds import Way
from outrider.errors import OutriderError, WorkerUnavailable

# Sessions' keys from here on are sampled requests.
_SAMPLED = 1 << 40
# What two H200 show by order of magnitude: how often a draft's first children are right, greedy and sampled.
_RATES = {False: ((0.97, 0.01, 0.005, 0.005), 0.02), True: ((0.60, 0.14, 0.07, 0.04), 0.2)}
# By sessions: a draft's step, and what stands between two steps beside them.
_DRAFT_STEP_MS = {1: 0.42, 4: 0.47, 16: 0.76, 64: 1.4}
_BETWEEN_MS = {1: 1.0, 4: 1.3, 16: 1.6, 64: 2.2}
TIMINGS: Sequence[RoundTiming] = ("learned", "wait", "never-wait", "ahead")
# Seconds of the last phase in which the requests before end, and nothing is measured.
_SETTLE_S = 0.9
# Between a client's requests.
_PAUSE_S = 0.01
# Tokens of a request on the mean; each has between half and one and a half of it.
_REQUEST_TOKENS = 200


class TwoKinds(PathModel):
    """A path model for greedy sessions, and another one for those that are sampled."""

    def __init__(self, seed: int) -> None:
        self._kinds = {
            kind: PathModel(seed=seed, rank_rates=rates, spread=spread) for kind, (rates, spread) in _RATES.items()
        }

    def _of(self, session: int) -> PathModel:
        return self._kinds[session >= _SAMPLED]

    def token(self, session: int, position: int) -> int:
        """As of its kind's model, like all that follows."""
        return self._of(session).token(session, position)

    def guesses(self, session: int, position: int, path_hash: int | None) -> list[Guess]:
        """See `PathModel`."""
        return self._of(session).guesses(session, position, path_hash)

    def walk(
        self, session: int, length: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """See `PathModel`."""
        return self._of(session).walk(session, length, tokens, parents)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        sessions: clients.
        timing: of rounds.
        seed: of everything.
        phases: seconds of greedy and of sampled requests in turn; what the last one shows is measured.
    """

    sessions: int
    timing: RoundTiming = "learned"
    seed: int = 0
    phases: tuple[float, ...] = (6.0, 6.0)

    def settings(self) -> Settings:
        """What is simulated."""
        like = max((known for known in _DRAFT_STEP_MS if known <= self.sessions), default=1)
        return Settings(
            sessions=self.sessions,
            rounds=self.timing,
            seed=self.seed,
            target_step_ms=4.0,
            target_row_us=17.0,
            target_session_us=75.0,
            target_stair_rows=16,
            target_jitter=0.03,
            target_rtt_ms=_BETWEEN_MS[like],
            draft_step_ms=_DRAFT_STEP_MS[like],
            draft_width=16 * self.sessions,
            draft_rtt_ms=0.4,
            max_nodes=31,
            max_depth=16,
            max_live_nodes=256,
            wait_cap_ms=3.0,
        )

    def run(self) -> "Shown":
        """What it shows."""

        async def main() -> Shown:
            return await _ChangingRequests(self).measure()

        return virtual_time.run(main())


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a run has shown in the measured part of its last phase.

    Attributes:
        tokens_per_s: of virtual time.
        acceptance_length: tokens a verification.
        target_busy: share of the time.
        ways: share of the time in which rounds were timed so.
        wrong_tokens: that plain decoding would not have given.
    """

    tokens_per_s: float
    acceptance_length: float
    target_busy: float
    ways: Mapping[str, float]
    wrong_tokens: int


class _ChangingRequests(VirtualSimulation):
    def __init__(self, case: Case) -> None:
        self._case = case
        super().__init__(case.settings())

    def make_model(self, *, draft: int) -> PathModel:
        return TwoKinds(self.settings.seed)

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self.settings.seed} {number}")
        for count in range(1 << 30):
            key = number + count * self.settings.sessions + (_SAMPLED if self._is_sampled() else 0)
            tokens = round(_REQUEST_TOKENS * chance.uniform(0.5, 1.5))
            generation = self.submit(key, tokens=tokens, temperature=float(key >= _SAMPLED))
            await self.read(key, generation)
            await asyncio.sleep(_PAUSE_S)

    def _is_sampled(self) -> bool:
        ended = sum(clock.now_ns() / 1e9 >= end_s for end_s in accumulate(self._case.phases[:-1]))
        return ended % 2 == 1

    async def _watch(self, ways: Counter[int]) -> None:
        lane = self.scheduler._lanes["target-0"]  # pyright: ignore[reportPrivateUsage]
        while True:
            await asyncio.sleep(0.001)
            ways[lane.way.current] += 1

    async def measure(self) -> Shown:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All phases."""
        clients = asyncio.gather(*(self._client(number) for number in range(1, self.settings.sessions + 1)))
        ways: Counter[int] = Counter()
        measured_s = self._case.phases[-1] - _SETTLE_S
        await asyncio.sleep(sum(self._case.phases) - measured_s)
        before, watch = self._counts(), asyncio.create_task(self._watch(ways))
        await asyncio.sleep(measured_s)
        after = self._counts()
        watch.cancel()
        clients.cancel()
        await self.scheduler.stop(WorkerUnavailable("the simulation is over"))
        with suppress(OutriderError, asyncio.CancelledError):
            await clients
        tokens, verifications, _, _, busy_ns, _ = (end - begin for begin, end in zip(before, after, strict=True))
        return Shown(
            tokens_per_s=tokens / measured_s,
            acceptance_length=tokens / verifications,
            target_busy=busy_ns / 1e9 / measured_s,
            ways={Way(way).name.lower(): count / ways.total() for way, count in sorted(ways.items())},
            wrong_tokens=sum(self._wrong_tokens(key) for key in self.received),
        )


def shares(found: Mapping[Case, Shown], *, sessions: int) -> dict[RoundTiming, list[float]]:
    """Timing to its tokens a second with so many sessions, seed after seed, by those of the way that is best."""
    rates: dict[RoundTiming, dict[int, float]] = {}
    for case, shown in found.items():
        if case.sessions == sessions:
            rates.setdefault(case.timing, {})[case.seed] = shown.tokens_per_s
    best = max((own for timing, own in rates.items() if timing != "learned"), key=lambda own: fmean(own.values()))
    return {timing: [rate / best[seed] for seed, rate in own.items()] for timing, own in rates.items()}


def table(found: Mapping[Case, Shown]) -> Table:
    """A row for each number of sessions and each timing of rounds."""
    shown = Table(title="tokens/s on virtual time, of the requests of the last phase")
    columns = (
        "sessions",
        "rounds",
        "tokens/s",
        "of the best way",
        "least",
        "acceptance length",
        "busy",
        "time in each",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in ("rounds", "time in each") else "right")
    for sessions in dict.fromkeys(case.sessions for case in found):
        for timing, own_shares in shares(found, sessions=sessions).items():
            own = [run for case, run in found.items() if (case.sessions, case.timing) == (sessions, timing)]
            ways = dict.fromkeys(way for run in own for way in run.ways)
            shown.add_row(
                str(sessions),
                timing,
                f"{fmean(run.tokens_per_s for run in own):,.0f}",
                f"{fmean(own_shares):.1%}",
                f"{min(own_shares):.1%}",
                f"{fmean(run.acceptance_length for run in own):.2f}",
                f"{fmean(run.target_busy for run in own):.0%}",
                ", ".join(f"{way} {fmean(run.ways.get(way, 0.0) for run in own):.0%}" for way in ways),
            )
    return shown


def run(arguments: Sequence[str]) -> int:
    """The command line; the exit code is 1 where a token is wrong."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/changing_requests.py", description="Learned timing of rounds where requests change their kind."
    )
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4, 16], help="clients (default 1 4 16)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each (default 4)")
    parser.add_argument(
        "--phases", nargs="+", type=float, default=[6.0, 6.0], metavar="SECONDS",
        help="greedy, sampled, greedy, ...; the last one is measured but for its first 0.9 s (default 6 6)",
    )  # fmt: skip
    parser.add_argument("--rounds", nargs="+", choices=TIMINGS, default=list(TIMINGS), help="default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="every figure on standard output, the table on the other")
    chosen = parser.parse_args(arguments)
    if chosen.phases[-1] <= _SETTLE_S:
        parser.error(f"the last phase has {chosen.phases[-1]:g} s, more than {_SETTLE_S} needed")
    # What is learned is compared with ways.
    compared = [*chosen.rounds, *(() if {*chosen.rounds} - {"learned"} else TIMINGS)]
    cases = [
        Case(sessions=sessions, timing=timing, seed=seed, phases=tuple(chosen.phases))
        for sessions, timing, seed in product(chosen.sessions, dict.fromkeys(compared), range(chosen.seeds))
    ]
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        found = dict(zip(cases, pool.map(Case.run, cases, chunksize=1), strict=True))
    Console(stderr=chosen.json).print(table(found))
    if chosen.json:
        sys.stdout.write(json.dumps([{**asdict(case), **asdict(own)} for case, own in found.items()], indent=2) + "\n")
    return int(any(own.wrong_tokens for own in found.values()))
