"""What is compiled decides as numpy does, slot for slot, and is compiled once for all."""

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.simulation.hybrid import SecondSource, simulate_hybrid
from benchmarks.simulation.settings import Settings
from benchmarks.simulation.virtual_run import simulate
from tests.coordinator.committing import Commitment, commit_together

from outrider import succession_kernels
from outrider.compiled import IS_COMPILED
from outrider.coordinator import (
    answer_kernels,
    candidate_kernels,
    choice_kernels,
    commit_kernels,
    cost_model,
    forest_kernels,
    growth_kernels,
    selection,
    successor_kernels,
)
from outrider.coordinator import candidates as candidates_module
from outrider.coordinator import mirror as mirror_module
from outrider.coordinator import open_leaves as open_leaves_module
from outrider.coordinator.candidates import candidates
from outrider.coordinator.cost_model import StepCost
from outrider.coordinator.forest import Forest
from outrider.coordinator.messages import Growth, GrowthBatch, SpeculationMode
from outrider.coordinator.mirror import TreeMirror, graft
from outrider.coordinator.open_leaves import next_level, open_leaves, whole_next_level
from outrider.coordinator.selection import choose_counts
from outrider.coordinator.warm_up import warm_up
from outrider.growth_source import GrowthSource

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="nothing is compiled without numba")

_COLUMNS = ("row", "parent", "token", "depth", "length", "acceptance", "value", "first_child", "next_sibling", "serial")


class Service:
    """Sessions that a draft and a target work on by dice."""

    def __init__(
        self, seed: int, *, sessions: int, tokens: int = 4, sources: Sequence[GrowthSource] = (GrowthSource.MODEL,)
    ) -> None:
        self.dice = random.Random(seed)
        self.sources = sources
        self.forest = Forest()
        self.tokens = tokens
        self.lists = [[1, 2, 3] for _ in range(sessions)]
        self.mirrors = [TreeMirror(self.forest, own) for own in self.lists]
        self.next_id = 1
        self.cost = StepCost()

    def growth(self) -> None:
        """Of some sessions, as of now or earlier, below nodes that may be gone, some of it twice."""
        parts = []
        for number, own in enumerate(self.lists):
            if self.dice.random() < 0.3:
                continue
            ids, parents, told = [], [], []
            for _ in range(self.dice.randrange(1, 9)):
                ids.append(self.next_id)
                parents.append(self.dice.choice([0, *range(max(1, self.next_id - 40), self.next_id)]))
                told.append(self.dice.randrange(self.tokens))
                self.next_id += self.dice.random() < 0.95
            parts.append(
                Growth(
                    session_id=number,
                    epoch=1,
                    as_of=max(1, len(own) - self.dice.randrange(4)),
                    node_ids=ids,
                    parents=parents,
                    tokens=told,
                    acceptance=[self.dice.choice([0.0, 0.2, 0.5, 0.7, 1.0, 1.5]) for _ in ids],
                    sources=[self.dice.choice(self.sources) for _ in ids] if len(self.sources) > 1 else (),
                )
            )
        if parts:
            own = [self.mirrors[part.session_id] for part in parts]
            self.grafted = graft(self.dice.choice("ab"), GrowthBatch.of(parts), own)

    def round(self) -> None:
        """A batch of the best nodes, and what a target makes of it."""
        most = [self.dice.randrange(12) for _ in self.mirrors]
        self.found = candidates(self.mirrors, most=most, deepest=[self.dice.randrange(1, 7) for _ in most])
        counts = [self.dice.randrange(count + 1) for count in np.diff(self.found.starts).tolist()]
        self.trees = self.found.trees(counts)
        sums = np.array([self.dice.random() * 8 for _ in most]), np.array(most)
        level = next_level(self.found, open_leaves(self.found, None), widths=sums[0], most=sums[1], hit=0.7, price=0.1)
        whole = whole_next_level(self.found, widths=sums[0], most=sums[1], hit=0.7, price=0.1)
        assert (whole is None) == (self.forest.mix.is_active or not open_leaves_module.IS_COMPILED)
        self.cost.observe(self.dice.randrange(1, 300), self.dice.uniform(3e6, 6e6))
        choice = choose_counts(
            self.found.values,
            self.found.places,
            sessions=len(most),
            cost_ns=self.cost.predict_many_ns,
            max_rows=self.dice.choice([20, 300]),
            fair_slowdown=self.dice.choice([1.02, 1.5]),
        )
        asked = np.array([300, 1, 20_000, 17])
        self.choices = [
            *level,
            level[0] if whole is None else whole,
            choice.counts,
            np.array([choice.emitted]),
            self.cost.predict_many_ns(asked),
        ]
        commitments = []
        for own, mirror, tree in zip(self.lists, self.mirrors, self.trees, strict=True):
            if self.dice.random() < 0.1:
                continue
            path: list[int] = []
            for number, parent in enumerate(tree.parents):
                if parent == (path[-1] + 1 if path else 0) and self.dice.random() < 0.6:
                    path.append(number)
            new = [tree.tokens[number] for number in path]
            new += [self.dice.randrange(self.tokens) for _ in range(self.dice.randrange(1, 3))]
            own.extend(new)
            accepted = [tree.slots[number] for number in path]
            commitments.append(Commitment(mirror, new, accepted, self.dice.random() < 0.8))
        commit_together(*commitments)

    def state(self) -> dict[str, list]:
        """All that is known."""
        forest, rows = self.forest, self.forest.rows
        columns = {name: getattr(forest, name).tolist() for name in _COLUMNS}
        columns |= {name: getattr(rows, name).tolist() for name in ("root", "length", "was_drafted", "was_missed")}
        found = ("starts", "places", "ranks", "values", "depths", "is_leaf", "slots")
        columns |= {f"candidates' {name}": getattr(self.found, name).tolist() for name in found}
        columns["trees"] = [list(map(list, tree)) for tree in self.trees]
        columns["choices"] = [column.tolist() for column in self.choices]
        columns["grafted"] = list(self.grafted)
        columns["sources"] = [forest.mix.counts.tolist(), [forest.mix.shift(own.row) for own in self.mirrors]]
        return columns


def test_compiled_loops_and_numpy_agree_in_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (sessions, sources) in enumerate([(1, 1), (2, 3), (7, 1), (7, 3), (20, 1)]):
        histories = []
        for is_compiled in (True, False):
            for module in (mirror_module, candidates_module, cost_model, selection, open_leaves_module):
                monkeypatch.setattr(module, "IS_COMPILED", is_compiled)
            service, history = Service(seed, sessions=sessions, sources=tuple(GrowthSource)[:sources]), []
            for _ in range(40):
                service.growth()
                service.growth()
                service.round()
                history.append(service.state())
            histories.append(history)
        for turn, (compiled, plain) in enumerate(zip(*histories, strict=True)):
            for name, values in compiled.items():
                assert values == plain[name], f"{name}, {sessions} sessions, round {turn}"


def test_plain_python_grafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has no numba."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from test_forest_kernels import IS_COMPILED, Service\n"
        "assert not IS_COMPILED\n"
        "service = Service(3, sessions=5)\n"
        "for _ in range(12): service.growth(); service.growth(); service.round()\n"
        "print(service.state())"
    )
    folder = Path(__file__).parent
    command = [sys.executable, "-c", code, str(folder), str(folder.parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    service = Service(3, sessions=5)
    for _ in range(12):
        service.growth()
        service.growth()
        service.round()
    assert done.stdout.strip() == str(service.state())


@pytest.mark.parametrize("mode", SpeculationMode)
def test_nothing_is_compiled_while_requests_run(mode: SpeculationMode) -> None:
    warm_up()
    loops = [
        loop
        for module in (
            answer_kernels,
            candidate_kernels,
            choice_kernels,
            commit_kernels,
            forest_kernels,
            growth_kernels,
            succession_kernels,
            successor_kernels,
        )
        for loop in vars(module).values()
        if hasattr(loop, "signatures")
    ]
    before = [len(loop.signatures) for loop in loops]
    settings = Settings(sessions=3, workers=2, drafts_per_session=2, mode=mode, duration_s=0.1, warmup_s=0.02)
    assert simulate(settings).tokens_per_s > 0
    # Beside another source, too: other loops, and the same ones with other columns.
    _, counts = simulate_hybrid(replace(settings, drafts_per_session=1), SecondSource(rates=(0.5,), claims=(0.5,)))
    assert mode is not SpeculationMode.ASYNC or GrowthSource.NGRAM in {own.source for own in counts}
    assert [len(loop.signatures) for loop in loops] == before
    assert max(before) == 1
