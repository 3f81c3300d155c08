"""Cells of the benchmark: one cell is one way of serving under one load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

# Cells that a killed run should not have left out come first.
_FIRST_MODES = ("off", "async", "sync")
# Roles at the other end of a coordinator's links.
LINKS = ("draft", "target")
_COUNTED = re.compile(r"(\d)\+([1-9])")
_RESIDENT = re.compile(r"(?:([2-9])x)?resident")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Workers of a service, and their placement on GPUs.

    Attributes:
        name: as `named` takes it.
        drafts, targets: workers, each on a GPU of its own unless there is one GPU.
        on_one_gpu: whether all of them share one.
        is_resident: whether targets grow drafts themselves, by a draft model beside their own.
    """

    name: str
    drafts: int
    targets: int
    on_one_gpu: bool = False
    is_resident: bool = False

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the setup of this name: `shared`, `resident`, `4xresident`, or drafts and targets, such as `1+3`.

        Raises:
            ValueError: there is none.
        """
        if name == "shared":
            return cls(name=name, drafts=1, targets=1, on_one_gpu=True)
        if resident := _RESIDENT.fullmatch(name):
            return cls(name=name, drafts=0, targets=int(resident[1] or 1), is_resident=True)
        counts = _COUNTED.fullmatch(name)
        if counts is None:
            raise ValueError(f"{name}: shared, resident, 4xresident, or DRAFTS+TARGETS needed, such as 1+3")
        return cls(name=name, drafts=int(counts[1]), targets=int(counts[2]))

    @property
    def can_draft(self) -> bool:
        """True if anything drafts."""
        return self.drafts > 0 or self.is_resident


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    Attributes:
        setup: which workers serve.
        mode: off, sync or async.
        temperature: of all requests.
        sessions: that run at a time.
        synthetic: rates at which drafts are accepted, whatever they say; none for what they are worth.
        coordinators: that the sessions are spread over.
        target_gpus: of each target.
        most_gpus: that there are; workers of further ones share the last.
        link: role of the workers whose round trips with their coordinator are longer.
        added_ms: milliseconds added to each round trip.
    """

    setup: Setup
    mode: str
    temperature: float
    sessions: int
    synthetic: tuple[float, ...] = ()
    coordinators: int = 1
    target_gpus: int = 1
    most_gpus: int = 4
    link: str = ""
    added_ms: float = 0.0

    @property
    def gpus(self) -> int:
        """That serve it: where nothing is drafted, the drafts' do not count."""
        drafts = 0 if self.mode == "off" or self.setup.on_one_gpu else self.setup.drafts
        return min(drafts + self.setup.targets * self.target_gpus, self.most_gpus)

    @property
    def name(self) -> str:
        """In a line of progress."""
        parts = [f"{self.mode} {self.setup.name}"]
        if self.synthetic:
            parts.append(" ".join(["synthetic", *(f"{rate:g}" for rate in self.synthetic)]))
        if self.link:
            parts.append(f"{self.added_ms:g} ms to {self.link}")
        if self.coordinators > 1:
            parts.append(f"{self.coordinators} coordinators")
        return f"{' '.join(parts)}, {self.sessions} sessions, temperature {self.temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cells to measure; every attribute as the option of its name.

    Attributes:
        sessions, temperatures, modes: of the cells that are compared with each other.
        setups: of the cells; the first with one target and a drafter is what the others are compared with.
        baselines_at: temperatures of the other setups.
        synthetic: rates; cells at the first temperature, for every number of sessions.
        only_synthetic: no other drafts with the first setup.
        round_trips: milliseconds that the links to drafts and to targets are longer, in cells of their own.
        coordinators: numbers of coordinators; every cell is measured with each.
        target_gpus: of each target.
        gpus: that there are.
    """

    sessions: Sequence[int]
    temperatures: Sequence[float]
    modes: Sequence[str]
    setups: Sequence[Setup]
    baselines_at: Sequence[float] = ()
    synthetic: tuple[float, ...] = ()
    only_synthetic: bool = False
    round_trips: Sequence[float] = ()
    coordinators: Sequence[int] = (1,)
    target_gpus: int = 1
    gpus: int = 4

    @property
    def base(self) -> Setup | None:
        """The setup that the others are compared with."""
        return next((setup for setup in self.setups if setup.targets == 1 and setup.can_draft), None)


def cells_of(plan: Plan) -> list[Cell]:
    """All cells, those that the others are compared with first."""
    cells = [*_baselines(plan)] if plan.base is None else [*_compared(plan, plan.base), *_baselines(plan)]
    return [
        replace(cell, coordinators=coordinators, target_gpus=plan.target_gpus, most_gpus=plan.gpus)
        for coordinators in plan.coordinators
        for cell in dict.fromkeys(cells)
    ]


def _compared(plan: Plan, base: Setup) -> Iterator[Cell]:
    def cell(mode: str, temperature: float, sessions: int, **more: Any) -> Cell:
        return Cell(setup=base, mode=mode, temperature=temperature, sessions=sessions, **more)

    drafted = [mode for mode in _FIRST_MODES[1:] if mode in plan.modes]
    coupled = [mode for mode in plan.modes if mode == "off" or not plan.only_synthetic]
    for temperature in plan.temperatures:
        for sessions in plan.sessions:
            for mode in sorted(coupled, key=_FIRST_MODES.index):
                yield cell(mode, temperature, sessions)
    for temperature in plan.temperatures if plan.round_trips else ():
        for sessions in plan.sessions:
            for link, added_ms in product(LINKS if base.drafts else LINKS[1:], plan.round_trips):
                yield from (cell(mode, temperature, sessions, link=link, added_ms=added_ms) for mode in drafted)
    if plan.synthetic:
        for sessions in plan.sessions:
            for mode in drafted:
                yield cell(mode, plan.temperatures[0], sessions, synthetic=plan.synthetic)


def _baselines(plan: Plan) -> Iterator[Cell]:
    for setup in (setup for setup in plan.setups if setup != plan.base):
        modes = [mode for mode in _FIRST_MODES[1:] if mode in plan.modes] if setup.can_draft else ["off"]
        for temperature in plan.baselines_at:
            # With fewer sessions than targets some would have nothing to do.
            for sessions in (sessions for sessions in plan.sessions if sessions >= setup.targets):
                for mode in modes:
                    yield Cell(setup=setup, mode=mode, temperature=temperature, sessions=sessions)


def setups_of(cells: Iterable[Cell]) -> list[Setup]:
    """Return those that occur."""
    return list(dict.fromkeys(cell.setup for cell in cells))
