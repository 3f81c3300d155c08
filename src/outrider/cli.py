"""The `outrider` command: every role and every tool under one name.

This is the one place besides deploy/ that knows every role; each is imported when its command runs.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import typer

from outrider import __version__
from outrider.command_options import OtlpEndpoint, config_command, keyword
from outrider.errors import InvalidRequest, OutriderError, WorkerHung
from outrider.roles.awake import cores_awake
from outrider.roles.log_output import LogFormat, log_to_stderr
from outrider.tracing import exporting

BAD_ARGUMENTS, FAILED, INTERRUPTED = 2, 1, 130
# typer brings click along in itself or as a package, by its version: this is the root of its errors in either.
_ClickException: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
# A process that was told to stop and does not is ended the hard way.
_STOP_GRACE_S = 15.0

LogLevel = Literal["debug", "info", "warning", "error"]
_ROLE_OPTIONS = [
    keyword("log_level", "info", Annotated[LogLevel, typer.Option(help="Least severity that is logged, on stderr.")]),
    keyword(
        "log_format",
        "text",
        Annotated[LogFormat, typer.Option(help="Lines for people, or a JSON object a line for programs.")],
    ),
    keyword("otlp_endpoint", None, OtlpEndpoint),
    keyword(
        "keep_cores_awake",
        0,
        Annotated[
            int,
            typer.Option(
                metavar="CORES", help="Run on so many cores once it serves, and never let them sleep: shorter rounds."
            ),
        ],
    ),
    keyword(
        "stop_with_stdin",
        False,
        Annotated[bool, typer.Option(help="Stop when stdin closes: with the process that holds it.")],
    ),
]


_COMMANDS = (
    "serve", "generate", "bench", "loadtest", "status", "top", "scale", "drain", "replace", "reload", "down", "widen",
    "certs", "token", "health", "doctor", "coordinator", "target-worker", "draft-worker",
)  # fmt: skip


def build_app(name: str | None = None) -> typer.Typer:
    """Return the command of this name alone, or all of them where none is called so.

    The options of all take half a second to import, which every start of a process would wait for.
    """
    app = typer.Typer(
        name="outrider",
        help="Serve a language model faster without changing what it says.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common_options)
    for own in (name,) if name in _COMMANDS else _COMMANDS:
        command = _command(own)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=own)
        else:
            app.command(own)(command)
    return app


def _command(name: str) -> Callable[..., None] | typer.Typer:  # noqa: PLR0912 - a branch for each command
    """Import a command's options; importing what it runs is left to it."""
    match name:
        case "serve":
            from outrider.deploy.serve_command import serve as command
        case "bench":
            from outrider.deploy.bench_command import bench as command
        case "generate":
            from outrider.coordinator.commands.client import generate_command

            command = generate_command(local_endpoint)
        case "loadtest":
            from outrider.coordinator.loadtest.command import loadtest_command

            command = loadtest_command(local_endpoint)
        case "top":
            from outrider.coordinator.commands.top import top as command
        case "status" | "scale" | "drain" | "replace" | "down":
            from outrider.deploy import cluster_commands

            command = getattr(cluster_commands, name)
        case "reload":
            from outrider.deploy.reload_command import reload as command
        case "widen":
            from outrider.models.commands import widen as command
        case "certs":
            from outrider.security.commands import certs as command
        case "token":
            from outrider.security.commands import token_commands

            command = token_commands()
        case "health":
            from outrider.roles.health_command import health as command
        case "doctor":
            from outrider.doctor import doctor as command
        case "coordinator":
            from outrider.coordinator.sessions.config import CoordinatorConfig

            command = _role(CoordinatorConfig, "coordinator", "The public door and the scheduler")
        case "target-worker":
            from outrider.target_worker.config import TargetWorkerConfig

            command = _role(TargetWorkerConfig, "target_worker", "Verifies trees with the target model")
        case "draft-worker":
            from outrider.draft_worker.config import DraftWorkerConfig

            command = _role(DraftWorkerConfig, "draft_worker", "Grows trees with the draft model")
        case _:
            raise AssertionError(name)
    return command


def _print_version(given: bool) -> None:
    if given:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


def _common_options(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: errors are one line on stderr, 2 for wrong arguments, 1 for the rest."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    try:
        app = build_app(next(iter(arguments), None))
        outcome = app(list(arguments) or ["--help"], prog_name="outrider", standalone_mode=False)
    except _ClickException as error:
        # Its plain str() leaves out which option is meant.
        return _fail(_one_line(getattr(error, "format_message")()), getattr(error, "exit_code"))  # noqa: B009
    except InvalidRequest as error:
        return _fail(_one_line(str(error)), BAD_ARGUMENTS)
    except WorkerHung as error:
        # The thread that hangs would hold up an orderly end.
        _fail(_one_line(str(error)), FAILED)
        os._exit(FAILED)
    except BrokenPipeError:
        # The reader of our stdout has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OutriderError, OSError, TimeoutError) as error:
        return _fail(_one_line(str(error)), FAILED)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return outcome if isinstance(outcome, int) else 0


def _fail(message: str, code: int) -> int:
    typer.echo(f"error: {message}", err=True)
    return code


def _one_line(message: str) -> str:
    return " ".join(message.split())


@contextlib.contextmanager
def local_endpoint(drafts: int, coordinator_args: Sequence[str] = ()) -> Iterator[str]:
    """The endpoint of a service of child processes, which end with the block."""
    from outrider.local import LocalService

    with LocalService(drafts=drafts, coordinator_args=coordinator_args) as service:
        yield service.endpoint


# ---------------------------------------------------------------------------------------------------------------- roles


def _role(config_type: type, folder: str, what: str) -> Callable[..., None]:
    def run_role(
        config: Any,
        *,
        log_level: LogLevel,
        log_format: LogFormat,
        otlp_endpoint: str | None,
        keep_cores_awake: int,
        stop_with_stdin: bool,
    ) -> None:
        role, loop_factory = folder.removesuffix("_worker"), None
        if sys.platform != "win32":
            from uvloop import new_event_loop as loop_factory
        log_to_stderr(log_level, log_format, role=role)
        with (
            exporting(role, otlp_endpoint),
            cores_awake(keep_cores_awake) as settle,
            asyncio.Runner(loop_factory=loop_factory) as runner,
        ):
            runner.run(_serve_until_stopped(folder, config, settle, stop_with_stdin=stop_with_stdin))

    run_role.__doc__ = f"{what}, as a plain process; prints `ready HOST:PORT` when it serves."
    return config_command(config_type, run_role, more=_ROLE_OPTIONS)


async def _serve_until_stopped(folder: str, config: Any, settle: Callable[[], None], *, stop_with_stdin: bool) -> None:
    import grpc.aio

    def ready(address: str) -> None:
        settle()
        typer.echo(f"ready {address}")

    # Otherwise grpc.aio waits, with the last channel that is closed, for operations that may never come to their end.
    grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if stop_with_stdin:
        threading.Thread(target=_watch_stdin, args=(loop, stop), daemon=True).start()
    # What takes long to import comes once this process can be told to stop.
    await importlib.import_module(f"outrider.{folder}.server").serve(config, ready=ready, stop=stop)
    for number in (signal.SIGINT, signal.SIGTERM):
        # What it was told has been done: being told again while the interpreter ends is no reason to die of it.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    time.sleep(_STOP_GRACE_S)
    os._exit(FAILED)


if __name__ == "__main__":
    main()
