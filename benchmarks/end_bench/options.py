"""The command line of benchmarks/end_to_end.py, and what follows from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.end_bench.cells import Plan, Setup
from benchmarks.end_bench.services import ServiceOptions
from benchmarks.end_bench.step_times import StepTimes

from outrider.coordinator.sessions.config import RoundTiming
from outrider.models import embedded_target_path, held_out_prompts


def prompts_of(length: int | None, target: Path | None) -> list[list[int]]:
    """Held-out prompts as token ids; where a length is asked for, each goes on with those that follow it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str((target or embedded_target_path()) / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in held_out_prompts()]
    if length is None:
        return ids
    joined = []
    for first in range(len(ids)):
        prompt: list[int] = []
        place = first
        while len(prompt) < length:
            prompt += ids[place % len(ids)]
            place += 1
        joined.append(prompt[:length])
    return joined


def service_options(
    arguments: argparse.Namespace, target: Path | None, draft: Path | None, *, coordinators: int, most_s: float
) -> ServiceOptions:
    """How the roles are started, which may take no longer than `most_s`."""
    most = max(*arguments.sessions, *arguments.rtt_sessions)
    # Each coordinator leaves a worker's last places to the others, one for each of them.
    worker_args = ["--max-num-seqs", str(most + coordinators - 1)]
    if arguments.dtype is not None:
        worker_args += ["--dtype", arguments.dtype]
    if arguments.kv_bytes is not None:
        worker_args += ["--kv-bytes", str(arguments.kv_bytes)]
    return ServiceOptions(
        target=target,
        draft=draft,
        device=arguments.device,
        gpus=arguments.gpus,
        worker_args=worker_args,
        target_args=arguments.target_args.split(),
        draft_args=arguments.draft_args.split(),
        coordinator_args=[
            *("--max-running-sessions", str(most)),
            *(["--allow-synthetic"] if arguments.synthetic else []),
            *arguments.coordinator_args.split(),
        ],
        step_times=arguments.step_times,
        start_timeout_s=min(arguments.start_timeout, most_s),
    )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The cells that the command line asks for."""
    return Plan(
        sessions=arguments.sessions,
        temperatures=arguments.temperatures,
        baselines_at=arguments.temperatures if arguments.baselines_at is None else arguments.baselines_at,
        modes=arguments.modes,
        setups=[Setup(name) for name in arguments.setups],
        round_timings=arguments.rounds,
        rtt_ms=arguments.rtt_ms,
        rtt_links=arguments.rtt_links,
        rtt_sessions=arguments.rtt_sessions,
        rules=arguments.rules,
        synthetic=tuple(arguments.synthetic),
        turns=arguments.turns,
        gpus=arguments.gpus,
    )


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/end_to_end.py", description="What speculation is worth, through the whole service."
    )
    add = parser.add_argument
    add("--sessions", type=int, nargs="+", default=[1, 16, 64, 4], help="that run at a time")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0, 0.6])
    add("--modes", nargs="+", default=["off", "async", "sync"], choices=("off", "async", "sync"))
    add(
        "--setups", nargs="*", choices=("apart", "shared", "replicas", "three targets", Setup.IMITATED.value),
        help="target and draft apart, on one and the same GPU, two targets, and one draft for three targets on four "
        "GPUs; default the first three on GPUs, apart on a CPU; without apart, shared has the off that others are "
        "compared with. An imitated target has no other setup beside it: the embedded target, its steps held on "
        "the GPU for as long as the 8B shape's take on a GPU of its own, and the draft there too. It is for comparing "
        "ways of timing rounds, and commits, and no measurement of two GPUs; it takes --draft without --target, and "
        "needs MPS, without which its steps hold the draft up",
    )  # fmt: skip
    add(
        "--step-rows-ms", nargs="+", type=_rows_ms, metavar="ROWS:MS",
        help="of the imitated target: what steps of so many rows take, lines between them; default the 8B shape on one "
        "H200, rough where more than 256 rows are prefill",
    )  # fmt: skip
    add("--step-session-us", type=float, help="of the same: microseconds more for every session")
    add(
        "--rounds", nargs="*", default=[], choices=[way for way in get_args(RoundTiming) if way != "learned"],
        help="also async with a coordinator that keeps to one way of timing them; a coordinator for each",
    )  # fmt: skip
    add("--baselines-at", type=float, nargs="*", help="temperatures of shared and replicas; default all")
    add("--rtt-ms", type=float, nargs="*", default=[], help="also with these round trips added to a link")
    add("--rtt-links", nargs="+", default=["draft"], choices=("draft", "target"), help="to which")
    add("--rtt-sessions", type=int, nargs="+", default=[1])
    add(
        "--rules", nargs="*", default=[], choices=("target_only", "rejection"), help="also with these, not only coupled"
    )
    add(
        "--synthetic", type=float, nargs="*", default=[], metavar="RATE",
        help="also with drafts accepted at these rates, one a depth, the last for all deeper ones",
    )  # fmt: skip
    add("--shapes", nargs=2, metavar=("TARGET", "DRAFT"), help="widen the embedded pair to these, such as 8b 160m")
    add("--target", type=Path, metavar="FOLDER", help="a checkpoint instead; default the embedded pair")
    add("--draft", type=Path, metavar="FOLDER")
    add("--scratch", type=Path, help="where widened checkpoints are written; default a temporary folder")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the first GPUs")
    add("--gpus", type=int, default=4, help="that there are; with 1 all workers share it, and MPS should run")
    add("--dtype", choices=("float32", "bfloat16"))
    add("--kv-bytes", type=int, help="KV memory of each worker; default the worker's own, on GPUs 16 GiB")
    add("--prompt-tokens", type=int, help="length of prompts, made of several; default as they are")
    add("--max-new-tokens", type=int, default=128)
    add("--scale-to", type=float, metavar="LENGTH", help="also tell times per token scaled to this acceptance length")
    add("--warm-up", type=float, default=2.0, help="seconds of a cell that do not count")
    add("--prepare", type=float, default=0.0, help="more of them where its workers first meet its load")
    add("--measure", type=float, default=5.0, help="seconds that do")
    add("--turns", type=int, default=1, help="how often all of it, each time compared within itself")
    add("--clients", type=int, default=4, help="processes that drive")
    add("--time-limit", type=float, help="seconds for everything: cells that find no time are left out")
    add("--start-timeout", type=float, default=300.0)
    add("--coordinator-args", default="", help="further options of the role, in one string; so the next two")
    add("--target-args", default="")
    add("--draft-args", default="")
    add("--output", type=Path, metavar="FOLDER", help="end_to_end.json, plots and the processes' logs")
    add("--plot", type=Path, metavar="FILE", help="only draw a report of before")
    options = parser.parse_args(given)
    _check(parser, options)
    on_gpu = options.device != "cpu"
    if options.setups is None:
        options.setups = ["apart", "shared", "replicas"] if on_gpu else ["apart"]
    if options.kv_bytes is None and on_gpu:
        # Several workers share a GPU: none may take what is free.
        options.kv_bytes = 16 << 30
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses what does not go together, and makes `step_times`."""
    if Setup.IMITATED in (options.setups or []):
        if len(options.setups) > 1:
            parser.error(f"--setups: {options.setups} given, {Setup.IMITATED.value!r} has no other beside it")
        if options.device == "cpu":
            parser.error(f"--setups: {Setup.IMITATED.value!r} needs --device cuda")
        if options.target is not None:
            parser.error(f"--target: {Setup.IMITATED.value!r} is the embedded target, leave it out")
    elif (options.target is None) != (options.draft is None):
        parser.error("--target and --draft: give both folders or none")
    if options.gpus < 1:
        parser.error(f"--gpus: {options.gpus} given, 1 or more needed")
    given = {"rows_ms": options.step_rows_ms, "session_us": options.step_session_us}
    try:
        options.step_times = StepTimes(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        parser.error(f"--step-rows-ms: {error}")


def _rows_ms(text: str) -> tuple[int, float]:
    rows, _, ms = text.partition(":")
    return int(rows), float(ms)
