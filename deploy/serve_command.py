"""`outrider serve`: a model behind gRPC and OpenAI's API.

Ray and PyTorch are imported once everything that can be checked without them has been.
"""

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.command_options import config_command, keyword
from outrider.deploy.config import DeployConfig
from outrider.deploy.config_file import as_in_file, read_fields
from outrider.deploy.plan import make_plan
from outrider.deploy.ray_token import prefer_token
from outrider.roles.forked_process import wake_stand_by
from outrider.roles.standby_start import OWNER_VARIABLE

INTERRUPTED = 130
# That each role gets after Ctrl-C, and after which nothing is waited for any more.
_HURRY_S, _PATIENCE_S, _KILL_S = 0.8, 3.8, 0.5
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02

_OPTIONS = [
    keyword(
        "detach",
        False,
        Annotated[
            bool, typer.Option("--detach", help="Leave the service running on the cluster; `outrider down` ends it.")
        ],
    ),
    keyword(
        "dry_run", False, Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan and end.")]
    ),
]


def _serve(config: DeployConfig, *, detach: bool, dry_run: bool) -> None:
    """Serve a model on Ray until Ctrl-C or SIGTERM; prints `ready HOST:PORT` when it takes requests."""
    if detach and config.address == "local":
        raise typer.BadParameter("--detach needs a running cluster (--address): a Ray started here ends with `serve`")
    began = time.monotonic()
    try:
        plan = make_plan(config)
        for line in plan.lines:
            _say(line)
        for model in plan.missing:
            _say(f"to {model.missing}")
        if dry_run:
            return
        if plan.missing:
            plan = plan.completed()
            for line in plan.lines:
                _say(line)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    prefer_token(config.address)
    if sys.platform == "linux":
        # Become the parent of descendants whose own parent ends, so that `_end_descendants` finds them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _run(lambda told: _bring_up(plan.config, told, detach=detach, began=began))


serve = config_command(DeployConfig, _serve, more=_OPTIONS, read_file=read_fields, as_in_file=as_in_file)


def _say(line: str) -> None:
    typer.echo(line, err=True)


async def _bring_up(config: DeployConfig, told: list[int], *, detach: bool, began: float) -> None:
    """Serve until this is cancelled; `told` has the signals by then."""
    _say("starting Ray" if config.address == "local" else f"joining Ray at {config.address}")
    if config.address == "local" and config.forks_workers:
        # Its imports take as long as all that Ray does before it asks for the first worker.
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        wake_stand_by(os.environ)
    cluster = await asyncio.to_thread(importlib.import_module, "outrider.deploy.cluster")
    deployment = cluster.Deployment(config, detach=detach, tell=_say)
    # Told to stop by Ctrl-C it may be at any time, also while it starts.
    deployment.hurry_s = lambda: _HURRY_S if signal.SIGINT in told else None
    async with deployment:
        if deployment.was_running:
            _say(f"a deployment called {config.name} runs already, and is left as it is")
        scheme = "http" if config.certs is None else "https"
        for door in deployment.http_endpoints:
            _say(f"OpenAI's API at {scheme}://{door}/v1")
            if config.live_page:
                _say(f"the live page at {scheme}://{door}/live")
        _say(f"ready in {time.monotonic() - began:.1f} s")
        typer.echo(f"ready {deployment.endpoint}")
        if not detach:
            await deployment.ended()
            _say("the deployment was ended by another command")


def _run(main: Callable[[list[int]], Coroutine[Any, Any, None]]) -> None:
    """Run `main` until it is done or SIGTERM cancels it; typer.Abort where Ctrl-C has."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    told: list[int] = []
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_cancelled_by_signals(main(told), told))
    if signal.SIGINT in told:
        raise typer.Abort


async def _cancelled_by_signals(main: Coroutine[Any, Any, None], told: list[int]) -> None:
    task = asyncio.ensure_future(main)

    def on_signal(number: int) -> None:
        if number == signal.SIGINT and signal.SIGINT not in told:
            _say("stopping")
            # A thread, as Ray may hold up this loop, and what is imported in another thread its end.
            end = threading.Timer(_PATIENCE_S, _end_at_once)
            end.daemon = True
            end.start()
        told.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    await task


def _end_at_once() -> None:
    _end_descendants(_KILL_S)
    os._exit(INTERRUPTED)


def _kill_descendants() -> None:
    """Kill them all, as far as the system tells of them (Linux); elsewhere Ray's own watch over its parent does."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # One that has ended meanwhile is gone.
        with contextlib.suppress(OSError):
            rest = (folder / "stat").read_text().rpartition(")")[2]
            children.setdefault(int(rest.split()[1]), []).append(int(folder.name))
    left = children.get(os.getpid(), [])
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _end_descendants(timeout_s: float) -> None:
    """Kill all descendants until none is left, or for a time, and collect what they leave behind."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        _kill_descendants()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)
