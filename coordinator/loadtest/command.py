"""`outrider loadtest`: parse, run, show, write."""

import asyncio
import contextlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.command_options import config_command
from outrider.coordinator.loadtest import compare, metrics, report_html, report_json, tables
from outrider.coordinator.loadtest.client_process import Access, Watch, loop_factory
from outrider.coordinator.loadtest.driving import BEGUN, COUNTERS, ENDED, FAILED, FIRST_TOKENS, TOKENS, TTFT_US
from outrider.coordinator.loadtest.options import LoadtestConfig, Point
from outrider.coordinator.loadtest.running import Run, run_all
from outrider.roles.ports import free_port
from outrider.security.commands import TlsCa, TokenPath, client_options

_NOTHING_COMPLETED, _INTERRUPTED = 1, 130
# Between two looks at a run that is under way.
_LOOK_S = 0.2
_LONG_QUEUE = 1 << 20
OpenLocal = Callable[[int, Sequence[str]], AbstractContextManager[str]]
_MORE_SLOS = Annotated[
    list[str] | None, typer.Argument(metavar="[SLO]...", help="Further objectives of --goodput, such as tpot:50.")
]


def loadtest_command(open_local: OpenLocal) -> Callable[..., None]:
    """The command.

    Args:
        open_local: starts a service of its own with so many drafts and further options of its coordinator, for
            `--local`; gives its endpoint.
    """

    def loadtest(
        config: LoadtestConfig,
        *,
        more_slos: list[str] | None,
        compare_files: tuple[Path, Path] | None,
        tls_ca: Path | None,
        token: Path | None,
    ) -> None:
        """Send requests to a service as its users would, and tell how it bore them.

        Arrivals do not wait for answers (an open loop), and latencies count from the time at which a request was to be
        sent: docs/loadtest.md.
        """
        console = Console(highlight=False)
        if compare_files is not None:
            for table in compare.compare(*compare_files):
                console.print(table)
            return
        config = _with_slos(config, more_slos or [])
        access = Access(tls_ca=tls_ca, token=client_options(None, token)["token"])
        with local_door(config, open_local) if config.local else contextlib.nullcontext(config.endpoint) as door:
            runs = run(replace(config, endpoint=door), access, console=console)
        show(runs, console)
        for path in write(config, runs):
            console.print(f"wrote {path}")
        if runs[-1].is_interrupted:
            console.print("interrupted: the figures are of what had ended by then")
            raise typer.Exit(_INTERRUPTED)
        if not any(each.figures["completed"] for each in runs):
            raise typer.Exit(_NOTHING_COMPLETED)

    return config_command(LoadtestConfig, loadtest, more=_MORE)


_MORE = [
    inspect.Parameter("more_slos", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_MORE_SLOS),
    inspect.Parameter(
        "compare_files",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            tuple[Path, Path],
            typer.Option(
                "--compare", metavar="A.json B.json", help="Print two files of figures side by side, and run nothing."
            ),
        ],
    ),
    inspect.Parameter("tls_ca", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TlsCa),
    inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TokenPath),
]


def run(config: LoadtestConfig, access: Access, *, console: Console) -> list[Run]:
    """Run all points of the load test, with a progress bar.

    Raises:
        LoadtestFailed: the service is not there.
        InvalidRequest: a data set cannot be read.
    """
    with _ProgressView(console) as view, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_all(config, access, begin=view.begin, on_run=lambda runs: keep(config, runs)))


def keep(config: LoadtestConfig, runs: Sequence[Run]) -> None:
    """Write the figures so far, if a file of them is asked for: they outlive a later run that fails."""
    if config.output_json is not None:
        report_json.write(config.output_json, runs, is_detailed=config.save_detailed)


def show(runs: Sequence[Run], console: Console) -> None:
    """Tables, and a warning where the client was too slow."""
    for each in runs:
        for table in tables.run_tables(each.figures):
            console.print(table)
        if warning := tables.client_warning(each.figures):
            console.print(f"[bold red]warning:[/] {warning}")
    if len(runs) > 1:
        console.print(tables.runs_table([each.figures for each in runs]))


def write(config: LoadtestConfig, runs: Sequence[Run]) -> list[Path]:
    """The files that are asked for.

    Raises:
        OSError: a file cannot be written.
    """
    keep(config, runs)
    written = [] if config.output_json is None else [config.output_json]
    if config.html is not None:
        report_html.write(config.html, runs, command=shlex.join(["outrider", *sys.argv[1:]]))
        written.append(config.html)
    return written


@contextlib.contextmanager
def local_door(config: LoadtestConfig, open_local: OpenLocal) -> Iterator[str]:
    """A service of its own, at the door of the protocol that is asked for; requests wait there, none is refused."""
    more = ["--max-queue", str(_LONG_QUEUE)]
    if config.protocol == "grpc":
        with open_local(config.drafts, more) as endpoint:
            yield endpoint
    else:
        port = free_port()
        with open_local(config.drafts, [*more, "--http-port", str(port)]):
            yield f"127.0.0.1:{port}"


def _with_slos(config: LoadtestConfig, more: Sequence[str]) -> LoadtestConfig:
    try:
        metrics.parse_slos(config.goodput)
        if more and not config.goodput:
            raise ValueError(f"{' '.join(more)!r} given: an unknown argument (objectives follow --goodput)")
        merged = replace(config, goodput=(*config.goodput, *more))
        metrics.parse_slos(merged.goodput)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return merged


class _ProgressView:
    """One bar a run; use with `with`."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )

    def __enter__(self) -> "_ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, point: Point, total: int | None) -> Watch:
        """A bar for a run of so many requests."""
        task = self._progress.add_task(point.label, total=total, now="")

        async def watch(counters: Sequence[MutableSequence[int]]) -> None:
            before = [0] * COUNTERS
            while True:
                now = _totals(counters)
                self._progress.update(task, completed=now[ENDED], now=_describe(now, before))
                before = now
                try:
                    await asyncio.sleep(_LOOK_S)
                except asyncio.CancelledError:
                    ended = _totals(counters)[ENDED]
                    self._progress.update(task, completed=ended, total=ended, now="")
                    raise

        return watch


def _totals(counters: Sequence[MutableSequence[int]]) -> list[int]:
    """Over all processes."""
    return [sum(each[place] for each in counters) for place in range(COUNTERS)]


def _describe(now: Sequence[int], before: Sequence[int]) -> str:
    """Return a line on running requests and on those that ended since the last one."""
    tokens_per_s = (now[TOKENS] - before[TOKENS]) / _LOOK_S
    parts = [f"{now[BEGUN] - now[ENDED]} under way", f"{tokens_per_s:,.0f} tokens/s of those that ended"]
    if now[FIRST_TOKENS]:
        parts.append(f"TTFT {now[TTFT_US] / now[FIRST_TOKENS] / 1e3:.0f} ms")
    if now[FAILED]:
        parts.append(f"[red]{now[FAILED]} failed[/]")
    return ", ".join(parts)
