"""The worker that serves at present, as `benchmarks.rounds.ttft` drives it: to be deleted with that worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.rounds.driving import INCARNATION
from benchmarks.rounds.ttft import Opening, Step, release_memory

from outrider.engine.model_runner import ModelRunner
from outrider.target_worker import tree_step
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.sessions import OpenRequest, Outcome, TreeRequest
from outrider.target_worker.step_jobs import Batch
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier

_TIMEOUT_S = 120.0


class PresentServer:
    """A step thread with a verifier; the next batch is handed in when the results of the one before are there.

    Args:
        config: of the worker.
    """

    def __init__(self, config: TargetWorkerConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self._lengths: dict[int, int] = {}
        self._thread = StepThread(self._make_verifier)
        self._thread.start()
        self._model = self._thread.ready.result().model

    def _make_verifier(self) -> Verifier:
        config = self._config
        self._runner = ModelRunner(config.engine())
        tree_step.warm_up()
        self._runner.warm_up()
        return Verifier(
            self._runner,
            max_step_tokens=config.max_step_tokens,
            max_prefill_tokens=config.prefill_tokens,
            prefill_slowdown=config.prefill_slowdown,
        )

    @property
    def max_model_len(self) -> int:
        """See `Server`."""
        return self._model.max_model_len

    def open(self, requests: Sequence[OpenRequest]) -> None:
        """See `Server`."""
        self._thread.submit(Batch(opens=requests))
        self._lengths |= {request.key[1]: len(request.prompt) for request in requests}

    def step(self, opening: Opening | None = None) -> Step:
        """See `Server`.

        Raises:
            RuntimeError: a session has failed.
        """
        step, began = Step(), time.perf_counter()
        while not step.committed:
            numbers = list(self._lengths)
            trees = [
                TreeRequest(key=(INCARNATION, number), epoch=1, length=self._lengths[number], tokens=(), parents=())
                for number in numbers
            ]
            done = self._thread.submit(Batch(trees=trees))
            if opening is not None:
                time.sleep(max(began + opening.after_s - time.perf_counter(), 0))
                step.opened_s = time.perf_counter()
                self.open([opening.request])
                opening = None
            for number, result in zip(numbers, done.result(_TIMEOUT_S).results, strict=True):
                if result.outcome is Outcome.ERROR:
                    raise RuntimeError(f"session {number}: {result.fault}")
                self._lengths[number] += len(result.token_ids)
                if result.token_ids:
                    step.committed.add(number)
        step.ended_s = time.perf_counter()
        return step

    def close(self, numbers: Sequence[int]) -> None:
        """See `Server`."""
        self._thread.submit(Batch(closes=[((INCARNATION, number), 1) for number in numbers])).result(_TIMEOUT_S)
        for number in numbers:
            del self._lengths[number]

    def stop(self) -> None:
        """See `Server`."""
        self._thread.stop()
        self._thread.stopped.result(_TIMEOUT_S)
        if self._runner is not None:
            self._runner.close()
        del self._thread, self._runner
        release_memory()
