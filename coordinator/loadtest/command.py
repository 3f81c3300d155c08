"""`outrider loadtest`: parse, run, show, write."""

import asyncio
import contextlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.command_options import config_command
from outrider.coordinator.loadtest import compare, metrics, report_html, report_json, tables
from outrider.coordinator.loadtest.client_process import Access, loop_factory
from outrider.coordinator.loadtest.options import LoadtestConfig
from outrider.coordinator.loadtest.progress import ProgressView
from outrider.coordinator.loadtest.running import Run, run_all
from outrider.roles.ports import free_port
from outrider.security.commands import TlsCa, TokenPath, client_options

FAILED, INTERRUPTED = 1, 130
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
            raise typer.Exit(INTERRUPTED)
        if not any(each.figures["completed"] for each in runs):
            raise typer.Exit(FAILED)

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
    with ProgressView(console) as view, asyncio.Runner(loop_factory=loop_factory()) as runner:
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
