"""The `top` command: what coordinators and their workers do right now, in a terminal.

    GetServerInfo, again and again ──> two looks make rates ──> one frame

A coordinator that does not answer, or that has begun anew, is shown as such and asked again.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from outrider.client import AsyncClient
from outrider.coordinator.commands.client import DEFAULT_ENDPOINT, checked_endpoint
from outrider.coordinator.commands.top_frame import frame_of
from outrider.coordinator.commands.top_sample import Figures, Look, as_dict, figures
from outrider.errors import OutriderError
from outrider.security.commands import TlsCa, TokenPath, client_options

_NARROWEST = 80
# A coordinator that is frozen is not waited for longer than that.
_ANSWER_S = 2.0

Show = Callable[[Sequence[Figures]], None]


def top(
    *,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", envvar="OUTRIDER_ENDPOINT", help="Coordinator address; repeatable."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, out of two looks, and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a frame instead of tables.")] = False,
    tls_ca: TlsCa = None,
    token: TokenPath = None,
) -> None:
    """Watch coordinators and their workers: load, step times, acceptance, queues. q ends it."""
    given = [part for each in endpoint or [DEFAULT_ENDPOINT] for part in each.split(",") if part]
    endpoints = list(map(checked_endpoint, given))
    is_printed = once or json_output or not sys.stdout.isatty()
    shown = contextlib.nullcontext(_printing(json_output=json_output)) if is_printed else _screen()
    asyncio.run(watch(endpoints, shown, interval_s=interval, once=once, **client_options(tls_ca, token)))


async def watch(
    endpoints: Sequence[str],
    shown: contextlib.AbstractContextManager[Show],
    *,
    interval_s: float,
    once: bool = False,
    **options: Any,
) -> None:
    """Look and show until q, Ctrl-C or SIGTERM.

    Args:
        once: end after the first frame, which takes two looks.

    Raises:
        OutriderError: with `once`, where nobody answers.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(endpoint, **options)) for endpoint in endpoints]
        ended = stack.enter_context(_end_of_watching())
        show = stack.enter_context(shown)
        answered: dict[str, Look] = {}
        is_first = True
        while not ended.is_set():
            looks = await asyncio.gather(*map(_look, clients))
            frame = [figures(answered.get(look.endpoint), look) for look in looks]
            answered |= {look.endpoint: look for look in looks if look.info is not None}
            if once and not answered:
                raise OutriderError(f"nobody answers: {looks[0].problem}")
            if not (once and is_first):
                show(frame)
                if once:
                    return
            is_first = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), interval_s)


async def _look(client: AsyncClient) -> Look:
    try:
        info = await asyncio.wait_for(client.server_info(), _ANSWER_S)
    except (OutriderError, TimeoutError) as error:
        problem = str(error) or "it does not answer"
        return Look(endpoint=client.endpoint, at_s=time.monotonic(), problem=problem)
    return Look(endpoint=client.endpoint, at_s=time.monotonic(), info=info)


@contextlib.contextmanager
def _end_of_watching() -> Iterator[asyncio.Event]:
    """Yield an event that q, Ctrl-C and SIGTERM set; restore the terminal afterwards."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        if not sys.stdin.isatty():
            yield ended
            return
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)

        def read_key() -> None:
            if os.read(descriptor, 1) in {b"q", b"Q", b""}:
                ended.set()

        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read_key)
        try:
            yield ended
        finally:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _screen() -> Iterator[Show]:
    """The whole terminal, drawn anew at every frame."""
    with Live(screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame_of(frame, note=_note(frame) or "q ends it"), refresh=True)


def _printing(*, json_output: bool) -> Show:
    """Frames one after the other, for pipes."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)

    def show(frame: Sequence[Figures]) -> None:
        if json_output:
            typer.echo(json.dumps(as_dict(frame)))
        else:
            console.print(frame_of(frame, note=_note(frame)))
        sys.stdout.flush()

    return show


def _note(frame: Sequence[Figures]) -> str:
    problems = [f"{each.endpoint}: {' '.join(each.problem.split())}" for each in frame if each.problem]
    restarts = [f"{each.endpoint} has been restarted" for each in frame if each.is_restarted]
    return "; ".join([*problems, *restarts])
