"""Report of a fault run: a table of its faults, and every violation of the invariant."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults.history import Broken, End, History, ToldDelta, Violation
from benchmarks.faults.running import Outcome
from benchmarks.faults.schedule import ENDS_PROCESS, FaultKind
from rich.console import Console
from rich.table import Table

# A stream that breaks by a fault may be seen to break so much later: half-open connections need a keepalive's time.
_SEEN_LATE_S = 15.0
_MEMORY_LIMIT = 1.05
# A target's end is noticed so much later, at most: a lease.
_KILLED_BEFORE_S = 3.0
_SHOWN = 30


@dataclass(kw_only=True)
class Report:
    """Report of one run.

    Attributes:
        seed: with it the same faults can be had again.
        command: that does so.
        seconds: that faults were injected for.
        violations: of histories.
        crashes: roles that ended though nobody ended them.
        gauges: what does not hold as much as before.
        memory: of every role, its memory in the end as a part of what it was.
    """

    seed: int
    command: str
    seconds: float = 0.0
    outcomes: Sequence[Outcome] = ()
    histories: Sequence[History] = ()
    violations: Sequence[Violation] = ()
    crashes: Sequence[str] = ()
    gauges: Sequence[str] = ()
    memory: Mapping[str, float] = field(default_factory=dict)

    @property
    def troubles(self) -> list[str]:
        """Everything that must not be; empty after a good run."""
        late = [f"{outcome.fault}: {outcome.trouble or 'not back'}" for outcome in self.outcomes if _is_bad(outcome)]
        grown = [
            f"{name}: its memory is {growth:.0%} of what it was"
            for name, growth in self.memory.items()
            if growth > _MEMORY_LIMIT
        ]
        return [*map(str, self.violations), *self._wrongly_refused(), *self.crashes, *late, *self.gauges, *grown]

    def _wrongly_refused(self) -> list[str]:
        """Requests that were taken for poison although fewer than two targets had been killed below them."""
        killed_s = [
            outcome.began_s
            for outcome in self.outcomes
            if outcome.fault.kind in ENDS_PROCESS and outcome.fault.role.startswith("target")
        ]
        return [
            f"{history.name} ({history.client}, {history.script}): taken for poison, though it cannot be"
            for history in self.histories
            if history.end is not None
            and history.end.end is End.REFUSED
            and sum(history.began_s - _KILLED_BEFORE_S <= at_s <= history.ended_s for at_s in killed_s) < 2
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for a JSON file."""
        return {
            "seed": self.seed,
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "totals": self.totals(),
            "kinds": {f"{kind.value} of {role}": figures for (kind, role), figures in self._by_kind().items()},
            "memory": {name: round(growth, 3) for name, growth in self.memory.items()},
            "troubles": self.troubles,
        }

    def totals(self) -> dict[str, int]:
        """Requests and tokens, by how they ended."""
        ends = [history.end.end if history.end else None for history in self.histories]
        return {
            "faults": sum(outcome.hit for outcome in self.outcomes),
            "faults that found nothing to hurt": sum(not outcome.hit for outcome in self.outcomes),
            "requests": len(self.histories),
            "finished": ends.count(End.FINISHED),
            "cancelled by clients": ends.count(End.CANCELLED),
            "refused as poison": ends.count(End.REFUSED),
            "failed": ends.count(End.FAILED),
            "without an end": ends.count(None),
            "resumes": sum(history.resumes for history in self.histories),
            "tokens": sum(
                len(event.token_ids)
                for history in self.histories
                for event in history.events
                if isinstance(event, ToldDelta)
            ),
        }

    def _by_kind(self) -> dict[tuple[FaultKind, str], dict[str, Any]]:
        groups: dict[tuple[FaultKind, str], list[Outcome]] = {}
        for outcome in filter(lambda outcome: outcome.hit, self.outcomes):
            groups.setdefault((outcome.fault.kind, outcome.fault.role.rpartition("-")[0]), []).append(outcome)
        order = list(FaultKind)
        return {
            key: self._figures(groups[key]) for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
        }

    def _figures(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        touched = resumed = 0
        silences: list[float] = []
        for outcome in outcomes:
            during = [
                history
                for history in self.histories
                if history.began_s < outcome.lifted_s and history.ended_s > outcome.began_s
            ]
            touched += len(during)
            resumed += sum(_resumed_in(history, outcome) for history in during)
            silences += [history.longest_silence_s(outcome.began_s, outcome.lifted_s) for history in during]
        back = [outcome.recovered_s - outcome.began_s for outcome in outcomes if outcome.recovered_s is not None]
        after = [outcome.recovered_s - outcome.lifted_s for outcome in outcomes if outcome.recovered_s is not None]
        return {
            "count": len(outcomes),
            "requests touched": touched,
            "resumed": resumed,
            "silence s, median": round(statistics.median(silences), 2) if silences else None,
            "silence s, most": round(max(silences), 2) if silences else None,
            "back s, median": round(statistics.median(back), 2) if back else None,
            "back s, most": round(max(back), 2) if back else None,
            "back after its end s, median": round(statistics.median(after), 2) if after else None,
        }

    def print_to(self, console: Console) -> None:
        """The table and, if there is any, the trouble."""
        columns = ("count", "touched", "resumed", "silence s", "most", "back s", "most", "lifted s")
        table = Table("fault", "of", *columns, title=f"{self.totals()['faults']} faults, seed {self.seed}")
        for (kind, role), figures in self._by_kind().items():
            table.add_row(
                kind.value,
                role,
                str(figures["count"]),
                str(figures["requests touched"]),
                str(figures["resumed"]),
                str(figures["silence s, median"]),
                str(figures["silence s, most"]),
                str(figures["back s, median"]),
                str(figures["back s, most"]),
                f"+{figures['back after its end s, median']}",
            )
        console.print(table)
        console.print(", ".join(f"{count} {name}" for name, count in self.totals().items()), highlight=False)
        if self.memory:
            console.print(f"memory, of what it was: {in_words(self.memory)}", highlight=False)
        troubles = self.troubles
        if not troubles:
            console.print("the invariant holds: nothing lost, doubled or changed; every gauge is back", highlight=False)
            return
        console.print(f"[bold red]the invariant is broken, {len(troubles)} times[/]")
        for trouble in troubles[:_SHOWN]:
            console.print(f"- {trouble}", highlight=False, markup=False)
        console.print(f"again with: {self.command}", highlight=False, markup=False)


def in_words(growth: Mapping[str, float]) -> str:
    """Every role's memory as a part of what it was."""
    return ", ".join(f"{name} {part:.1%}" for name, part in growth.items())


def _is_bad(outcome: Outcome) -> bool:
    return outcome.recovered_s is None or bool(outcome.trouble)


def _resumed_in(history: History, outcome: Outcome) -> bool:
    """Return True if a request was resumed because of this fault, as far as times can tell."""
    breaks = [event.at_s for event in history.events if isinstance(event, Broken)]
    if history.resumes and not breaks:
        # The library does not say when.
        return True
    return any(outcome.began_s <= at_s <= outcome.lifted_s + _SEEN_LATE_S for at_s in breaks)
