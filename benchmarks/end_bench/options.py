"""The command line of benchmarks/end_to_end.py, and what follows from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from benchmarks.end_bench.arrivals import Arrivals
from benchmarks.end_bench.cells import Cell, Plan, Setup
from benchmarks.end_bench.services import ServiceOptions

# Until every worker has loaded its checkpoint and captured its graphs.
_START_TIMEOUT_S = 300.0


def service_options(arguments: argparse.Namespace, *, setups: int, most_s: float) -> ServiceOptions:
    """Return the options that the roles of all setups are started with, which may take no longer than `most_s`."""
    # One more where prompts arrive beside the others.
    most = max(arguments.sessions) + bool(arguments.arriving)
    # Each coordinator leaves a worker's last places to the others, one for each of them.
    worker_args = ["--max-num-seqs", str(most + setups * max(arguments.coordinators) - 1)]
    if arguments.kv_bytes is not None:
        worker_args += ["--kv-bytes", str(arguments.kv_bytes)]
    return ServiceOptions(
        target=arguments.target,
        draft=arguments.draft,
        device=arguments.device,
        target_gpus=arguments.target_gpus,
        gpus=arguments.gpus,
        coordinators=max(arguments.coordinators),
        through_proxies=bool(arguments.round_trips),
        worker_args=worker_args,
        target_args=arguments.target_args.split(),
        draft_args=arguments.draft_args.split(),
        coordinator_args=[
            *("--max-running-sessions", str(most)),
            *(["--allow-synthetic"] if arguments.synthetic else []),
            *arguments.coordinator_args.split(),
        ],
        start_timeout_s=min(_START_TIMEOUT_S, most_s),
    )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The cells that the command line asks for."""
    return Plan(
        sessions=arguments.sessions,
        temperatures=arguments.temperatures,
        baselines_at=arguments.temperatures if arguments.baselines_at is None else arguments.baselines_at,
        modes=arguments.modes,
        setups=[Setup.named(name) for name in arguments.setups],
        synthetic=tuple(arguments.synthetic),
        only_synthetic=arguments.only_synthetic,
        round_trips=arguments.round_trips,
        coordinators=arguments.coordinators,
        target_gpus=arguments.target_gpus,
        gpus=arguments.gpus,
    )


def arrivals_of(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[Arrivals]:
    """Return what `--arriving` asks for: in every setup and mode that occurs."""
    setups_and_modes = dict.fromkeys((cell.setup, cell.mode) for cell in cells)
    return [
        Arrivals(
            setup=setup,
            mode=cast("Literal['async', 'sync', 'off']", mode),
            temperature=arguments.temperatures[0],
            running=max(arguments.sessions),
            prompt_tokens=tokens,
            count=arguments.arrivals,
        )
        for tokens in arguments.arriving
        for setup, mode in setups_and_modes
    ]


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
        "--setups", nargs="+", metavar="SETUP",
        help="numbers of drafts and targets, each on a GPU of its own, such as 1+3; shared: a target and a draft "
        "on one GPU; resident: a target that grows drafts itself; 4xresident: four of them. The first with one target "
        "has the off that others are compared with. Default 1+1 shared 0+2 on GPUs, 1+1 on a CPU",
    )  # fmt: skip
    add("--baselines-at", type=float, nargs="*", help="temperatures of the other setups; default all")
    add(
        "--synthetic", type=float, nargs="*", default=[], metavar="RATE",
        help="also with drafts accepted at these rates, one a depth, the last for all deeper ones",
    )  # fmt: skip
    add(
        "--only-synthetic", action="store_true",
        help="no other drafts, from which the service would learn what the models agree on",
    )  # fmt: skip
    add(
        "--round-trips", type=float, nargs="*", default=[], metavar="MS",
        help="also with so much longer round trips between coordinator and drafts, and between coordinator and "
        "targets; all workers are behind proxies then, in every cell",
    )  # fmt: skip
    add(
        "--arriving", type=int, nargs="*", default=[], metavar="TOKENS",
        help="also how long prompts of so many tokens wait for their first token beside the most sessions, and these "
        "for their next: in every mode, at the first temperature",
    )  # fmt: skip
    add("--arrivals", type=int, default=8, help="prompts of each length with --arriving")
    add("--target", type=Path, metavar="FOLDER", help="a checkpoint; default the embedded pair")
    add("--draft", type=Path, metavar="FOLDER")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: the first GPUs")
    add("--target-gpus", type=int, default=1, help="of each target, which are tensor-parallel then")
    add("--coordinators", type=int, nargs="+", default=[1], help="every cell is measured with each number of them")
    add("--gpus", type=int, default=4, help="that there are; with 1 all workers share it, and MPS should run")
    add("--kv-bytes", type=int, help="KV memory of each worker; default the worker's own, on GPUs 16 GiB")
    add(
        "--prompts", type=Path, metavar="FILE",
        help="conversations, as `outrider bench` reads them: answers end where the model ends them, and the figures of "
        "each category are told",
    )  # fmt: skip
    add("--prompt-tokens", type=int, help="without --prompts: length of prompts, made of several; default as they are")
    add(
        "--prompt-count", type=int, metavar="COUNT",
        help="without --prompts: so many, which sessions repeat and find in the prefix cache: else requests that begin "
        "meanwhile are prefilled; default all 96",
    )  # fmt: skip
    add("--max-new-tokens", type=int, default=128)
    add("--scale-to", type=float, metavar="LENGTH", help="also tell times per token scaled to this acceptance length")
    add("--warm-up", type=float, default=2.0, help="seconds of a cell that do not count")
    add("--prepare", type=float, default=0.0, help="more of them where its workers first meet its load")
    add("--measure", type=float, default=5.0, help="seconds that do")
    add("--clients", type=int, default=4, help="processes that drive")
    add("--time-limit", type=float, help="seconds for everything: cells that find no time are left out")
    add("--coordinator-args", default="", help="further options of the role, in one string; so the next two")
    add("--target-args", default="")
    add("--draft-args", default="")
    add("--output", type=Path, metavar="FOLDER", help="end_to_end.json and the processes' logs")
    options = parser.parse_args(given)
    on_gpu = options.device != "cpu"
    if options.setups is None:
        options.setups = ["1+1", "shared", "0+2"] if on_gpu else ["1+1"]
    _check(parser, options)
    if options.kv_bytes is None and on_gpu:
        # Several workers share a GPU: none may take what is free.
        options.kv_bytes = 16 << 30
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft: give both folders or none")
    if options.prompts is not None and options.target is None:
        parser.error("--prompts: not with the embedded pair, which has no chat template")
    if options.only_synthetic and not options.synthetic:
        parser.error("--only-synthetic: --synthetic needed, too")
    for name in ("arrivals", "gpus", "target_gpus", "prompt_count"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name.replace('_', '-')}: {given} given, 1 or more needed")
    if min(options.coordinators) < 1:
        parser.error(f"--coordinators: {min(options.coordinators)} given, 1 or more needed")
    try:
        most = max(setup.targets for setup in plan_of(options).setups)
    except ValueError as error:
        parser.error(f"--setups: {error}")
    if options.target_gpus > 1 and options.target_gpus * most > options.gpus:
        parser.error(f"--target-gpus: {options.target_gpus} for each of {most} targets, there are {options.gpus}")
