"""A command line out of a configuration dataclass: one option a field, its help from the docstring's Attributes."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

Config = TypeVar("Config")
# The option of every command that may trace.
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
        help="OpenTelemetry collector that gets traces (OTLP over gRPC, http://HOST:4317); default: no traces.",
    ),
]


def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """An option of a command, annotated for typer."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def config_command(
    config_type: type[Config],
    run: Callable[..., None],
    *,
    more: Sequence[inspect.Parameter] = (),
    read_file: Callable[[Path], dict[str, Any]] | None = None,
    as_in_file: Callable[[str, Path], str] | None = None,
) -> Callable[..., None]:
    """A function for typer that takes every field of `config_type` as an option and hands `run` the configuration.

    Args:
        config_type: a dataclass whose every field has a default; it checks its values and raises ValueError.
        run: called as `run(config, **values of more)`; its docstring is the command's help.
        more: options that are not fields, of `keyword`.
        read_file: fields that a file sets; the command then takes --config, and options that are given go before it.
        as_in_file: an error of a field that the file has set, in the file's own words.
    """
    hints, texts = get_type_hints(config_type), attribute_help(config_type)
    fields = dataclasses.fields(config_type)  # pyright: ignore[reportArgumentType] - a dataclass, says the docstring
    parameters = [*(_parameter(field, hints[field.name], texts) for field in fields), *more]

    if read_file is not None:
        parameters = [_CONTEXT, *parameters, _FILE]

    def command(*, ctx: typer.Context | None = None, config_file: Path | None = None, **values: Any) -> None:
        file = config_file
        others = {parameter.name: values.pop(parameter.name) for parameter in more}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        from_file: dict[str, Any] = {}
        try:
            if read_file is not None and ctx is not None and file is not None:
                from_file = {name: value for name, value in read_file(file).items() if not is_given(ctx, name)}
            config = config_type(**given | from_file)
        except ValueError as error:
            message = str(error)
            if as_in_file is not None and file is not None and message.partition(":")[0] in from_file:
                message = as_in_file(message, file)
            raise typer.BadParameter(message) from error
        run(config, **others)

    command.__doc__ = run.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess] - typer reads it
    return command


def attribute_help(config_type: type) -> dict[str, str]:
    """Return each attribute's text in the Attributes section of a class or its bases, on one line; all are needed."""
    texts: dict[str, str] = {}
    for described in reversed(config_type.__mro__):
        _, _, section = inspect.cleandoc(described.__doc__ or "").partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        entries = re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)[1:]
        texts |= {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}
    missing = {field.name for field in dataclasses.fields(config_type)} - texts.keys()
    if missing:
        raise ValueError(f"{config_type.__name__} does not describe {', '.join(sorted(missing))}")
    return texts


def _parameter(field: dataclasses.Field[Any], hint: Any, texts: dict[str, str]) -> inspect.Parameter:
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    # Some are called otherwise than the field, are no option, or have a variable of the environment.
    names = (field.metadata["option"],) if "option" in field.metadata else ()
    if (argument := field.metadata.get("argument")) is not None:
        spelling = typer.Argument(metavar=f"[{argument}]", help=texts[field.name])
    else:
        spelling = typer.Option(*names, envvar=field.metadata.get("envvar"), help=texts[field.name])
    return keyword(field.name, default, Annotated[_option_type(hint), spelling])


_CONTEXT = keyword("ctx", inspect.Parameter.empty, typer.Context)
_FILE = keyword(
    "config_file",
    None,
    Annotated[
        typing.Optional[Path],  # noqa: UP045 a type at run time
        typer.Option(
            "--config", exists=True, dir_okay=False, help="What to run, in YAML; options go before what it says."
        ),
    ],
)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return True if an option was set on the command line or by an environment variable."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in {"COMMANDLINE", "ENVIRONMENT"}


def _option_type(hint: Any) -> Any:
    """The type that typer reads a value as: of `str | Path` it is Path, of a tuple a repeatable option."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return list[arguments[0]]  # pyright: ignore[reportInvalidTypeArguments] - a type of run time
    if origin in (Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not types.NoneType]
        kind = Path if Path in kinds else kinds[0]
        return typing.Optional[kind] if types.NoneType in arguments else kind  # noqa: UP045 a type at run time
    return hint
