"""`outrider up` and `outrider demo`. Ray is imported when one of them runs: the other commands start quickly."""

import asyncio
import inspect
import logging
import signal
from collections.abc import Coroutine
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.command_options import config_command
from outrider.deploy.config import DeployConfig
from outrider.deploy.config_file import as_in_file, read_fields
from outrider.deploy.ray_token import prefer_token

_DETACH = inspect.Parameter(
    "detach",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--detach", help="Leave the service running on the cluster; `outrider down` ends it.")
    ],
)


def _up(config: DeployConfig, *, detach: bool) -> None:
    """Start the service on Ray and keep it running until Ctrl-C or SIGTERM; prints `ready HOST:PORT`."""
    if detach and config.address == "local":
        raise typer.BadParameter("--detach needs a running cluster (--address): a Ray started here ends with `up`")
    prefer_token(config.address)
    _run(_bring_up_detached(config) if detach else _serve_until_stopped(config))


up = config_command(DeployConfig, _up, more=[_DETACH], read_file=read_fields, as_in_file=as_in_file)


def demo(
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the completion.")] = 160,
    drafts: Annotated[int, typer.Option(min=0, help="Number of draft workers.")] = 1,
    role_logs: Annotated[bool, typer.Option(help="Print what the roles log.")] = False,
) -> None:
    """Start the service on a local Ray, stream one completion with live counters, and stop it."""
    config = DeployConfig(port=0, name="outrider-demo", drafts=drafts, role_logs=role_logs)
    prefer_token(config.address)
    if not _run(_show(config, max_new_tokens=max_new_tokens)):
        raise typer.Abort


async def _serve_until_stopped(config: DeployConfig) -> None:
    from outrider.deploy.cluster import Deployment

    async with Deployment(config) as deployment:
        typer.echo(f"ready {deployment.endpoint}")
        if http_port := config.shared_http_port or config.http_port:
            scheme, host = "http" if config.certs is None else "https", deployment.endpoint.rpartition(":")[0]
            typer.echo(f"OpenAI's API at {scheme}://{host}:{http_port}/v1", err=True)
            if config.live_page:
                typer.echo(f"the live page at {scheme}://{host}:{config.http_port}/live", err=True)
        await deployment.ended()
        typer.echo("the deployment was ended by another command", err=True)


async def _bring_up_detached(config: DeployConfig) -> None:
    from outrider.deploy.cluster import Deployment

    async with Deployment(config, detach=True) as deployment:
        if deployment.was_running:
            typer.echo(f"a deployment called {config.name} runs already, and is left as it is", err=True)
        typer.echo(f"ready {deployment.endpoint}")


async def _show(config: DeployConfig, *, max_new_tokens: int) -> None:
    from outrider.deploy.cluster import Deployment
    from outrider.deploy.demo import stream_completion, summary

    console = Console(highlight=False)
    with console.status("starting Ray, the coordinator and the workers"):
        deployment = Deployment(config)
        await deployment.start()
    try:
        for worker in (await deployment.status())["workers"]:
            console.print(f"{worker['name']:16} pid {worker['pid']:<8} {worker['address']}", style="dim")
        console.print()
        result = await stream_completion(deployment.endpoint, max_new_tokens=max_new_tokens, console=console)
        # The completion may end in the middle of a line.
        console.print("" if console.is_terminal else "\n")
        console.print(summary(result))
    finally:
        await deployment.stop()


def _run(main: Coroutine[Any, Any, None]) -> bool:
    """Runs `main` until it is done, or until Ctrl-C or SIGTERM cancels it; returns whether it got done."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_cancelled_by_signals(main))
    except asyncio.CancelledError:
        return False
    return True


async def _cancelled_by_signals(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(main)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task
