"""What each fault costs, one at a time: when it is noticed, what a client feels, when all is back."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import Cluster, ClusterOptions
from benchmarks.faults.proxy import PARTITION, Conditions, Direction
from rich.console import Console
from rich.table import Table

from outrider.client import AsyncClient
from outrider.errors import OutriderError
from outrider.models import held_out_prompts

_LOOK_S = 0.02
_BEFORE_S = 2.0
_NOTICE_TIMEOUT_S = 30.0
_BACK_TIMEOUT_S = 120.0
_PROMPT_CHARACTERS = 120


@dataclass
class Pulse:
    """One client that streams all the time, and when its tokens came.

    Attributes:
        beats: times of deltas.
        resumes: of ended requests, by the library.
        errors: what the caller got to see.
    """

    endpoints: Sequence[str]
    beats: list[float] = field(default_factory=list)
    resumes: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        prompt = held_out_prompts()[3][:_PROMPT_CHARACTERS]
        options: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}
        async with AsyncClient(self.endpoints) as client:
            while True:
                try:
                    async with client.stream(prompt, **options) as stream:
                        async for _ in stream:
                            self.beats.append(time.monotonic())
                    self.resumes += stream.result.resumes
                except (OutriderError, TimeoutError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)

    def longest_gap_s(self, from_s: float, to_s: float) -> float:
        """Longest time between two deltas of those that touch this time."""
        pairs = itertools.pairwise(self.beats)
        return max((after - before for before, after in pairs if after > from_s and before < to_s), default=0.0)


@asynccontextmanager
async def pulse(endpoints: Sequence[str]):
    """A pulse that has been beating for a moment."""
    beating = Pulse(endpoints)
    task = asyncio.create_task(beating.run())
    try:
        while len(beating.beats) < 20:  # noqa: ASYNC110 - a coarse look is enough
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(_BEFORE_S)
        yield beating
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one fault, in seconds; None is never, or not asked for.

    Attributes:
        noticed_s: until a coordinator that works no longer counts on the role.
        gap_before_s, gap_s: longest time without a token for a client, before the fault and from it on.
        back_s: from the restart, or the end of the fault, until the role serves again.
        resumed: requests that the library went on with.
        errors: that the caller got to see.
    """

    noticed_s: float | None
    gap_before_s: float
    gap_s: float
    back_s: float | None
    resumed: int
    errors: Sequence[str]


async def noticed(cluster: Cluster, role: str, *, by: str) -> float | None:
    """Waits until a coordinator counts on a worker no more; how long that took."""
    address, began_s = cluster.roles[role].advertised, time.monotonic()
    while time.monotonic() - began_s < _NOTICE_TIMEOUT_S:
        workers = (await cluster.info(by)).workers
        if not any(worker.introduction.address == address and worker.state == "serving" for worker in workers):
            return time.monotonic() - began_s
        await asyncio.sleep(_LOOK_S)
    return None


async def in_use(cluster: Cluster, kind: str) -> str:
    """Name of the role of this kind that serves the pulse."""
    while True:
        for coordinator in cluster.of_kind("coordinator"):
            info = await cluster.info(coordinator.name)
            if kind == "coordinator" and info.running_sessions:
                return coordinator.name
            busy = {worker.introduction.address for worker in info.workers if worker.load.sessions}
            for role in cluster.of_kind(kind):
                if role.advertised in busy:
                    return role.name
        await asyncio.sleep(_LOOK_S)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault to be measured.

    Attributes:
        kind: of role that it hits; of several, the one in use.
        begin, end: of the fault, given the cluster and the role's name.
        lasts_s: between them.
        is_over_first: the gap is looked for until the fault ends, not until its role is back: a role that is started
            anew takes processor time from everybody on a small machine.
    """

    name: str
    kind: str
    begin: Callable[[Cluster, str], Awaitable[Any] | None]
    end: Callable[[Cluster, str], Awaitable[Any] | None]
    lasts_s: float
    is_over_first: bool = False


async def measure(cluster: Cluster, case: Case, endpoints: Sequence[str]) -> Times:
    """One fault: begun, noticed or not, ended, over."""
    async with pulse(endpoints) as beating:
        role = await in_use(cluster, case.kind)
        watcher = next(other.name for other in cluster.of_kind("coordinator") if other.name != role)
        began_s = time.monotonic()
        before_s = beating.longest_gap_s(began_s - _BEFORE_S, began_s)
        await _maybe(case.begin(cluster, role))
        looking = asyncio.create_task(noticed(cluster, role, by=watcher)) if case.kind != "coordinator" else None
        await asyncio.sleep(case.lasts_s)
        noticed_s = looking.result() if looking is not None and looking.done() else None
        if looking is not None:
            looking.cancel()
        ended_s = time.monotonic()
        await _maybe(case.end(cluster, role))
        back_s: float | None = None
        with suppress(TimeoutError):
            await cluster.until_whole(timeout_s=_BACK_TIMEOUT_S, about=role)
            back_s = time.monotonic() - ended_s
        heard, deadline = len(beating.beats), time.monotonic() + _NOTICE_TIMEOUT_S
        # The stream that broke has gone on, and has ended: the library counts at the end.
        while len(beating.beats) < heard + 450 and time.monotonic() < deadline:  # noqa: ASYNC110 - a coarse look does
            await asyncio.sleep(_LOOK_S)
        over_s = ended_s if case.is_over_first else ended_s + (back_s or 0.0)
        return Times(
            noticed_s=noticed_s,
            gap_before_s=before_s,
            gap_s=beating.longest_gap_s(began_s, over_s),
            back_s=back_s,
            resumed=beating.resumes,
            errors=beating.errors,
        )


async def _maybe(result: Awaitable[Any] | None) -> None:
    if result is not None:
        await result


def _killed(name: str, kind: str, lasts_s: float) -> Case:
    return Case(
        name=name,
        kind=kind,
        begin=lambda cluster, role: cluster.kill(role),
        end=lambda cluster, role: cluster.launch(role),
        lasts_s=lasts_s,
        is_over_first=kind != "coordinator",
    )


def _frozen(name: str, kind: str, lasts_s: float) -> Case:
    return Case(
        name=name,
        kind=kind,
        begin=lambda cluster, role: cluster.freeze(role),
        end=lambda cluster, role: cluster.thaw(role),
        lasts_s=lasts_s,
    )


def _on_links(name: str, kind: str, conditions: Conditions, lasts_s: float, *links: str) -> Case:
    def begin(cluster: Cluster, role: str) -> None:
        cluster.roles[role].disturb(conditions, links=links)

    def end(cluster: Cluster, role: str) -> None:
        for proxy in cluster.roles[role].links.values():
            proxy.conditions = Conditions()

    return Case(name=name, kind=kind, begin=begin, end=end, lasts_s=lasts_s)


HALF_OPEN = Conditions(dropped=frozenset({Direction.DOWN}))
CASES = (
    _killed("draft, SIGKILL", "draft", 3.0),
    _frozen("draft, frozen", "draft", 5.0),
    _on_links("draft, partition of the data link", "draft", PARTITION, 5.0, "data"),
    _on_links("draft, partition of the registration link", "draft", PARTITION, 5.0, "registration"),
    _killed("target, SIGKILL", "target", 3.0),
    _frozen("target, frozen", "target", 8.0),
    _on_links("target, partition of the data link", "target", PARTITION, 15.0, "data"),
    _on_links("target, partition of the registration link", "target", PARTITION, 5.0, "registration"),
    _on_links("target, data link half-open", "target", HALF_OPEN, 15.0, "data"),
    _killed("coordinator, SIGKILL, restarted at once", "coordinator", 0.0),
    _frozen("coordinator, frozen", "coordinator", 15.0),
    _on_links("coordinator, partition from clients", "coordinator", PARTITION, 15.0, "clients"),
    Case(
        name="target, nobody reads its log",
        kind="target",
        begin=lambda cluster, role: cluster.roles[role].log.block(),
        end=lambda cluster, role: cluster.roles[role].log.drain(),
        lasts_s=5.0,
    ),
)


async def run(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, list[Times]]:
    """Every case, as often as asked for, on one cluster."""
    options = ClusterOptions(
        folder=folder,
        drafts=1,
        targets=arguments.targets,
        # Every case is the first that happens to its role.
        coordinator_args=["--quarantine-losses", "1000", "--target-wait-s", "60"],
    )
    found: dict[str, list[Times]] = {}
    async with Cluster(options) as cluster:
        say(f"{len(cluster.roles)} roles serve")
        for case in CASES:
            if arguments.only and not any(word in case.name for word in arguments.only):
                continue
            for _ in range(arguments.repeats):
                times = await measure(cluster, case, cluster.endpoints)
                say(f"{case.name}: {times}")
                found.setdefault(case.name, []).append(times)
                await cluster.until_whole(timeout_s=_BACK_TIMEOUT_S)
    return found


def table_of(found: dict[str, list[Times]]) -> Table:
    """Medians, and the most."""
    columns = ("times", "noticed s", "gap before ms", "gap after ms", "most", "back s", "resumed", "errors seen")
    table = Table("fault", *columns)
    for name, times in found.items():
        gaps = [one.gap_s * 1e3 for one in times]
        table.add_row(
            name,
            str(len(times)),
            _median([one.noticed_s for one in times], 2),
            _median([one.gap_before_s * 1e3 for one in times], 0),
            _median(gaps, 0),
            f"{max(gaps):.0f}",
            _median([one.back_s for one in times], 2),
            str(sum(one.resumed for one in times)),
            str(sum(len(one.errors) for one in times)),
        )
    return table


def _median(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else "-"


def main(given: Sequence[str]) -> int:
    """Table on standard output, progress on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args(given)
    folder, progress = Path(tempfile.mkdtemp(prefix="faults-")), Console(stderr=True, highlight=False)
    found = asyncio.run(run(arguments, folder, lambda line: progress.print(line, markup=False, soft_wrap=True)))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table_of(found))
    if arguments.output_json is not None:
        data = {name: [vars(one) for one in times] for name, times in found.items()}
        arguments.output_json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0
