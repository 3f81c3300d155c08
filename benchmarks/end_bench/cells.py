"""What is measured: one cell is one way of serving under one load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

# Cells that a killed run should not have left out come first.
_FIRST_MODES = ("off", "async", "sync")


class Setup(StrEnum):
    """Which workers serve, and where they stand."""

    APART = "apart"
    """The target on one GPU, the draft on another."""
    SHARED = "shared"
    """Target and draft on one and the same GPU."""
    REPLICAS = "replicas"
    """A target on each of two GPUs, no draft."""
    THREE_TARGETS = "three targets"
    """A target on each of three GPUs, and one draft for all of them on a fourth."""


BASES = (Setup.APART, Setup.SHARED)
"""Those whose `off` others may be compared with: the first of them that is asked for."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    Attributes:
        setup: which workers serve.
        mode: off, sync or async.
        temperature: of all requests.
        sessions: that run at a time.
        rule: by which drafts are judged.
        synthetic: rates at which drafts are accepted, whatever they say; none for what they are worth.
        turn: the cells of one turn are compared with each other.
        most_gpus: that there are; workers of further ones share the last.
    """

    setup: Setup
    mode: str
    temperature: float
    sessions: int
    rule: str = "coupled"
    synthetic: tuple[float, ...] = ()
    turn: int = 0
    most_gpus: int = 4

    @property
    def gpus(self) -> int:
        """That serve it: where nothing is drafted, the draft's does not count."""
        return min(self._wanted_gpus, self.most_gpus)

    @property
    def _wanted_gpus(self) -> int:
        if self.setup is Setup.THREE_TARGETS:
            return 4
        if self.setup is Setup.SHARED or (self.mode == "off" and self.setup is not Setup.REPLICAS):
            return 1
        return 2

    @property
    def targets(self) -> int:
        """Target workers."""
        return {Setup.REPLICAS: 2, Setup.THREE_TARGETS: 3}.get(self.setup, 1)

    @property
    def name(self) -> str:
        """In a line of progress."""
        parts = [f"{self.mode} {self.setup}"]
        if self.rule != "coupled":
            parts.append(" ".join([self.rule, *(f"{rate:g}" for rate in self.synthetic)]))
        return f"{' '.join(parts)}, {self.sessions} sessions, temperature {self.temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for; every attribute as the option of its name.

    Attributes:
        sessions, temperatures, modes: of the cells that are compared with each other.
        setups: of the cells.
        baselines_at: temperatures of the setups but apart.
        rules: others than coupled, above temperature 0, for every number of sessions.
        synthetic: rates; cells at the first temperature, for every number of sessions.
        turns: how often all of it.
        gpus: that there are.
    """

    sessions: Sequence[int]
    temperatures: Sequence[float]
    modes: Sequence[str]
    setups: Sequence[Setup]
    baselines_at: Sequence[float] = ()
    rules: Sequence[str] = ()
    synthetic: tuple[float, ...] = ()
    turns: int = 1
    gpus: int = 4


def cells_of(plan: Plan) -> list[Cell]:
    """All cells, turn after turn, those that the others are compared with first."""
    cells = dict.fromkeys([*_compared(plan), *_baselines(plan), *_ruled(plan), *_synthetic(plan)])
    return [replace(cell, turn=turn, most_gpus=plan.gpus) for turn in range(plan.turns) for cell in cells]


def _compared(plan: Plan) -> Iterator[Cell]:
    base = next((setup for setup in BASES if setup in plan.setups), None)
    if base is None:
        return
    modes = sorted(plan.modes, key=_FIRST_MODES.index)
    for temperature in plan.temperatures:
        for sessions in plan.sessions:
            for mode in modes:
                yield Cell(setup=base, mode=mode, temperature=temperature, sessions=sessions)


def _ruled(plan: Plan) -> Iterator[Cell]:
    for rule in plan.rules:
        for temperature in (temperature for temperature in plan.temperatures if temperature > 0):
            for sessions in plan.sessions:
                for mode in (mode for mode in _FIRST_MODES[1:] if mode in plan.modes):
                    yield Cell(setup=Setup.APART, mode=mode, temperature=temperature, sessions=sessions, rule=rule)


def _synthetic(plan: Plan) -> Iterator[Cell]:
    for sessions in plan.sessions if plan.synthetic else ():
        for mode in (mode for mode in _FIRST_MODES[1:] if mode in plan.modes):
            yield Cell(
                setup=Setup.APART,
                mode=mode,
                temperature=plan.temperatures[0],
                sessions=sessions,
                rule="synthetic",
                synthetic=plan.synthetic,
            )


def _baselines(plan: Plan) -> Iterator[Cell]:
    for temperature in plan.baselines_at:
        for sessions in plan.sessions:
            if Setup.REPLICAS in plan.setups and sessions > 1:
                yield Cell(setup=Setup.REPLICAS, mode="off", temperature=temperature, sessions=sessions)
            for setup in (Setup.THREE_TARGETS, Setup.SHARED):
                for mode in _FIRST_MODES[1:] if setup in plan.setups else ():
                    if mode in plan.modes:
                        yield Cell(setup=setup, mode=mode, temperature=temperature, sessions=sessions)


def setups_of(cells: Iterable[Cell]) -> list[Setup]:
    """Return those that occur."""
    return list(dict.fromkeys(cell.setup for cell in cells))
