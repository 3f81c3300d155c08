"""The commands that make certificates and tokens."""

import re
from pathlib import Path
from typing import Annotated

import typer

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.\-]*[A-Za-z0-9])?|[0-9A-Fa-f:.\[\]]+")


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if it is not there.")],
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or IP address under which clients dial coordinators; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long all of it is valid.")] = 90,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Make a development set of certificates: an authority, and a certificate and key for every role."""
    from outrider.security.certificates import LOCAL_HOSTS, write_development_set

    for given in host or ():
        if not _HOST.fullmatch(given):
            raise typer.BadParameter(f"{given!r} given, a host name or an IP address needed")
    write_development_set(folder, hosts=host or (), days=days, overwrite=force)
    typer.echo(f"wrote an authority and a certificate for every role to {folder}, valid for {days} days")
    typer.echo(f"clients may dial coordinators as {', '.join((*LOCAL_HOSTS, *(host or ())))}")
    typer.echo("ca.key can make further certificates: keep it off the machines that serve")
