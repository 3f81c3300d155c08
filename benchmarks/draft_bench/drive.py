"""A draft worker without its network: the growth thread that serves, sessions that are committed to as a target would.

The owner of the sessions is called on the growth thread after every step; it packs the message that would leave, notes
the time, and submits commits from there, so that they arrive as they do in serving: while the next step runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_step import GrowthStep, SessionGrowth
from outrider.draft_worker.growth_thread import (
    CommitCommand,
    GrowthThread,
    LeaveCommand,
    Load,
    OpenCommand,
    SessionFailure,
    spare_collector,
)
from outrider.draft_worker.service import growth_message
from outrider.draft_worker.session import DraftSession, GrowthLimits, SessionStart
from outrider.sampling import SamplingSpec

_CONTEXT = 1000
# Steps between two commits of a session, where its credit lasts so long, and the tokens of one.
_COMMIT_EVERY, _COMMITTED = 8, 3
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is measured: so many sessions that grow so many nodes a step, over all of them.

    Attributes:
        sessions: that grow.
        width: nodes of a step.
        live_nodes: of each session; default some steps' worth.
    """

    sessions: int
    width: int
    live_nodes: int | None = None

    @property
    def credit(self) -> int:
        """Live nodes of each session."""
        return self.live_nodes or max(1024 // self.sessions, 512)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of the steps that were as wide as they should be, milliseconds.

    Attributes:
        period: from step to step, median.
        high: the same, 90th percentile.
        mean: the same of all steps, commits included.
        forward: from a step's launch until its children were there, median.
        device: of that the device's own time, as the launcher averages it; 0 where there is none.
        commit: one commit, microseconds, median.
        steps: that were counted.
    """

    period: float
    high: float
    mean: float
    forward: float
    device: float
    commit: float
    steps: int


class Owner:
    """Whom the sessions belong to.

    Args:
        growth: whose sessions they are.
        thread: that runs it.
        point: how many there are.
        vocab_size: of prompts.
        temperature: of all sessions.

    Attributes:
        commits_at_once: whether commits are submitted as soon as growth has been delivered; else by `commit`.
    """

    def __init__(
        self, growth: TreeGrowth, thread: GrowthThread, point: Point, *, vocab_size: int, temperature: float
    ) -> None:
        self._growth, self._thread, self._point = growth, thread, point
        self._temperature = temperature
        self._chance = np.random.default_rng(point.sessions * 100 + point.width)
        self._vocab_size = vocab_size
        self._since = [0] * point.sessions
        # The length that each session has once its last commit is applied.
        self._lengths = [0] * point.sessions
        self._wanted = 0
        self.commits_at_once = True
        self.reached = threading.Event()
        self.failures: list[SessionFailure] = []
        # Of every step: when it was handed out, its rows, its own record.
        self.noted: list[tuple[int, int, int]] = []

    def open(self) -> None:
        """Opens the sessions."""
        self._wanted = 1 << 60
        limits = GrowthLimits(max_live_nodes=self._point.credit, max_depth=10_000)
        commands = []
        for number in range(self._point.sessions):
            sampling = SamplingSpec(temperature=self._temperature, seed=number + 1, max_new_tokens=1 << 20)
            prompt = self._chance.integers(0, self._vocab_size, _CONTEXT - 10 * number % 64).tolist()
            start = SessionStart(
                key=(1, number), owner=self, epoch=1, prompt=prompt, output=(), sampling=sampling, limits=limits
            )
            commands.append(OpenCommand(self, start))
        self._thread.submit(commands)

    def run(self, steps: int) -> None:
        """Until so many further steps have been handed out."""
        self.noted.clear()
        self.reached.clear()
        self._wanted = steps
        while len(self.noted) < steps:
            if not self.reached.wait(_TIMEOUT_S):
                raise TimeoutError(f"{len(self.noted)} of {steps} steps in {_TIMEOUT_S:.0f} s; {self.failures}")
            # A step that was being noted while the list was cleared may have said so, too.
            if len(self.noted) < steps:
                self.reached.clear()

    def deliver(self, growths: Sequence[SessionGrowth], step: GrowthStep, load: Load) -> None:
        """New nodes: packed as a message, as in serving."""
        growth_message(growths, step, load)
        self.noted.append((time.perf_counter_ns(), step.tokens, step.forward_ns))
        if len(self.noted) >= self._wanted:
            self.reached.set()
        if self.commits_at_once:
            self.commit()

    def commit(self) -> None:
        """Commits to the sessions whose turn it is."""
        commits = [command for number in range(self._point.sessions) if (command := self._commit(number)) is not None]
        if commits:
            self._thread.submit(commits)

    def fail(self, failure: SessionFailure) -> None:
        """Nothing should."""
        self.failures.append(failure)

    def _commit(self, number: int) -> CommitCommand | None:
        session = self._growth.session((1, number))
        if session is None or not session.tree.size or session.length < self._lengths[number]:
            return None
        self._since[number] += 1
        spare = self._point.credit - session.tree.size - 4 * self._growth.config.max_step_nodes // self._point.sessions
        # Staggered, as sessions of several targets would be; one target's arrive together, at worst all in one step.
        if spare > 4 and (self._since[number] < _COMMIT_EVERY):
            return None
        self._since[number] = 0
        tokens = _best_path(session)
        self._lengths[number] = session.length + len(tokens)
        return CommitCommand(self, (1, number), 1, session.length, tokens) if tokens else None


def _best_path(session: DraftSession) -> list[int]:
    """The tokens that a target commits: down the child below which most was grown."""
    tokens: list[int] = []
    node: DraftNode = session.tree.root
    # Without what was promised to the step that waits: its token is below 0.
    while len(tokens) < _COMMITTED and (known := [child for child in node.taken.values() if child.token >= 0]):
        node = max(known, key=lambda child: (len(child.taken), child.value))
        tokens.append(node.token)
    return tokens


def measure(
    growth: TreeGrowth, point: Point, *, steps: int, warm: int, settle: Any = None, temperature: float = 1.0
) -> Measured:
    """Runs a growth thread over `growth` and measures the steps.

    Args:
        growth: without sessions; may be used again afterwards.
        point: what runs.
        steps: that are measured.
        warm: that run before.
        settle: called between the two, while nothing runs.
        temperature: of the sessions.
    """
    spare_collector()
    thread, owner = started(growth, point, temperature)
    owner.open()
    owner.run(warm)
    stop(growth, thread, owner)
    if settle is not None:
        settle()
    thread, owner = started(growth, point, temperature)
    owner.open()
    owner.run(_CONTEXT * point.sessions // growth.config.max_step_tokens + warm)
    with _timed_commits(growth) as commits:
        owner.run(steps)
    noted = list(owner.noted[:steps])
    stop(growth, thread, owner)
    times = np.array([time_ns for time_ns, _, _ in noted])
    rows = np.array([rows for _, rows, _ in noted])
    periods = np.diff(times) * 1e-6
    wide = rows[1:] >= point.width
    if not wide.any():
        raise RuntimeError(f"no step was {point.width} wide: {sorted(set(rows.tolist()))}")
    forward = [forward_ns for _, rows, forward_ns in noted if rows >= point.width]
    device = growth._launcher._device_ns.get(_bucket_rows(growth, point.width), 0.0)
    return Measured(
        period=float(np.median(periods[wide])),
        high=float(np.quantile(periods[wide], 0.9)),
        mean=float(periods.mean()),
        forward=statistics.median(forward) * 1e-6,
        device=device * 1e-6,
        commit=statistics.median(commits) if commits else 0.0,
        steps=int(wide.sum()),
    )


@contextmanager
def _timed_commits(growth: TreeGrowth) -> Iterator[list[float]]:
    """Microseconds of every commit meanwhile."""
    taken: list[float] = []
    commit = growth.commit

    def timed(*args: Any) -> None:
        began = time.perf_counter_ns()
        commit(*args)
        taken.append((time.perf_counter_ns() - began) * 1e-3)

    growth.commit = timed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield taken
    finally:
        del growth.commit


def _bucket_rows(growth: TreeGrowth, width: int) -> int:
    steps = growth._launcher._steps
    return 0 if steps is None else next(rows for rows in steps.ladder.token_rungs if rows >= width)


def started(growth: TreeGrowth, point: Point, temperature: float) -> tuple[GrowthThread, Owner]:
    """A growth thread that runs, and whom its sessions belong to."""
    thread = GrowthThread(lambda: growth)
    owner = Owner(growth, thread, point, vocab_size=growth.runner.vocab_size, temperature=temperature)
    thread.start()
    thread.ready.result(_TIMEOUT_S)
    return thread, owner


def stop(growth: TreeGrowth, thread: GrowthThread, owner: Owner) -> None:
    """Ends the thread.

    Raises:
        RuntimeError: a command has failed.
    """
    thread.submit([LeaveCommand(owner)])
    thread.stop()
    thread.stopped.result(_TIMEOUT_S)
    if owner.failures:
        raise RuntimeError(f"failed: {owner.failures[:3]}")
    assert growth.num_sessions == 0
