"""`outrider bench`: start the service that is asked for, measure it with and without speculation, tell the gain."""

import asyncio
import contextlib
import json
import os
import platform
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider import __version__
from outrider.coordinator.bench.comparing import ALL, document, findings, gains, table
from outrider.coordinator.bench.door import Tokenized, tokenize
from outrider.coordinator.bench.measuring import Pair, measure, requests_of
from outrider.coordinator.bench.prompts import DEFAULT_FILE, BenchPrompt, embedded_prompts, read_prompts
from outrider.coordinator.loadtest.client_process import Access, address_of
from outrider.deploy.config import DeployConfig
from outrider.deploy.config_file import read_fields
from outrider.deploy.plan import make_plan
from outrider.deploy.ray_token import prefer_token
from outrider.errors import LoadtestFailed
from outrider.roles.ports import free_port
from outrider.security.commands import TlsCa, TokenPath, client_options

_FAILED, _INTERRUPTED = 1, 130


def bench(
    *,
    model: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file, as of `serve`; default the embedded pair.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Likewise, of the draft; default n-grams, of the embedded pair its draft."),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option("--config", exists=True, dir_okay=False, help="The service, in YAML, as it would be served."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure the service whose OpenAI door this is, and start none."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSONL: prompt or messages, category, max_new_tokens."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an output; default what each prompt says.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 1,
    speculation: Annotated[
        Literal["async", "sync"], typer.Option(help="How drafts are used in what is compared with off.")
    ] = "async",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Seconds after which a request has failed.")
    ] = 600.0,
    output_json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
    tls_ca: TlsCa = None,
    token: TokenPath = None,
) -> None:
    """Measure what speculation gains on these models, these prompts and this machine.

    Runs every prompt without and with speculation at temperature 0, and prints the gain by category and whether the
    tokens were equal.
    """
    if endpoint is not None and (model is not None or draft is not None or config_file is not None):
        raise typer.BadParameter("--endpoint measures a service that runs: --model, --draft and --config start another")
    config = None if endpoint is not None else service_config(model, draft, config_file)
    asked = default_prompts(config) if prompts is None else read_prompts(prompts)
    asked = [prompt if max_new_tokens is None else replace(prompt, max_new_tokens=max_new_tokens) for prompt in asked]
    access = Access(tls_ca=tls_ca, token=client_options(None, token)["token"])
    if config is not None and config.certs is not None and tls_ca is None:
        access = replace(access, tls_ca=config.certs / "ca.pem")
    notes = Console(stderr=True, highlight=False)

    async def run() -> tuple[Tokenized, list[Pair]]:
        door = served(address_of(endpoint or "")) if config is None else started(config, notes)
        async with door as address:
            found = await tokenize(address, asked, access)
            if not found.prompts:
                raise LoadtestFailed(f"no prompt leaves room for an output of {found.model}")
            if found.left_out:
                notes.print(f"left out, too long for the model: {', '.join(found.left_out)}")
            if not found.has_template:
                notes.print("the model has no chat template: conversations are sent as plain text")
            notes.print(f"{len(found.prompts)} prompts for {found.model}, off and {speculation}", markup=False)
            columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn()
            with Progress(*columns, console=notes) as progress:
                task = progress.add_task("requests", total=requests_of(len(found.prompts)))
                pairs = await measure(
                    found,
                    access,
                    endpoint=address,
                    speculation=speculation,
                    max_concurrency=max_concurrency,
                    timeout_s=timeout_s,
                    on_answer=lambda: progress.advance(task),
                )
            return found, pairs

    tokenized, pairs = asyncio.run(_ended_by_sigterm(run))
    found = gains(pairs)
    console = Console(highlight=False)
    if found:
        console.print(table(found))
    for line in findings(found, pairs):
        console.print(line, markup=False, soft_wrap=True)
    if output_json is not None:
        head = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "model": tokenized.model,
            "draft": draft,
            "endpoint": endpoint,
            "prompts_file": None if prompts is None else str(prompts),
            "speculation": speculation,
            "max_concurrency": max_concurrency,
            "temperature": 0.0,
        }
        output_json.write_text(
            json.dumps(head | {"figures": document(found, pairs)}, indent=2) + "\n", encoding="utf-8"
        )
        notes.print(f"wrote {output_json}", markup=False)
    if len(pairs) < len(tokenized.prompts):
        notes.print("interrupted: the figures are of the prompts that had both answers by then")
        raise typer.Exit(_INTERRUPTED)
    if ALL not in found or found[ALL].failed:
        raise typer.Exit(_FAILED)


def service_config(model: str | None, draft: str | None, config_file: Path | None) -> DeployConfig:
    """Return the deployment that is measured, with ports and a name that are its own.

    Raises:
        typer.BadParameter: the file cannot be used, or says what no deployment can do.
    """
    try:
        fields: dict[str, Any] = {} if config_file is None else read_fields(config_file)
        fields |= {"target_model": model} if model is not None else {}
        fields |= {"draft_model": draft} if draft is not None else {}
        own: dict[str, Any] = {
            "name": f"outrider-bench-{os.getpid()}",
            "port": 0,
            "http_port": free_port(),
            "shared_port": None,
            "shared_http_port": None,
            "metrics_port": None,
        }
        return DeployConfig(**fields | own)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def default_prompts(config: DeployConfig | None) -> Sequence[BenchPrompt]:
    """Return what runs where no file is given: nine categories; of the embedded pair Python, all it knows."""
    if config is not None and config.target_model is None:
        return embedded_prompts()
    return read_prompts(DEFAULT_FILE)


@contextlib.asynccontextmanager
async def started(config: DeployConfig, notes: Console) -> AsyncIterator[str]:
    """The service that `serve` would start, which ends with the block; gives host:port of its OpenAI door.

    Raises:
        typer.BadParameter: options do not fit together.
        OutriderError: as `make_plan` says.
    """
    try:
        plan = make_plan(config)
        if plan.missing:
            plan = plan.completed()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for line in plan.lines:
        notes.print(line, markup=False)
    from outrider.deploy.cluster import Deployment

    prefer_token(config.address)
    async with Deployment(plan.config, tell=lambda line: notes.print(line, markup=False)) as deployment:
        yield deployment.http_endpoints[0]


@contextlib.asynccontextmanager
async def served(address: str) -> AsyncIterator[str]:
    """A service that runs, and goes on."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(f"{address!r} given, HOST:PORT needed")
    yield address


async def _ended_by_sigterm(run: Any) -> Any:
    """Run to the end; on SIGTERM end in order, with all that was started, as asyncio does on Ctrl-C."""
    task = asyncio.ensure_future(run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
