"""Writes docs/reference/ from .proto files, docstrings and commands; docs/results.md and README's table from results/.

.venv/bin/python docs/generate.py            writes the pages
.venv/bin/python docs/generate.py --check    says which of them are out of date, and fails if one is
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
from results_page import readme_tables, results_page  # noqa: E402 - a neighbour of this script

PROTOS = DOCS.parent / "protos" / "outrider" / "v1"
# The door first, then what is spoken behind it.
PROTO_ORDER = ("generation", "common", "registry", "peer", "draft", "target")
_NOTE = "<!-- Written by docs/generate.py: change the source and run `make docs`. -->"
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?")
_RPC = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
_FIELD = re.compile(r"((?:optional |repeated )?(?:map<[\w., ]+>|[\w.]+)) (\w+) = (\d+)")
_CONSTANT = re.compile(r"(\w+) = (\d+)")


@dataclass
class Block:
    """A service, message or enum: its comment, and rows of its own."""

    kind: str
    name: str
    comment: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------- protocol


def protocol_page() -> str:
    """The gRPC services and their messages, with the comments of the .proto files."""
    parts = [
        _NOTE,
        "# The protocol",
        "What the services speak, from the `.proto` files of `protos/outrider/v1/`. Clients need "
        "[`GenerationService`](#generationservice) alone. Every server has reflection and health besides.",
    ]
    for name in PROTO_ORDER:
        text = (PROTOS / f"{name}.proto").read_text()
        first = text.split("\n", 1)[0].removeprefix("//").strip()
        parts.append(f"## `{name}.proto`\n\n{first}")
        parts += [_block_text(block) for block in proto_blocks(text)]
    return "\n\n".join(parts) + "\n"


def proto_blocks(text: str) -> Iterator[Block]:
    """The outermost blocks of a .proto file; the fields of a oneof count as the message's, nested types as blocks.

    Raises:
        ValueError: a line that is not understood, with the line.
    """
    stack: list[Block] = []
    comment: list[str] = []
    for line in (each.strip() for each in text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        words, comment = " ".join(comment), []
        if opening := _BLOCK.match(line):
            kind, name, closed = opening.groups()
            block = Block(kind, name, words)
            if kind == "oneof":
                block.rows, block.comment = stack[-1].rows, f"One of `{name}`."
            if not closed:
                stack.append(block)
            elif kind != "oneof":
                yield block
        elif line == "}":
            block = stack.pop()
            if block.kind != "oneof":
                yield block
        elif stack and line and not line.startswith(("reserved", "option ")):
            stack[-1].rows.append(_row(line, words, stack[-1]))


def _row(line: str, words: str, block: Block) -> tuple[str, ...]:
    if block.kind == "service" and (rpc := _RPC.match(line)):
        name, asks, request, answers, answer = rpc.groups()
        return name, f"{'stream of ' if asks else ''}`{request}`", f"{'stream of ' if answers else ''}`{answer}`", words
    if block.kind == "enum" and (constant := _CONSTANT.match(line)):
        return f"`{constant[1]}`", constant[2], words
    if found := _FIELD.match(line):
        prefix = f"{block.comment} " if block.kind == "oneof" else ""
        return f"`{found[2]}`", f"`{found[1]}`", found[3], (prefix + words).strip()
    raise ValueError(f"not understood in {block.kind} {block.name}: {line!r}")


def _block_text(block: Block) -> str:
    columns = {
        "service": ("call", "asks", "answers", ""),
        "enum": ("value", "number", ""),
        "message": ("field", "type", "number", ""),
    }[block.kind]
    parts = [f"### {block.name}", block.comment, _table(columns, block.rows) if block.rows else "No fields."]
    return "\n\n".join(part for part in parts if part)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --------------------------------------------------------------------------------------------------------------- Python


def python_page() -> str:
    """The client and the errors, with their docstrings."""
    from outrider import client, errors
    from outrider.client import outputs as client_outputs
    from outrider.security import tls

    places = [
        (client, ["Client", "AsyncClient", "Stream", "AsyncStream", "GenerateOptions"]),
        (client, ["Delta", "GenerationOutput", "ChoiceOutput"]),
        (client_outputs, ["TokenLogprobs", "Usage", "Speculation", "Timings"]),
        (tls, ["TlsConfig"]),
    ]
    parts = [_NOTE, "# The Python client", _fenced_where_indented(_doc(client))]
    for module, names in places:
        parts += [_class_text(module, name) for name in names]
    return "\n\n".join([*parts, "## Errors", _fenced_where_indented(_doc(errors))]) + "\n"


def _class_text(module: ModuleType, name: str) -> str:
    kind = getattr(module, name)
    parts = [f"## {name}", f"`from {module.__name__} import {name}`"]
    # Its own, and those of bases that it shares with its neighbours.
    bases = [base for base in reversed(kind.__mro__) if base.__module__ == kind.__module__]
    members = {member: value for base in bases for member, value in vars(base).items()}
    if "__init__" in members and _is_documented(members["__init__"], kind):
        parts.append(f"```python\n{name}{_signature(kind)}\n```")
    parts.append(_sections(_doc(kind)))
    if is_typeddict(kind):
        types = [
            (f"`{option}`", f"`{_short(inspect.formatannotation(of))}`") for option, of in kind.__annotations__.items()
        ]
        parts.append(_table(("option", "type"), types))
    for member, value in members.items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            parts.append(f"### {name}.{member}\n\n{_sections(_doc(value))}")
        elif inspect.isfunction(value) and _is_documented(value, kind):
            parts.append(
                f"### {name}.{member}\n\n```python\n{member}{_signature(value)}\n```\n\n{_sections(_doc(value))}"
            )
    return "\n\n".join(part for part in parts if part)


def _is_documented(function: Callable[..., Any], kind: type) -> bool:
    return function.__module__ == kind.__module__


def _signature(function: Any) -> str:
    text = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    return _short(re.sub(r"\*<class ([\w.']+)>", r"Unpack[\1]", text))


def _short(annotation: str) -> str:
    """Annotations by their short names, as in the source."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", annotation).replace("'", "")


def _doc(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def _sections(text: str) -> str:
    """Args, Attributes and Raises of a docstring as lists."""
    lines: list[str] = []
    listed = False
    for line in text.splitlines():
        if heading := re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            lines += [f"**{heading[1]}**", ""]
            listed = True
        elif listed and (entry := re.match(r"    (\*{0,2}\w[\w, ]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif listed and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            listed = listed and not line
            lines.append(line)
    return "\n".join(lines)


def _fenced_where_indented(text: str) -> str:
    """A module's docstring with its indented parts as code."""
    blocks = re.split(r"\n\n(?=    )|(?<=\n)\n(?=\S)", text)
    return "\n\n".join(
        f"```\n{textwrap.dedent(block).strip()}\n```" if block.startswith("    ") else block.strip() for block in blocks
    )


# ------------------------------------------------------------------------------------------------------------- commands


_COMMANDS = """`outrider COMMAND --help` says the same; `outrider --install-completion` has the shell complete them.

| exit code | |
|---|---|
| 0 | done |
| 1 | it failed: one line on stderr, `error: ...`, says why |
| 2 | wrong arguments, or a request that is wrong: the line names them |
| 130 | Ctrl-C; `loadtest` prints and writes what it has by then |"""


def commands_page() -> str:
    """Every command with its options."""
    import typer

    from outrider.cli import build_app

    root: Any = typer.main.get_command(build_app())
    parts = [_NOTE, "# The commands", _COMMANDS]
    for path, command in _commands(root, "outrider"):
        parts.append(f"## {path}\n\n{inspect.cleandoc(command.help or '')}")
        rows = [_option(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            parts.append(_table(("option", "default", ""), rows))
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        if getattr(child, "commands", None):
            yield from _commands(child, f"{path} {name}")
        elif not child.hidden:
            yield f"{path} {name}", child


def _option(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        names = [(parameter.name or "").upper()]
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
    default = parameter.default
    if callable(default) or default is None or default in ((), []):
        shown = "required" if parameter.required else ""
    elif isinstance(default, bool):
        shown = "on" if default else ""
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    words = " ".join((getattr(parameter, "help", None) or "").split())
    return ", ".join(f"`{name}`" for name in names), shown, words


# --------------------------------------------------------------------------------------------------------------- readme

_TABLE = ("<!-- Tables by docs/generate.py from results/. -->\n", "<!-- End of tables. -->\n")


def readme_page() -> str:
    """README with its tables of figures written anew."""
    before, begin, rest = (DOCS.parent / "README.md").read_text().partition(_TABLE[0])
    _, end, after = rest.partition(_TABLE[1])
    assert begin, "README.md has no place for its tables"
    assert end, "README.md has no end of its tables"
    return f"{before}{begin}{readme_tables()}\n{end}{after}"


# ----------------------------------------------------------------------------------------------------------------- main

PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/protocol.md": protocol_page,
    "docs/reference/python.md": python_page,
    "docs/reference/commands.md": commands_page,
    "docs/results.md": lambda: results_page(_NOTE),
    "README.md": readme_page,
}
"""Functions that write each page, by its path in the repository."""


def main(arguments: list[str]) -> int:
    """Write or check the pages; return the exit code."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS.parent / name, make()
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text)
    if stale and "--check" in arguments:
        sys.stderr.write(f"out of date: {', '.join(stale)}: run `make docs` and commit it\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
