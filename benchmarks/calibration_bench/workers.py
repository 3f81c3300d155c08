"""A draft and a target as their workers run them, in this process and without a network, and rounds between them.

Rounds are those of `sync`: the draft grows a tree of fixed size, the target verifies it, both commit. What is accepted
depends on tokens and seeds alone, not on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.target_bench.models import folder_model
from benchmarks.target_bench.worker import Worker, worker_config

from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.loading import load_drafters
from outrider.draft_worker.rounds.growth import Growth
from outrider.draft_worker.rounds.session import GrowthLimits, GrowthMode, SessionStart
from outrider.models import embedded_draft_path, embedded_target_path
from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import OpenRequest, Outcome, SessionKey, TreeRequest

_MAX_LEN = 512
_SESSIONS = 64
_KV_BYTES = 1 << 29
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


class Pair:
    """The embedded pair as two workers.

    Args:
        max_len: most tokens of a run, prompt and output.
    """

    def __init__(self, *, max_len: int = _MAX_LEN) -> None:
        model = folder_model(embedded_target_path())
        self._max_len = max_len
        limits = {"max_model_len": max_len, "max_num_seqs": _SESSIONS, "kv_bytes": _KV_BYTES, "max_step_tokens": 2048}
        self._verifier = Worker(model, worker_config(model, "cpu", **limits)).verifier()
        config = DraftWorkerConfig(
            model_path=embedded_draft_path(),
            max_model_len=max_len,
            max_num_seqs=_SESSIONS,
            kv_bytes=_KV_BYTES,
            max_step_tokens=2048,
        )
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
            # Beside much prefill the verifier would cut trees.
            while self._verifier.has_pending_prefill:
                self._verifier.prefill()
            for _ in range(most_rounds):
                running = {key: run for key, run in held.items() if len(run.output) < run.sampling.max_new_tokens}
                if not running:
                    break
                self._round(running, drafted=drafted)
            for key in held:
                self._verifier.close(key, 1)
                self._drafters.close(key, 1)

    def _open(self, key: SessionKey, run: Run, *, drafted: bool) -> None:
        request = OpenRequest(key=key, epoch=1, prompt=run.prompt, output=run.output, sampling=run.sampling)
        self._verifier.open(request)
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
        grown = self._grow(len(running)) if drafted else {}
        waiting = dict(running)
        while waiting:
            trees = [_request(key, run, grown.get(key)) for key, run in waiting.items()]
            for tree, result in zip(trees, self._verifier.step(trees).results, strict=True):
                if result.outcome is Outcome.ERROR:
                    raise RuntimeError(f"a session failed: {result.fault}")
                if result.outcome is Outcome.DEFERRED:
                    continue
                run = waiting.pop(tree.key)
                if drafted:
                    self._drafters.commit(tree.key, 1, tree.length, result.token_ids)
                run.output.extend(result.token_ids)
                run.rounds.append(len(result.token_ids))

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


def _request(key: SessionKey, run: Run, growth: Growth | None) -> TreeRequest:
    length = len(run.prompt) + len(run.output)
    if growth is None or growth.as_of != [length]:
        return TreeRequest(key=key, epoch=1, length=length, tokens=[], parents=[])
    # No node past the last token of the output, as the coordinator cuts it.
    room = run.sampling.max_new_tokens - len(run.output) - 1
    numbers, depths = {0: 0}, {0: 0}
    tokens, parents, distributions = [], [], []
    drawn = growth.distributions or [None] * len(growth.node_ids)
    columns = zip(growth.node_ids, growth.parents, growth.tokens, drawn, strict=True)
    for node_id, parent_id, token, distribution in columns:
        if parent_id in numbers and depths[parent_id] < room:
            tokens.append(token)
            parents.append(numbers[parent_id])
            distributions.append(distribution)
            numbers[node_id], depths[node_id] = len(tokens), depths[parent_id] + 1
    return TreeRequest(key=key, epoch=1, length=length, tokens=tokens, parents=parents, distributions=distributions)
