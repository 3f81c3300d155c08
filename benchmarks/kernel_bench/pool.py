"""Cases of the candidate pool: what a target does between two forward passes, and a draft worker between two steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from benchmarks.kernel_bench.case import Case, Run, Subject, Work

_SESSIONS = (1, 16, 64, 256)
_CAPACITY, _CANDIDATES, _PLACES = 256, 64, 4
_CHILDREN, _CHUNK = 4, 256
_GROWN, _COMMITTED, _MOST_COMMITS = 3, 3, 16
_LENGTH, _MAX_LEN = 1024, 2048
_NUM_SLOTS = 1 << 17
# Rows of the buckets beyond one a session.
_NODES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


def cases() -> list[Case]:
    """A target's operators, one by one and together, then a draft worker's."""
    made = []
    for sessions in _SESSIONS:
        nodes = min(sessions * _CANDIDATES // 2, 512) if sessions > 1 else 63
        shape = f"{sessions} x {_CANDIDATES} entries"
        for operator, suffix, run in (
            ("graft", f"{_GROWN} nodes a session", run_graft),
            ("select", f"{nodes} of all buckets", run_select),
            ("pack", f"{nodes} entries", run_pack),
            ("re_root", f"{_COMMITTED} tokens a session", run_re_root),
            ("round", "graft, select, pack, re_root", _run_round),
        ):
            target = f"{operator}, {sessions} sessions"
            build = functools.partial(_build, sessions, nodes, False, run)
            made.append(
                Case(operator=f"pool.{operator}", shape=f"{shape}, {suffix}", build=build, target=_TARGETS.get(target))
            )
    graft_one = functools.partial(_build, 64, 512, False, run_graft_of_one_row)
    made.append(
        Case(
            operator="pool.graft",
            shape="64 x 64 entries, 64 nodes of one row",
            target="graft, one row",
            build=graft_one,
        )
    )
    for sessions in _SESSIONS:
        width = min(8 * sessions, 64) if sessions < 256 else 256
        for operator, run in (
            ("select", run_select),
            ("pack", run_pack),
            ("append", run_append),
            ("re_root", run_re_root),
            ("step", _run_step),
        ):
            shape = f"draft, {sessions} x {_CANDIDATES} entries, {width} wide"
            made.append(
                Case(
                    operator=f"pool.{operator}",
                    shape=shape,
                    build=functools.partial(_build, sessions, width, True, run),
                )
            )
    return made


_TARGETS = {
    "graft, 64 sessions": "graft",
    "select, 64 sessions": "select",
    "pack, 64 sessions": "pack",
    "re_root, 64 sessions": "re_root",
    "round, 1 sessions": "pool, one session",
}


class PoolBench:
    """A pool whose rows hold random trees, and what the operators are given."""

    def __init__(
        self, sessions: int, nodes: int, drafts: bool, device: torch.device, *, entries: int = _CANDIDATES
    ) -> None:
        from outrider.kernels.pool.pack import Packed
        from outrider.kernels.pool.select import Selection, select

        pool = _grown_pool(sessions, drafts, entries)
        paths = torch.tensor([_path(pool, row, entries) for row in range(sessions)], dtype=torch.int32)
        self.bounds = {"children": _CHILDREN, "chunk": _CHUNK} if drafts else {}
        self.pool = _moved(pool, device)
        own_rows = 0 if drafts else sessions
        most = _CAPACITY if drafts else 64
        buckets = [(own_rows + size, sessions, most, size) for size in sorted({*_NODES, nodes})]
        self.launched = [size for *_, size in buckets].index(nodes)
        self.selection = Selection.allocate(self.pool, buckets)
        rows = own_rows + nodes
        self.packed = Packed.allocate(self.pool, buckets[self.launched], scrap_slot=_NUM_SLOTS - 1)
        self.records = {
            "all": _growth(range(sessions), _GROWN, entries).to(device),
            "one": _growth(range(1), 64, entries).to(device),
        }
        self.verdicts = {
            name: torch.zeros(len(given), dtype=torch.int32, device=device) for name, given in self.records.items()
        }
        self.counts = {
            name: torch.tensor([len(given)], dtype=torch.int32, device=device) for name, given in self.records.items()
        }
        self.commits = torch.zeros(sessions, _MOST_COMMITS, dtype=torch.int32, device=device)
        self.num_commits = torch.zeros(sessions, dtype=torch.int32, device=device)
        self.tokens = paths.to(device)
        self.num_tokens = torch.full((sessions,), _COMMITTED, dtype=torch.int32, device=device)
        self.child_tokens = torch.arange(rows * _CHILDREN, dtype=torch.int32, device=device).view(rows, -1) + 5000
        self.child_acceptances = torch.rand(rows, _CHILDREN, device=device)
        self.made = torch.zeros(rows, _CHILDREN, dtype=torch.int32, device=device)
        self.parent_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        select(self.pool, self.selection, self.launched, **self.bounds)
        self._saved = _moved(self.pool, device)

    def restore(self) -> None:
        """All columns that operators change, as they were."""
        for mine, saved in _columns(self.pool, self._saved):
            mine.copy_(saved)


def _grown_pool(sessions: int, drafts: bool, entries: int) -> Any:
    """Return a pool on a CPU: in each row a random tree some twelve deep; in a drafter's the older half has KV."""
    from outrider.kernels.pool.columns import Pool, RowState
    from outrider.kernels.pool.graft import graft_reference
    from outrider.kernels.pool.records import Records

    generator = np.random.default_rng(sessions)
    pool = Pool.allocate(
        sessions=sessions,
        max_len=_MAX_LEN,
        capacity=_CAPACITY,
        places=1 if drafts else _PLACES,
        node_slots=_NUM_SLOTS if drafts else None,
    )
    records = Records()
    for row in range(sessions):
        records.open(row, 1, length=_LENGTH, cached=0 if drafts else _LENGTH - 1, end=_MAX_LEN, allow=_MAX_LEN)
        for node in range(1, entries + 1):
            parent = max(node - int(generator.integers(1, 7)), 0)
            acceptance = float(generator.uniform(0.3, 1.0))
            _add_node(records, row, node, parent, acceptance)
    words = torch.from_numpy(records.array())
    count, verdicts = torch.tensor([len(words)], dtype=torch.int32), torch.zeros(len(words), dtype=torch.int32)
    commits = torch.zeros(sessions, 1, dtype=torch.int32)
    graft_reference(pool, words, count, verdicts, commits, commits[:, 0].clone())
    pool.table.copy_(torch.arange(pool.table.numel(), dtype=torch.int32).view_as(pool.table) % _NUM_SLOTS)
    pool.state.fill_(RowState.RUNNING)
    pool.table_len.fill_(_LENGTH + 128)
    pool.history.random_(0, 1000)
    if pool.nodes is not None:
        half = entries // 2
        pool.cached.fill_(_LENGTH)
        pool.nodes.expanded[:, :half] = True
        pool.nodes.slot[:, :half] = torch.arange(sessions * half, dtype=torch.int32).view(sessions, half)
        pool.nodes.free.copy_(torch.arange(_NUM_SLOTS))
        pool.nodes.free_tail.fill_(_NUM_SLOTS)
    return pool


def _growth(rows: Iterable[int], count: int, entries: int) -> torch.Tensor:
    """Records of `count` nodes for each row, in chains of four."""
    from outrider.kernels.pool.records import Records

    records = Records()
    for row in rows:
        for number in range(count):
            node = entries + 1 + number
            _add_node(records, row, node, node - 1 if number % 4 else entries - number // 4, 0.9)
    return torch.from_numpy(records.array())


def _add_node(records: Any, row: int, node: int, parent: int, acceptance: float) -> None:
    """A node whose token is its id: siblings differ."""
    records.growth(row, 1, place=0, node_id=node, parent_id=parent, as_of=_LENGTH, token=node, acceptance=acceptance)


def _path(pool: Any, row: int, entries: int) -> list[int]:
    """Tokens down the row's tree, by the child with most below it."""
    parents, below = pool.parent[row, :entries].tolist(), [1] * entries
    for entry in range(entries - 1, -1, -1):
        if parents[entry] >= 0:
            below[parents[entry]] += below[entry]
    path, last = [], -1
    for _ in range(_COMMITTED):
        last = max((entry for entry in range(entries) if parents[entry] == last), key=below.__getitem__)
        path.append(int(pool.token[row, last]))
    return path


def _columns(pool: Any, other: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [(pool, other)] if pool.nodes is None else [(pool, other), (pool.nodes, other.nodes)]
    wide = ("history", "table", "stops", "free")
    return [
        (getattr(mine, column.name), getattr(its, column.name))
        for mine, its in pairs
        for column in dataclasses.fields(mine)
        if isinstance(getattr(mine, column.name, None), torch.Tensor) and column.name not in wide
    ]


def _moved(pool: Any, device: torch.device) -> Any:
    """A copy on the device."""

    def moved(group: Any) -> dict[str, Any]:
        given = {field.name: getattr(group, field.name) for field in dataclasses.fields(group) if field.init}
        return {
            name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }

    columns = moved(pool)
    if pool.nodes is not None:
        columns["nodes"] = type(pool.nodes)(**moved(pool.nodes))
    return type(pool)(**columns)


def _build(
    sessions: int,
    nodes: int,
    drafts: bool,
    make_run: Callable[[PoolBench], Run],
    device: torch.device,
    _flashinfer: Any,
) -> Subject:
    bench = PoolBench(sessions, nodes, drafts, device)
    # One read of the entries in use: launches and dependent steps are what these operators take.
    work = Work(bytes_moved=sessions * _CANDIDATES * (7 * 4 + 4 * (1 if drafts else _PLACES)))
    return Subject(ours=make_run(bench), work=work, restore=bench.restore)


def run_graft(bench: PoolBench, name: str = "all") -> Run:
    """Three nodes a session."""
    from outrider.kernels.pool.graft import graft

    records, count, verdicts = bench.records[name], bench.counts[name], bench.verdicts[name]
    return lambda: graft(bench.pool, records, count, verdicts, bench.commits, bench.num_commits)


def run_graft_of_one_row(bench: PoolBench) -> Run:
    """Sixty-four nodes of one session."""
    return run_graft(bench, "one")


def run_select(bench: PoolBench) -> Run:
    """The bench's bucket, gains of all."""
    from outrider.kernels.pool.select import select

    return lambda: select(bench.pool, bench.selection, bench.launched, **bench.bounds)


def run_pack(bench: PoolBench) -> Run:
    """Return a run that packs the bench's selection."""
    from outrider.kernels.pool.pack import pack

    return lambda: pack(bench.pool, bench.selection, bench.packed)


def run_append(bench: PoolBench) -> Run:
    """Four children of every row."""
    from outrider.kernels.pool.append import append
    from outrider.kernels.pool.pack import pack

    pack(bench.pool, bench.selection, bench.packed)
    children = (bench.child_tokens, bench.child_acceptances, bench.made, bench.parent_ids)
    return lambda: append(bench.pool, bench.packed, *children)


def run_re_root(bench: PoolBench) -> Run:
    """Three tokens a session."""
    from outrider.kernels.pool.re_root import re_root

    return lambda: re_root(bench.pool, bench.tokens, bench.num_tokens)


def _run_round(bench: PoolBench) -> Run:
    return _in_order([run_graft(bench), run_select(bench), run_pack(bench), run_re_root(bench)])


def _run_step(bench: PoolBench) -> Run:
    return _in_order([run_re_root(bench), run_select(bench), run_pack(bench), run_append(bench)])


def _in_order(runs: list[Run]) -> Run:
    def run() -> None:
        for part in runs:
            part()

    return run
