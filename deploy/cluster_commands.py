"""`outrider status`, `scale`, `drain`, `replace` and `down`: questions and orders to a deployment's controller."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.command_options import is_given
from outrider.coordinator.commands.client import DEFAULT_ENDPOINT, Endpoint, server_status
from outrider.deploy.local_note import local_address
from outrider.deploy.ray_token import prefer_token
from outrider.errors import OutriderError, WorkerUnavailable
from outrider.security.commands import TlsCa, TokenPath, client_options

POLL_INTERVAL_S = 0.5
# A controller that is being started anew answers in some seconds; one that no machine has room for, never.
STATUS_TIMEOUT_S = 30.0

Address = Annotated[
    str,
    typer.Option(
        metavar="auto|HOST:PORT|ray://HOST:PORT",
        help="The Ray cluster. auto: that of `outrider serve` on this machine, else the one this machine is part of.",
    ),
]
Name = Annotated[str, typer.Option(help="Name of the deployment.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.0, help="Longest to wait until the deployment is as asked for, in seconds.")
]


def status(
    ctx: typer.Context,
    *,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    address: Address = "auto",
    name: Name = "outrider",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Show how the drafts' acceptance estimates came true instead.")
    ] = False,
    tls_ca: TlsCa = None,
    token: TokenPath = None,
) -> None:
    """Show a deployment and its workers; with --endpoint, or where none runs, what one server says of itself."""
    if calibration or not means_deployment(ctx, name):
        access = client_options(tls_ca, token)
        server_status(endpoint, json_output=json_output, calibration=calibration, **access)
        return
    with controller_of(address, name) as controller:
        found = ask(controller.status.remote(), timeout_s=STATUS_TIMEOUT_S)
    if json_output:
        typer.echo(json.dumps(found))
        return
    from outrider.deploy.status import status_tables

    console = Console(highlight=False)
    for table in status_tables(found):
        console.print(table)


def scale(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=COUNT...", help="draft=4 target=2 coordinator=2")],
    *,
    address: Address = "auto",
    name: Name = "outrider",
    timeout_s: Timeout = 300.0,
) -> None:
    """Change how many workers of a role there are; return when all of them serve."""
    asked = dict(_count(entry) for entry in counts)
    with controller_of(address, name) as controller:
        ask(controller.scale.remote(asked))
        _await_serving(controller, timeout_s)


def drain(worker: str, *, address: Address = "auto", name: Name = "outrider") -> None:
    """Let one WORKER (a name that status shows) finish, and take it away: there is one fewer from then on."""
    with controller_of(address, name) as controller:
        ask(controller.drain.remote(worker))


def replace(
    role: Annotated[str, typer.Argument(help="draft or target")],
    *,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder of the new draft workers; default what each has.")
    ] = None,
    address: Address = "auto",
    name: Name = "outrider",
) -> None:
    """Replace the workers of a role one after the other; each new one serves before the old one goes."""
    with controller_of(address, name) as controller:
        for fresh in ask(controller.replace.remote(role, model)):
            typer.echo(fresh)


def down(*, address: Address = "auto", name: Name = "outrider", timeout_s: Timeout = 60.0) -> None:
    """End a deployment: requests that run get a few seconds, then every role stops."""
    with controller_of(address, name) as controller:
        import ray

        ask(controller.down.remote(), timeout_s=timeout_s)
        ray.kill(controller, no_restart=True)


@contextlib.contextmanager
def controller_of(address: str, name: str) -> Iterator[Any]:
    """A deployment's controller, while the block lasts."""
    prefer_token(address)
    import ray

    from outrider.deploy.connection import attach

    was_joined = ray.is_initialized()
    try:
        yield attach(address, name)
    finally:
        if not was_joined:
            ray.shutdown()


def ask(answer: Any, *, timeout_s: float | None = None) -> Any:
    """Call the controller; its errors are raised here.

    Raises:
        typer.BadParameter: what was asked for is impossible.
        OutriderError: it could not be done.
        TimeoutError: it took too long.
    """
    import ray
    import ray.exceptions

    try:
        return ray.get(answer, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ValueError):
            raise typer.BadParameter(str(cause)) from error
        raise (cause if isinstance(cause, OutriderError) else OutriderError(str(cause))) from error
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from error
    except ray.exceptions.RayError as error:
        raise WorkerUnavailable(f"the controller does not answer: {error}") from error


def _await_serving(controller: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        found = ask(controller.status.remote(), timeout_s=STATUS_TIMEOUT_S)
        late = [own["name"] for own in found["workers"] if own["state"] != "serving"]
        if not late and len(found["workers"]) == sum(found["wanted"].values()):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not serving after {timeout_s:g} s: {', '.join(late)}")
        time.sleep(POLL_INTERVAL_S)


def _count(entry: str) -> tuple[str, int]:
    role, _, count = entry.partition("=")
    if not role or not count.isdecimal():
        raise typer.BadParameter(f"{entry!r} given, ROLE=COUNT such as draft=4 needed")
    return role, int(count)


def means_deployment(ctx: typer.Context, name: str) -> bool:
    """Return True if a deployment is asked about: one is named, or one of `outrider serve` runs on this machine."""
    if is_given(ctx, "endpoint"):
        return False
    return is_given(ctx, "address") or is_given(ctx, "name") or local_address(name) is not None
