"""`outrider reload`: other weights for the targets of a deployment, or of coordinators that are named."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.coordinator.commands.client import DEFAULT_ENDPOINT
from outrider.coordinator.commands.reload import InFlight, outcome_dict, reload_weights
from outrider.deploy.cluster_commands import Address, Name, ask, controller_of, means_deployment
from outrider.security.tls import TlsConfig

FAILED = 1
# Beyond what a reload itself may take: for the controller's answer.
_ANSWER_S = 30.0


def reload(
    ctx: typer.Context,
    *,
    target: Annotated[
        Path, typer.Option(metavar="DIR", help="Checkpoint folder of the new weights, as the targets see it.")
    ],
    in_flight: Annotated[
        InFlight, typer.Option(help="Requests that have begun: they finish on the old weights, or are aborted at once.")
    ] = InFlight.FINISH,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="OUTRIDER_ENDPOINT",
            help="Address at which workers register; name every coordinator. Default: a deployment's, else "
            f"{DEFAULT_ENDPOINT}.",
        ),
    ] = None,
    address: Address = "auto",
    name: Name = "outrider",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Longest that all of it may take, in seconds.")
    ] = 600.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    tls_ca: Annotated[Path | None, typer.Option(help="Authorities to believe (PEM), with --endpoint.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Own certificate (PEM), of the role coordinator, with --endpoint.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
) -> None:
    """Change the weights of all targets while they serve: new requests wait, then begin on the new ones.

    Every target reads the checkpoint first; where one cannot run with it, nothing changes.
    """
    try:
        tls = TlsConfig.of_options(tls_ca, tls_certificate, tls_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    folder = str(target.absolute()) if target.is_dir() else str(target)
    if endpoint or not means_deployment(ctx, name):

        def tell(line: str) -> None:
            if not json_output:
                typer.echo(line, err=True)

        work = reload_weights(
            endpoint or [DEFAULT_ENDPOINT], folder, in_flight=in_flight, tls=tls, timeout_s=timeout_s, tell=tell
        )
        outcome = outcome_dict(asyncio.run(work))
    else:
        with controller_of(address, name) as controller:
            asked = controller.reload.remote(folder, str(in_flight), timeout_s)
            outcome = ask(asked, timeout_s=timeout_s + _ANSWER_S)
    typer.echo(json.dumps(outcome) if json_output else _told(outcome))
    if any(each["error"] for each in outcome["targets"]):
        raise typer.Exit(FAILED)


def _told(outcome: dict[str, Any]) -> str:
    """Format the outcome for people."""
    lines = [f"weights {outcome['version']} of {outcome['path']}"]
    if not outcome["changed"]:
        return f"the targets run with these already: {lines[0]}"
    for each in outcome["targets"]:
        said = each["error"] or f"swapped in {each['swap_s']:.3f} s"
        lines.append(f"  {each['name']} ({each['address']}): {said}")
    if outcome["aborted_requests"]:
        lines.append(f"  {outcome['aborted_requests']} requests were aborted")
    failed = sum(bool(each["error"]) for each in outcome["targets"])
    if failed == len(outcome["targets"]):
        lines.append("no target runs with them: those that are left serve with the old weights. Mend what they say, "
                     "and reload again")  # fmt: skip
    elif failed:
        lines += [
            f"{failed} of {len(outcome['targets'])} targets are out of service until they run with them; the others do",
            f"  to go on: mend what they say. They try {outcome['path']} every few seconds, and when they are started",
            f"  to go back: outrider reload --target {outcome['previous']['path']}",
        ]
    return "\n".join(lines)
