"""The commands that make certificates and tokens, and the options with which client commands show them."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

TOKEN_VARIABLE = "OUTRIDER_TOKEN"
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


def new_token(
    name: Annotated[str, typer.Argument(help="Who gets it; in logs and messages.")],
    *,
    token_file: Annotated[Path, typer.Option(help="The coordinators' file of tokens; made if it is not there.")] = Path(
        "tokens.json"
    ),
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Generations begun; default any.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Choices at a time; default any.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Output tokens; default any.")] = None,
) -> None:
    """Make a token for NAME: it is printed once, its hash goes into the file, which running coordinators read anew."""
    from outrider.security import tokens

    token = tokens.new_token()
    try:
        entry = tokens.TokenEntry(
            name=name,
            sha256=tokens.hash_of(token),
            requests_per_minute=requests_per_minute,
            max_concurrent=max_concurrent,
            tokens_per_minute=tokens_per_minute,
        )
        tokens.add_token(token_file, entry)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(token)


def token_commands() -> typer.Typer:
    """`outrider token ...`."""
    app = typer.Typer(help="Tokens, with which clients show who they are.", rich_markup_mode=None)
    app.command("new")(new_token)
    # With a callback it stays a group though it has one command.
    app.callback()(lambda: None)
    return app


TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="OUTRIDER_TLS_CA", help="Authorities (PEM) to believe: talk TLS with the service."),
]
TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token", metavar="FILE", help="File that holds the token; default $OUTRIDER_TOKEN, the token itself."
    ),
]


def client_options(tls_ca: Path | None, token: Path | None) -> dict[str, Any]:
    """Return the keyword arguments of `Client` for a client command."""
    from outrider.security.tls import TlsConfig

    shown = os.environ.get(TOKEN_VARIABLE) if token is None else token.read_text(encoding="utf-8").strip()
    return {"tls": None if tls_ca is None else TlsConfig(ca=tls_ca), "token": shown or None}
