"""Prompts that arrive beside running sessions: time to the first token, and how long the others wait meanwhile."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rounds.driving import INCARNATION
from benchmarks.rounds.loading import load_target, target_config
from rich.console import Console
from rich.table import Table

from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.sessions.requests import OpenRequest

# Steps from which the usual one is known, and those behind a first token and before the next arrival.
_USUAL_STEPS, _STEPS_BEHIND, _STEPS_BETWEEN = 40, 3, 8
# Arrivals of each length by which a target learns what prefill costs.
_WARM_UPS = 3
# Tokens that an arrived session may have; it is closed at its first.
_ARRIVED_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class TtftOptions:
    """Prompts that arrive, and the sessions that run beside them.

    Attributes:
        folder: checkpoint of the target; None: the embedded one.
        device: of the target.
        running: sessions that run.
        prompt_tokens: of each of them.
        arriving: tokens of the prompts that arrive; longer ones than the model takes are cut.
        arrivals: of each length.
        temperature: of all sessions.
        kv_bytes: of the target.
        threads: of an operator on a CPU.
        text: tokens of which prompts are made.
    """

    folder: Path | None
    device: str
    running: int
    prompt_tokens: int
    arriving: Sequence[int]
    arrivals: int
    temperature: float
    kv_bytes: int | None
    threads: int
    text: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A session to open, so many seconds after a step has begun."""

    request: OpenRequest
    after_s: float = 0.0


@dataclass(kw_only=True)
class Step:
    """Outcome of a step.

    Attributes:
        ended_s: when its results came, by `time.perf_counter`.
        committed: sessions that have got tokens.
        opened_s: when a session was opened in it.
    """

    ended_s: float = 0.0
    committed: set[int] = field(default_factory=set)
    opened_s: float = 0.0


class Server:
    """A target with sessions, whose rounds this thread drives.

    Args:
        config: of the worker.
    """

    def __init__(self, config: TargetWorkerConfig) -> None:
        target = load_target(config)
        self._runner, self._loop = target.runner, target.loop

    @property
    def max_model_len(self) -> int:
        """Most tokens of a session."""
        return self._runner.info.max_model_len

    def open(self, requests: Sequence[OpenRequest]) -> None:
        """Open sessions."""
        for request in requests:
            self._loop.open(request)

    def step(self, opening: Opening | None = None) -> Step:
        """Go on until sessions have got tokens; those of the opening may still have none.

        Raises:
            RuntimeError: a session has failed.
        """
        step, began = Step(), time.perf_counter()
        while True:
            if opening is not None and time.perf_counter() >= began + opening.after_s:
                step.opened_s = time.perf_counter()
                self.open([opening.request])
                opening = None
            results = self._loop.turn()
            for result in results:
                if result.fault is not None:
                    raise RuntimeError(f"session {result.key[1]}: {result.fault}")
                if result.tokens:
                    step.committed.add(result.key[1])
            if step.committed and opening is None:
                step.ended_s = time.perf_counter()
                return step
            if not results:
                time.sleep(0)

    def close(self, numbers: Sequence[int]) -> None:
        """Close sessions."""
        for number in numbers:
            self._loop.close((INCARNATION, number), 1)

    def stop(self) -> None:
        """End what is under way, and the processes that share the model."""
        while self._loop.has_work:
            self._loop.turn()
        self._runner.close()


def measure(options: TtftOptions, console: Console, settle: Callable[[], None]) -> dict[str, Any]:
    """Return settings and figures; see `measure_server`."""
    server = Server(_config(options))
    # Threads that begin later are on the same cores.
    settle()
    try:
        found = measure_server(server, options)
    finally:
        server.stop()
    console.print(_table(found, options))
    settings = {name: value for name, value in asdict(options).items() if name not in {"folder", "text"}}
    return {"settings": settings, **found}


def _config(options: TtftOptions) -> TargetWorkerConfig:
    return target_config(
        options.folder,
        options.device,
        sessions=options.running + 1,
        max_model_len=None,
        kv_bytes=options.kv_bytes,
        threads=options.threads,
    )


class _Arrivals:
    """Running sessions, and those that arrive."""

    def __init__(self, server: Server, options: TtftOptions) -> None:
        self._server, self._options = server, options
        self._chance, self._number = random.Random(0), options.running
        self._running = range(1, options.running + 1)
        # When each running session last got tokens.
        self._last: dict[int, float] = {}

    def begin(self) -> float:
        """Open the running sessions; returns the median time of a step of theirs."""
        options, longest = self._options, self._server.max_model_len
        room = longest - options.prompt_tokens
        self._server.open([self._request(number, options.prompt_tokens, room) for number in self._running])
        missing = set(self._running)
        while missing:
            step = self._server.step()
            missing -= step.committed
            self._note(step)
        gaps = [gap for _ in range(_USUAL_STEPS) if (gap := self._note(self._server.step()))]
        return statistics.median(gaps)

    def arrive(self, length: int, usual_s: float) -> tuple[float, float]:
        """Have a prompt arrive in the middle of a step.

        Returns:
            Seconds to its first token, and the longest time that a running session meanwhile waited for a token.
        """
        self._number += 1
        request = self._request(self._number, length, _ARRIVED_TOKENS)
        step = self._server.step(Opening(request=request, after_s=self._chance.random() * usual_s))
        opened, longest = step.opened_s, self._note(step)
        while self._number not in step.committed:
            step = self._server.step()
            longest = max(longest, self._note(step))
        waited = step.ended_s - opened
        self._server.close([self._number])
        for _ in range(_STEPS_BEHIND):
            longest = max(longest, self._note(self._server.step()))
        for _ in range(_STEPS_BETWEEN):
            self._note(self._server.step())
        return waited, longest

    def end(self) -> None:
        """Close the running sessions."""
        self._server.close(self._running)

    def _request(self, number: int, length: int, new_tokens: int) -> OpenRequest:
        text, place = self._options.text, random.Random(number).randrange(len(self._options.text))
        prompt = [text[(place + offset) % len(text)] for offset in range(length)]
        sampling = SamplingSpec(temperature=self._options.temperature, seed=number, max_new_tokens=new_tokens)
        return OpenRequest(key=(INCARNATION, number), epoch=1, prompt=prompt, output=(), sampling=sampling)

    def _note(self, step: Step) -> float:
        """Return the longest time that a running session has waited for the tokens of this step."""
        running = [number for number in step.committed if number in self._running]
        longest = max((step.ended_s - self._last[n] for n in running if n in self._last), default=0.0)
        self._last |= dict.fromkeys(running, step.ended_s)
        return longest


def measure_server(server: Server, options: TtftOptions) -> dict[str, Any]:
    """Return the figures.

    Returns:
        round_ms: median time from tokens to tokens of running sessions, with nothing beside them.
        lengths: by tokens of the prompt, medians and largest of `ttft_ms`, and of `gap_rounds`, the longest wait of a
            running session in units of `round_ms`.
    """
    arrivals, longest = _Arrivals(server, options), server.max_model_len - _ARRIVED_TOKENS
    usual_s = arrivals.begin()
    found = defaultdict[int, list[tuple[float, float]]](list)
    for length in dict.fromkeys(min(length, longest) for length in options.arriving):
        for number in range(_WARM_UPS + options.arrivals):
            measured = arrivals.arrive(length, usual_s)
            if number >= _WARM_UPS:
                found[length].append(measured)
    arrivals.end()
    lengths = {
        str(length): {
            "ttft_ms": _median_and_largest([1e3 * waited for waited, _ in measured]),
            "gap_rounds": _median_and_largest([gap / usual_s for _, gap in measured]),
        }
        for length, measured in found.items()
    }
    return {"round_ms": round(1e3 * usual_s, 4), "lengths": lengths}


def _median_and_largest(values: Sequence[float]) -> list[float]:
    return [round(statistics.median(values), 4), round(max(values), 4)]


def _table(found: dict[str, Any], options: TtftOptions) -> Table:
    table = Table(title=f"prompts that arrive beside {options.running} sessions: medians and largest")
    for name in ("prompt", "round, ms", "TTFT, ms", "longest wait of the others, rounds"):
        table.add_column(name, justify="right")
    for length, row in found["lengths"].items():
        times = (f"{row[column][0]:.2f} {row[column][1]:.2f}" for column in ("ttft_ms", "gap_rounds"))
        table.add_row(length, f"{found['round_ms']:.2f}", *times)
    return table
