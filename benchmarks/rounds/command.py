"""The command line of `python benchmarks/rounds`."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.rounds import timeline
from benchmarks.rounds.drafters import ReplayDrafter, ReplayOptions
from benchmarks.rounds.driving import BenchSession, Driver, Recorder
from benchmarks.rounds.figures import figures
from benchmarks.rounds.loading import Target, clock_offset, load_target
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from outrider.drafting.growth_source import ALL_SOURCES
from outrider.models import embedded_target_path, held_out_prompts
from outrider.roles.awake import cores_awake
from outrider.roles.worker import share_interpreter
from outrider.sampling import SamplingSpec
from outrider.target_worker.config import TargetWorkerConfig

MODES = ("off", "replay", "resident")
_COLUMNS = (
    ("round, ms", "round_ms"),
    ("exposed, ms", "exposed_ms"),
    ("graft .. pack", "graft_to_pack_ms"),
    ("forward", "forward_ms"),
    ("choose, walk", "choose_walk_ms"),
    ("re-root, report", "re_root_report_ms"),
    ("growth steps", "growth_steps_ms"),
    ("idle", "idle_ms"),
)


def run(arguments: Sequence[str]) -> int:
    """Measure, print the tables and write the files; return the exit code."""
    options = _parse(arguments)
    console = Console(width=200)
    if options.draw is not None:
        timeline.draw(json.loads(options.draw.read_text(encoding="utf-8"))["timeline"]["data"], options.timeline)
        return 0
    share_interpreter()
    document = results.provenance("rounds", arguments) | {"machine": results.machine(options.device)}
    with cores_awake(options.keep_cores_awake) as settle:
        document |= Cells(options, console).measure(settle)
    if options.output is not None:
        results.write(document, options.output)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/rounds", description="Times a target's rounds in process.")
    parser.add_argument("--target", type=Path, help="checkpoint folder; default the embedded target")
    parser.add_argument("--draft", type=Path, help="resident: checkpoint folder of a drafter")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "replay"])
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of each cell that do not count")
    parser.add_argument("--measure", type=float, default=3.0, help="seconds of rounds of each cell, unless")
    parser.add_argument("--rounds", type=int, help="says how many rounds of each cell count")
    parser.add_argument("--chance", type=float, default=ReplayOptions.chance, help="replay: that a level is right")
    parser.add_argument("--depth", type=int, default=ReplayOptions.depth, help="replay: levels of a tree")
    parser.add_argument("--delay-ms", type=float, default=ReplayOptions.delay_ms, help="replay: from commit to growth")
    parser.add_argument("--kv-bytes", type=int, help="of the target; default as in a worker")
    parser.add_argument("--threads", type=int, default=1, help="of an operator on a CPU")
    parser.add_argument("--keep-cores-awake", type=int, default=0)
    parser.add_argument("--timeline", type=Path, metavar="FILE.png", help="draw rounds of the last cell")
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="draw the timeline of these results, only that")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="results")
    options = parser.parse_args(arguments)
    if options.draw is not None and options.timeline is None:
        parser.error("--draw: needs --timeline FILE.png, the picture to write")
    if ("resident" in options.modes) != (options.draft is not None):
        parser.error("--modes resident and --draft: give both or none")
    if min(options.sessions) < 1:
        parser.error(f"--sessions: {min(options.sessions)} given, at least 1 needed")
    return options


def text_of(target: Path | None) -> list[int]:
    """Return the held-out prompts, one behind the other, as token ids."""
    tokenizer = Tokenizer.from_file(str((target or embedded_target_path()) / "tokenizer.json"))
    return [token for text in held_out_prompts() for token in tokenizer.encode(text).ids]


def prompt_at(text: Sequence[int], number: int, length: int) -> list[int]:
    """Return a prompt of so many tokens, another one for each number."""
    place = random.Random(number).randrange(len(text))
    return [text[(place + offset) % len(text)] for offset in range(length)]


@dataclass(kw_only=True)
class _Cell:
    """Records of one cell, and the sessions of its last generation."""

    recorder: Recorder
    lost: int
    preemptions: int
    sessions: list[BenchSession] = field(default_factory=list)


class Cells:
    """All cells of a command, with one target.

    Args:
        options: of the command line.
        console: for tables.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._text = text_of(options.target)
        # Outputs by session, of the last generation that ran to its end.
        self._records: dict[int, list[int]] = {}

    def measure(self, settle: Any) -> dict[str, Any]:
        """Return start-up, cells and, where it is asked for, the timeline."""
        options = self._options
        sessions, length = max(options.sessions), options.prompt_tokens + options.max_new_tokens
        target = load_target(
            TargetWorkerConfig(
                model_path=options.target,
                draft_model=options.draft,
                device=options.device,
                threads=options.threads,
                max_num_seqs=sessions,
                max_model_len=length,
                kv_bytes=options.kv_bytes,
            )
        )
        self._console.print(f"start-up: {target.start_up}", markup=False, highlight=False)
        settle()
        found, cells = dict[str, Any](), list[dict[str, Any]]()
        with _without_collector():
            for count in options.sessions:
                for mode in options.modes:
                    cell = self._cell(target, mode, count)
                    own = figures(cell.recorder.rounds)
                    own |= {"lost": cell.lost, "preemptions": cell.preemptions}
                    cells.append({"mode": mode, "sessions": count, **own})
                    if options.timeline is not None:
                        found["timeline"] = self._timeline(target, cell, mode, count)
        settings = {name: _plain(value) for name, value in vars(options).items() if name != "output"}
        self._console.print(_table(cells))
        return {"settings": settings, "start_up": target.start_up, "cells": cells, **found}

    def _sessions(self, count: int, mode: str = "off") -> list[BenchSession]:
        options = self._options
        return [
            BenchSession(
                number=number,
                prompt=prompt_at(self._text, number, options.prompt_tokens),
                sampling=SamplingSpec(
                    temperature=options.temperature, seed=number, max_new_tokens=options.max_new_tokens
                ),
                sources=ALL_SOURCES if mode == "resident" else (),
            )
            for number in range(1, count + 1)
        ]

    def _drafter(self, target: Target) -> ReplayDrafter:
        options = self._options
        trees = ReplayOptions(chance=options.chance, depth=options.depth, delay_ms=options.delay_ms)
        return ReplayDrafter(self._records, trees, vocab_size=target.runner.vocab_size)

    def _cell(self, target: Target, mode: str, count: int) -> _Cell:
        """Decode generations of sessions until enough rounds count.

        Raises:
            RuntimeError: the rounds of a whole generation do not count, though it ran behind the warm-up.
        """
        options = self._options
        if mode == "replay" and not self._records.keys() >= set(range(1, count + 1)):
            self._record(target, count)
        recorder = Recorder(keeps=options.timeline is not None)
        warm = time.perf_counter() + options.warm_up
        driver = Driver(
            target.loop,
            self._drafter(target) if mode == "replay" else None,
            recorder,
            may_measure=lambda: time.perf_counter() >= warm,
        )
        earlier = target.loop.preemptions
        # Drafters replay whole outputs, and the timeline is of a whole generation.
        is_whole = mode != "replay" or options.timeline is not None
        while True:
            sessions, counted, was_warm = self._sessions(count, mode), recorder.counted, time.perf_counter() >= warm
            driver.generate(sessions, is_enough=lambda whole=is_whole: not whole and self._is_enough(recorder))
            gc.collect()
            if all(len(session.output) == options.max_new_tokens for session in sessions):
                self._records |= {session.number: session.output for session in sessions}
            is_whole = options.timeline is not None
            if self._is_enough(recorder):
                break
            if was_warm and recorder.counted == counted:
                raise RuntimeError(f"{mode}, {count} sessions: they never ran side by side; raise --max-new-tokens")
        return _Cell(
            recorder=recorder,
            lost=driver.lost,
            preemptions=target.loop.preemptions - earlier,
            sessions=sessions,
        )

    def _record(self, target: Target, count: int) -> None:
        driver, sessions = Driver(target.loop, None, Recorder(), may_measure=lambda: False), self._sessions(count)
        driver.generate(sessions, is_enough=lambda: False)
        self._records |= {session.number: session.output for session in sessions}

    def _is_enough(self, recorder: Recorder) -> bool:
        if self._options.rounds is not None:
            return recorder.counted >= self._options.rounds
        return recorder.counted_ns >= 1e9 * self._options.measure

    def _timeline(self, target: Target, cell: _Cell, mode: str, count: int) -> dict[str, Any]:
        """Draw the last generation of a cell, and check when its growth was selected."""
        options, recorder = self._options, cell.recorder
        offset_ns, off_by_ns = clock_offset(target.runner.device)
        rounds, found = timeline.follow(recorder, cell.sessions, generation=recorder.generation, offset_ns=offset_ns)
        selected, due = timeline.check(found)
        line = f"growth written 0.2 ms before a round begins is selected in it: {selected} of {due}"
        self._console.print(line, markup=False, highlight=False)
        machine = results.machine(options.device)
        title = f"{mode}, {count} sessions, {(machine.get('gpus') or [machine['processor']])[0]}"
        data = timeline.data_of(recorder, rounds, found, offset_ns=offset_ns, title=title)
        if importlib.util.find_spec("matplotlib") is None:
            self._console.print("matplotlib is not installed: draw the results elsewhere, by --draw FILE.json")
        else:
            timeline.draw(data, options.timeline)
        return {"selected": selected, "due": due, "clocks_off_by_us": off_by_ns / 1e3, "data": data}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the collector from going through the records, which stay: that would hold rounds up."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _table(cells: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="rounds: medians and 99th percentiles in ms")
    names = ("sessions", "mode", "rounds", *(name for name, _ in _COLUMNS))
    for name in (*names, "tokens/s", "tokens a round", "accepted", "selected rows"):
        table.add_column(name, justify="right")
    for cell in cells:
        times = (f"{cell[name][0]:.3f} {cell[name][1]:.3f}" for _, name in _COLUMNS)
        table.add_row(
            str(cell["sessions"]), cell["mode"], str(cell["rounds"]), *times, f"{cell['tokens_per_s']:.0f}",
            f"{cell['tokens_per_round']:.2f}", f"{cell['accepted_per_round']:.2f}", f"{cell['selected_rows']:.1f}",
        )  # fmt: skip
    return table
