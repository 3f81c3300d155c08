"""A target worker without its network: the runner, the verifier and the step thread that serve, driven by this process.

Sessions stand where decoding has brought them: their context is there, and every step verifies a tree of random tokens
behind it, greedily, and commits what the model chooses, as in serving.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from benchmarks.target_bench.models import BenchModel
from benchmarks.target_bench.points import Point

from outrider.engine.model_runner import ModelRunner
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.sessions import OpenRequest, Outcome, SessionKey, TreeRequest, TreeResult
from outrider.target_worker.verifier import Verifier

# Slots of a context are handed out in turns of so many, as sessions that decode side by side get them.
_TURN = 16
# Different trees' tokens, of which steps take one after the other.
_DRAWS = 16
# Each node hangs from one of the few before it, as in benchmarks/kernel_bench/forest.py.
_REACH = 6


def worker_config(model: BenchModel, device: str, **limits: Any) -> TargetWorkerConfig:
    """A worker as it is served by default, but for what the measurement limits (see `TargetWorkerConfig`)."""
    # Contexts are made up here: nobody may find them again.
    return TargetWorkerConfig(model_path=model.folder, device=device, enable_prefix_caching=False, **limits)


class Worker:
    """A model that is loaded once, and verifiers over it, one after the other.

    Attributes:
        model: what is measured.
        config: as served.
        runner: the model, loaded.
    """

    def __init__(self, model: BenchModel, config: TargetWorkerConfig) -> None:
        self.model, self.config = model, config
        decoder = True if model.source is not None else None
        self.runner = ModelRunner(config.engine(), decoder=decoder, source=model.source)
        self._verifier: Verifier | None = None

    def verifier(self) -> Verifier:
        """A new one; what is left of the one before, after a failure, is closed."""
        if self._verifier is not None:
            for key, session in list(self._verifier._sessions.items()):
                self._verifier.close(key, session.epoch)
        config = self.config
        self._verifier = Verifier(
            self.runner,
            max_step_tokens=config.max_step_tokens,
            max_prefill_tokens=config.prefill_tokens,
            prefill_slowdown=config.prefill_slowdown,
        )
        return self._verifier

    def capture_missing(self) -> None:
        """Captures what the steps so far lacked, as the step thread does between steps."""
        while self.runner.steps is not None and (bucket := self.runner.steps.missing) is not None:
            self.runner.steps.capture(bucket)

    def fill_caches(self) -> None:
        """Random keys and values in every slot: zeros draw less power, and a softmax over them is flat."""
        for cache in (*self.runner._caches.keys, *self.runner._caches.values):
            cache.normal_()


class SessionGroup:
    """Sessions that are always stepped together.

    Args:
        count: of them.
        context: tokens of each, the root included.
        rows: of each tree, its root included.
        vocab_size: bound of token ids.
        seed: of prompts and trees.

    Attributes:
        opens: what opens them.
    """

    _numbers = itertools.count(1)

    def __init__(self, *, count: int, context: int, rows: int, vocab_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        keys = [(1, next(self._numbers)) for _ in range(count)]
        self._lengths = dict.fromkeys(keys, context)
        sampling = SamplingSpec(max_new_tokens=1 << 20)
        self.opens = [
            OpenRequest(key=key, epoch=1, prompt=self._draw(context), output=(), sampling=sampling) for key in keys
        ]
        reach = np.maximum(0, np.arange(rows - 1) + 1 - _REACH)
        self._parents = [self._random.integers(reach, np.arange(1, rows)).tolist() for _ in keys]
        # Drawn before: whoever drives a step thread must not take its interpreter for long.
        self._tokens = [[self._draw(rows - 1) for _ in keys] for _ in range(_DRAWS)]
        self._steps = 0

    @property
    def closes(self) -> list[tuple[SessionKey, int]]:
        """What closes them."""
        return [(key, 1) for key in self._lengths]

    @property
    def keys(self) -> list[SessionKey]:
        """Of the sessions."""
        return list(self._lengths)

    def trees(self) -> list[TreeRequest]:
        """The next step's: other tokens on the same trees."""
        self._steps += 1
        drawn = self._tokens[self._steps % _DRAWS]
        return [
            TreeRequest(key=key, epoch=1, length=length, tokens=tokens, parents=parents)
            for (key, length), tokens, parents in zip(self._lengths.items(), drawn, self._parents, strict=True)
        ]

    def take(self, results: Sequence[TreeResult]) -> int:
        """Follows what a step committed; how many of the sessions went on.

        Raises:
            RuntimeError: a session has ended by a fault.
        """
        for key, result in zip(self.keys, results, strict=True):
            if result.outcome is Outcome.ERROR:
                raise RuntimeError(f"session {key[1]}: {result.fault}")
            self._lengths[key] += len(result.token_ids)
        return sum(result.outcome is Outcome.ACCEPTED for result in results)

    def _draw(self, count: int) -> list[int]:
        return self._random.integers(0, self._vocab_size, count).tolist()


def open_with_context(worker: Worker, verifier: Verifier, point: Point, *, seed: int) -> SessionGroup:
    """Sessions whose contexts have slots with random keys and values: prefilling them would take minutes."""
    group = SessionGroup(
        count=point.sessions, context=point.context, rows=point.rows, vocab_size=worker.runner.vocab_size, seed=seed
    )
    for request in group.opens:
        verifier.open(request)
    rows = [verifier._sessions[key].row for key in group.keys]
    for begin in range(0, point.context - 1, _TURN):
        for row in rows:
            worker.runner.slots.extend(row, min(_TURN, point.context - 1 - begin))
    return group


class LaunchClock:
    """Events on the stream before and after everything that a runner enqueues for a step.

    Args:
        runner: whose launches are watched until `stop`.
    """

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.steps is not None
        self._steps, self._launch = runner.steps, runner.steps.launch
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        setattr(runner.steps, "launch", self._watched)  # noqa: B010 it is a method, for pyright

    def stop(self) -> None:
        """Leaves the runner as it was."""
        del self._steps.__dict__["launch"]

    def clear(self) -> None:
        """Forgets the launches so far."""
        self._pairs.clear()

    def step_ms(self) -> list[float]:
        """Of each launch, from its first work on the device to its last; waits for the device."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in self._pairs]

    def idle_ms(self) -> list[float]:
        """Between each launch and the next; waits for the device."""
        torch.cuda.synchronize()
        return [end.elapsed_time(begin) for (_, end), (begin, _) in itertools.pairwise(self._pairs)]

    def _watched(self, staged: Any) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launched = self._launch(staged)
        end.record()
        self._pairs.append((begin, end))
        return launched
