"""A draft and a target as their workers run them, in this process and without a network, and rounds between them.

Rounds are those of `sync`: the draft grows a tree of fixed size, the target verifies it, both commit. What is accepted
depends on tokens and seeds alone, not on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.drafters.loading import load_drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, GrowthMode, SessionStart
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.buckets import RoundTimes, round_buckets
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.growth import Growth as TargetGrowth
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.step_cost import StepCost
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT, OpenRequest, SessionKey

_MAX_LEN = 512
_SESSIONS = 64
_KV_BYTES = 1 << 29
_STEP_ROWS = 2048
_NODES = 24
_DEPTH = 8


@dataclass(kw_only=True)
class Run:
    """One session on its way.

    Attributes:
        prompt: token ids.
        sampling: how it is continued.
        output: token ids so far.
        rounds: tokens that each round gave.
    """

    prompt: Sequence[int]
    sampling: SamplingSpec
    output: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


class _EveryNode(RoundTimes):
    """Rounds in which every node is worth its row, whatever it takes."""

    @property
    def least_value(self) -> float:
        """See `RoundTimes`."""
        return 0.0


class Pair:
    """The embedded pair as two workers.

    Args:
        max_len: most tokens of a run, prompt and output.
    """

    def __init__(self, *, max_len: int = _MAX_LEN) -> None:
        self._max_len = max_len
        limits: dict[str, Any] = {"max_model_len": max_len, "max_num_seqs": _SESSIONS, "kv_bytes": _KV_BYTES}
        target = EngineConfig(model_path=embedded_target_path(), enable_prefix_caching=False, **limits)
        rounds = RoundConfig(
            max_sessions=_SESSIONS, max_model_len=max_len, max_step_rows=_STEP_ROWS, least_value=0.0, places=1
        )
        times = _EveryNode(round_buckets(rounds, on_gpu=False), StepCost(slowdown=0.3, prior_rows=32))
        self._loop = RoundLoop(ModelRunner(target), rounds, times=times)
        config = DraftWorkerConfig(model_path=embedded_draft_path(), max_step_tokens=_STEP_ROWS, **limits)
        self._drafters = load_drafters(config).drafters
        self._numbers = itertools.count(1)

    def continue_plainly(self, runs: Sequence[Run]) -> None:
        """Gives every run its whole output, one token a step."""
        self._rounds(runs, most_rounds=self._max_len, drafted=False)

    def speculate(self, runs: Sequence[Run], *, most_rounds: int | None = None) -> None:
        """Gives every run its output, or that of so many rounds."""
        self._rounds(runs, most_rounds=self._max_len if most_rounds is None else most_rounds, drafted=True)

    def _rounds(self, runs: Sequence[Run], *, most_rounds: int, drafted: bool) -> None:
        for first in range(0, len(runs), _SESSIONS):
            held = {(1, next(self._numbers)): run for run in runs[first : first + _SESSIONS]}
            for key, run in held.items():
                self._open(key, run, drafted=drafted)
            for _ in range(most_rounds):
                running = {key: run for key, run in held.items() if len(run.output) < run.sampling.max_new_tokens}
                if not running:
                    break
                self._round(running, drafted=drafted)
            for key in held:
                self._loop.close(key, 1)
                self._drafters.close(key, 1)

    def _open(self, key: SessionKey, run: Run, *, drafted: bool) -> None:
        request = OpenRequest(key=key, epoch=1, prompt=run.prompt, output=run.output, sampling=run.sampling)
        self._loop.open(request)
        self._loop.limit(key, 1, 0)
        if drafted:
            limits = GrowthLimits(mode=GrowthMode.SYNC, max_live_nodes=256, max_depth=_DEPTH, sync_nodes=_NODES)
            self._drafters.open(
                SessionStart(
                    key=key,
                    # So that growth is split between sessions.
                    owner=key,
                    epoch=1,
                    prompt=run.prompt,
                    output=run.output,
                    sampling=run.sampling,
                    limits=limits,
                )
            )

    def _round(self, running: dict[SessionKey, Run], *, drafted: bool) -> None:
        """Verify what the draft has grown, in one round of all sessions; before and behind it they are held."""
        self._settle()
        for key, growth in self._grow(len(running)).items() if drafted else ():
            self._loop.grow(TargetGrowth.of_session(
                key, 1, 0, growth.as_of[0], growth.node_ids, growth.parents, growth.tokens, growth.acceptance,
                distributions=growth.distributions,
            ))  # fmt: skip
        self._settle()
        for key in running:
            self._loop.limit(key, 1, WITHOUT_LIMIT)
        results = self._loop.turn()
        for key in running:
            self._loop.limit(key, 1, 0)
        for result in results:
            if result.fault is not None:
                raise RuntimeError(f"a session failed: {result.fault}")
            run = running.pop(result.key)
            if drafted:
                self._drafters.commit(result.key, 1, len(run.prompt) + len(run.output), result.tokens)
            run.output.extend(result.tokens)
            run.rounds.append(len(result.tokens))
        if running:
            raise RuntimeError(f"{len(running)} sessions took no part in a round")

    def _settle(self) -> None:
        """Have the target compute prompts and take what has grown."""
        while self._loop.has_work:
            self._loop.turn()

    def _grow(self, sessions: int) -> dict[SessionKey, Growth]:
        """The whole tree of every session that has one to grow, by key."""
        grown: dict[SessionKey, Growth] = {}
        while len(grown) < sessions and (steps := list(self._drafters.advance())):
            for step in steps:
                grown |= {key: growth for key, growth in step.by_owner() if growth.complete[0]}
        return grown


def runs_of(prompts: Sequence[Sequence[int]], numbers: Sequence[int], sampling: SamplingSpec) -> list[Run]:
    """A run a prompt, each with a seed of its own."""
    return [
        Run(prompt=prompt, sampling=replace(sampling, seed=number))
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
