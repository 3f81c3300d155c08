"""The coordinator's own commands: `generate` and `status`, both clients of its public door."""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.client import Client, GenerateOptions, GenerationOutput, Stream
from outrider.client.outputs import source_speculation
from outrider.command_options import OtlpEndpoint
from outrider.coordinator.commands.top_sample import role_name
from outrider.coordinator.workers.calibration_status import calibration_dict, calibration_tables
from outrider.drafting.growth_source import WORDS, GrowthSource, sources_from_proto
from outrider.security.commands import TlsCa, TokenPath, client_options
from outrider.tracing import exporting
from outrider.v1 import common_pb2, generation_pb2, registry_pb2

DEFAULT_ENDPOINT = "127.0.0.1:50051"


def checked_endpoint(endpoint: str) -> str:
    """Return `endpoint`; typer.BadParameter where it is not HOST:PORT."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(f"{endpoint!r} given, HOST:PORT needed")
    return endpoint


def _checked_sources(given: list[str] | None) -> list[str] | None:
    if not given:
        return None
    words = [word.strip() for text in given for word in text.split(",")]
    for word in words:
        if word not in WORDS:
            raise typer.BadParameter(f"{word!r} given, {', '.join(WORDS)} needed, with commas between several")
    return list(dict.fromkeys(words))


Endpoint = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="OUTRIDER_ENDPOINT", callback=checked_endpoint, help="The service.")
]


def generate_command(open_local: Callable[[int], AbstractContextManager[str]]) -> Callable[..., None]:
    """The `generate` command.

    Args:
        open_local: starts a service of its own with this many drafts, for `--local`; gives its endpoint.
    """

    def generate(
        prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
        *,
        endpoint: Endpoint = DEFAULT_ENDPOINT,
        local: Annotated[bool, typer.Option("--local", help="Start a service of its own for this request.")] = False,
        drafts: Annotated[int, typer.Option(min=0, help="Draft workers of --local.")] = 1,
        max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of output; default the server's.")] = None,
        min_new_tokens: Annotated[int | None, typer.Option(help="No stop token before so many tokens.")] = None,
        temperature: Annotated[float | None, typer.Option(help="0 is greedy, the default.")] = None,
        top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")] = None,
        top_k: Annotated[int | None, typer.Option(help="Keep this many most likely tokens; 0 is off.")] = None,
        min_p: Annotated[float | None, typer.Option(help="Keep tokens of this share of the best one's.")] = None,
        repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less; 1 is off.")] = None,
        presence_penalty: Annotated[float | None, typer.Option(help="Off tokens already put out.")] = None,
        frequency_penalty: Annotated[float | None, typer.Option(help="Off tokens, each time put out.")] = None,
        seed: Annotated[int | None, typer.Option(help="With the same request: the same tokens.")] = None,
        stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
        ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence.")] = False,
        json_schema: Annotated[
            Path | None, typer.Option(help="The output is JSON of the schema in this file; - reads it from stdin.")
        ] = None,
        json_object: Annotated[bool, typer.Option("--json-object", help="The output is a JSON object.")] = False,
        regex: Annotated[str | None, typer.Option(help="The whole output matches this regular expression.")] = None,
        choice: Annotated[list[str] | None, typer.Option(help="The output is one of these; repeat it.")] = None,
        grammar: Annotated[
            Path | None, typer.Option(help="The output is of the grammar (Lark or GBNF) in this file.")
        ] = None,
        compact_json: Annotated[
            bool, typer.Option("--compact-json", help="No white space outside strings in JSON output.")
        ] = False,
        speculation: Annotated[Literal["async", "sync", "off"], typer.Option(help="How drafts are used.")] = "async",
        sources: Annotated[
            list[str] | None,
            typer.Option(
                callback=_checked_sources,
                metavar="SOURCE,...",
                help="What may draft: model, ngram, eagle, with commas between them; default all that there are.",
            ),
        ] = None,
        max_nodes: Annotated[int | None, typer.Option(help="Most draft tokens verified in a step.")] = None,
        max_depth: Annotated[int | None, typer.Option(help="Most draft tokens in a row.")] = None,
        verification: Annotated[
            Literal["coupled", "target_only", "rejection", "synthetic"],
            typer.Option(help="How drafts are judged above temperature 0; synthetic is for benchmarks."),
        ] = "coupled",
        threshold_single: Annotated[
            float | None, typer.Option(help="target_only: accept tokens at least this likely; lossy below 1.")
        ] = None,
        threshold_acc: Annotated[
            float | None, typer.Option(help="target_only: divisor of cumulative probabilities; lossy below 1.")
        ] = None,
        synthetic_rates: Annotated[
            list[float] | None,
            typer.Option(
                "--synthetic-rate",
                help="synthetic: share of draft tokens accepted; repeatable, one a depth, the last for the rest.",
            ),
        ] = None,
        timeout_s: Annotated[
            float, typer.Option("--timeout", min=0.001, help="Give up after so many seconds.")
        ] = 600.0,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
        trace: Annotated[Path | None, typer.Option(help="Write one JSON line a verification to this file.")] = None,
        record_tree: Annotated[
            Path | None,
            typer.Option(help="Write what happens to the token tree to this file, for the live page to replay."),
        ] = None,
        otlp_endpoint: OtlpEndpoint = None,
        tls_ca: TlsCa = None,
        token: TokenPath = None,
    ) -> None:
        """Continue PROMPT: text streams to stdout, one line of statistics to stderr."""
        options: GenerateOptions = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "stop": stop,
            "ignore_eos": ignore_eos,
            "json_schema": _read_file("--json-schema", json_schema),
            "json_object": json_object,
            "regex": regex,
            "choice": choice,
            "grammar": _read_file("--grammar", grammar),
            "disable_any_whitespace": compact_json,
            "speculation": speculation,
            "sources": cast("list[Any] | None", sources),
            "max_nodes": max_nodes,
            "max_depth": max_depth,
            "verification": verification,
            "threshold_single": threshold_single,
            "threshold_acc": threshold_acc,
            "synthetic_rates": synthetic_rates,
            "timeout_s": timeout_s,
            "trace": trace is not None,
            "record_tree": record_tree is not None,
        }
        text = _read_prompt(prompt)
        # Opened at once: a path that cannot be written is told before the work is done.
        with (
            trace.open("w", encoding="utf-8") if trace is not None else nullcontext() as trace_file,
            record_tree.open("w", encoding="utf-8") if record_tree is not None else nullcontext() as tree_file,
            open_local(drafts) if local else nullcontext(endpoint) as address,
            exporting("client", otlp_endpoint),
            Client(address, **({} if local else client_options(tls_ca, token))) as client,
            client.stream(text, **options) as stream,
        ):
            try:
                result = _read(stream, echo=not json_output)
            finally:
                if trace_file is not None:
                    trace_file.writelines(json.dumps(round_dict(record)) + "\n" for record in stream.rounds)
                if tree_file is not None:
                    tree_file.writelines(line + "\n" for line in stream.tree_lines)
        if json_output:
            typer.echo(json.dumps(result_dict(result)))
        else:
            typer.echo(statistics(result), err=True)

    return generate


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}") from error


def _read_file(option: str, path: Path | None) -> str | None:
    if path is None or path == Path("-"):
        return None if path is None else _read_prompt("-")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {path}: {error}") from error


def _read(stream: Stream, *, echo: bool) -> GenerationOutput:
    for delta in stream:
        if echo:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
    if echo and not stream.result.text.endswith("\n"):
        typer.echo()
    return stream.result


def statistics(result: GenerationOutput) -> str:
    """One line about a generation."""
    timings, speculation = result.timings, result.speculation
    return (
        f"{result.usage.completion_tokens} tokens in {timings.total_ms:.0f} ms "
        f"(first after {timings.ttft_ms:.0f} ms, then {timings.tpot_ms:.2f} ms a token), "
        f"prompt of {result.usage.prompt_tokens} ({result.usage.cached_tokens} cached), "
        f"{speculation.verify_steps} verifications, acceptance length {speculation.acceptance_length:.2f}, "
        f"finish reason {result.finish_reason}, seed {result.seed}"
    )


def result_dict(result: GenerationOutput) -> dict[str, Any]:
    """Return the JSON object of `generate --json`."""
    timings = result.timings
    return {
        "request_id": result.request_id,
        "seed": result.seed,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "speculation": asdict(result.speculation),
        "timings": {"ttft_ms": timings.ttft_ms, "tpot_ms": timings.tpot_ms, "total_ms": timings.total_ms},
    }


def round_dict(record: generation_pb2.Round) -> dict[str, Any]:
    """One line of `--trace`; `Round` in generation.proto says what each entry means."""
    names = ("index", "step", "length", "result_ns", "step_ns", "forward_ns", "selected", "accepted")
    return {
        **_fields(record, *names),
        "emitted_token_ids": list(record.emitted_token_ids),
        "growth": [_fields(arrival, "worker_id", "arrived_ns", "as_of", "nodes") for arrival in record.growth],
    }


def _fields(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def server_status(endpoint: str, *, json_output: bool, calibration: bool, **options: Any) -> None:
    """Print the status of one server, its workers and its totals.

    Args:
        calibration: how the drafts' acceptance estimates came true instead.
        options: of the client, how to get in there, as `client_options` has it.
    """
    with Client(endpoint, **options) as client:
        info = client.server_info()
    if json_output:
        typer.echo(json.dumps(status_dict(info)))
        return
    console = Console(highlight=False)
    tables = [_server_table(endpoint, info), _worker_table(info.workers)]
    if calibration:
        tables = calibration_tables(info.workers)
        if not tables:
            console.print("no draft worker has observed a committed token yet")
    for table in tables:
        console.print(table)


def status_dict(info: generation_pb2.ServerInfo) -> dict[str, Any]:
    """Return the JSON object of `status --json`."""
    names = (
        "address", "version", "uptime_s", "running_sessions", "waiting_requests", "requests_total",
        "emitted_tokens_total", "steps_total", "dropped_nodes_total",
    )  # fmt: skip
    return {
        **_fields(info, *names),
        "speculation": {
            "verify_steps": info.speculation.verify_steps,
            "drafted_tokens": info.speculation.spec_draft_tokens,
            "accepted_tokens": info.speculation.spec_accepted_tokens,
            "acceptance_length": info.speculation.acceptance_length,
            "sources": {word: asdict(own) for word, own in source_speculation(info.speculation).items()},
        },
        "weights": _weights_dict(info.weights),
        "workers": [_worker_dict(worker) for worker in info.workers],
    }


def _weights_dict(weights: common_pb2.Weights) -> dict[str, Any] | None:
    return _fields(weights, "version", "path", "reloads") if weights.version else None


def _worker_dict(worker: generation_pb2.WorkerStatus) -> dict[str, Any]:
    introduction, load = worker.introduction, worker.load
    return {
        "worker_id": introduction.worker_id,
        "role": role_name(introduction.role),
        "address": introduction.address,
        "state": worker.state,
        "lease_age_ms": worker.lease_age_ms,
        "model": introduction.model.name,
        "dtype": introduction.model.dtype,
        "weights": _weights_dict(introduction.model.weights),
        "sources": _source_words(introduction),
        **_fields(load, "sessions", "slots_used", "slots_cached", "slots_total", "steps", "busy"),
        "calibration": calibration_dict(load.calibration),
    }


def _source_words(introduction: registry_pb2.WorkerIntroduction) -> list[str]:
    """Return the names of a worker's sources."""
    is_draft = introduction.role == registry_pb2.WORKER_ROLE_DRAFT
    sources = sources_from_proto(introduction.sources, default=(GrowthSource.MODEL,) if is_draft else ())
    return [source.word for source in sorted(sources)]


def _server_table(endpoint: str, info: generation_pb2.ServerInfo) -> Table:
    table = Table(title=f"Outrider {info.version} at {endpoint}", title_justify="left", show_header=False)
    speculation = info.speculation
    rows = {
        "coordinator": info.address,
        "up for": f"{info.uptime_s:.0f} s",
        "sessions": f"{info.running_sessions} running, {info.waiting_requests} waiting",
        "requests": f"{info.requests_total}",
        "tokens": f"{info.emitted_tokens_total} in {info.steps_total} steps",
        "acceptance length": f"{speculation.acceptance_length:.2f} over {speculation.verify_steps} verifications",
        "draft tokens": f"{speculation.spec_draft_tokens} verified, {speculation.spec_accepted_tokens} accepted, "
        f"{info.dropped_nodes_total} dropped",
    }
    for word, own in source_speculation(speculation).items():
        rows[f"grown by {word}"] = (
            f"{own.drafted_tokens} drafted, {own.submitted_tokens} verified, {own.accepted_tokens} accepted"
        )
    if info.weights.version:
        reloads = f", reload {info.weights.reloads}" if info.weights.reloads else ""
        rows["weights"] = f"{info.weights.version} of {info.weights.path}{reloads}"
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _worker_table(workers: Iterable[generation_pb2.WorkerStatus]) -> Table:
    # Within 80 columns; `--json` has the rest.
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "address", "state"):
        table.add_column(name, no_wrap=True, overflow="fold")
    table.add_column("model")
    for name in ("sessions", "KV", "busy"):
        table.add_column(name, justify="right")
    for worker in map(_worker_dict, workers):
        grows = "+".join(worker["sources"])
        kv = worker["slots_used"] / worker["slots_total"] if worker["slots_total"] else 0.0
        table.add_row(
            worker["worker_id"],
            worker["address"],
            worker["state"],
            f"{worker['model']} {worker['dtype']}" + (f", {grows}" if grows not in {"", "model"} else ""),
            str(worker["sessions"]),
            f"{kv:.0%}",
            f"{worker['busy']:.0%}",
        )
    return table
