"""Messages to the text that a model was taught to answer: its own Jinja template, in a sandbox.

Names and settings are those that templates are written for (transformers documents them): blocks leave no white space
behind, `break` and `continue` work, `raise_exception`, `strftime_now` and `tojson` exist, `{% generation %}` marks
what only training looks at. A template comes with a checkpoint and is not trusted: it can neither change nor reach
anything but what it is given.
"""

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import CheckpointError, FieldViolation, InvalidRequest

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One model's template.

    Raises:
        CheckpointError: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: end with what introduces an answer.

        Raises:
            InvalidRequest: the template refuses these messages, or cannot cope with them.
        """
        names = {**self._special_tokens, **(more or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # What a template does with messages that it did not expect is its own affair, and the sender's.
            raise InvalidRequest(
                [FieldViolation("messages", f"the model's chat template does not take them: {error}")]
            ) from error


class NoChatTemplate:
    """Stands where a model has no template: refuses, and says why and what to do."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Raise InvalidRequest."""
        raise InvalidRequest(
            [
                FieldViolation(
                    "messages",
                    f"{self._reason}: send text to /v1/completions, or start the coordinator with --chat-template FILE",
                )
            ]
        )


def load_chat_template(folder: Path, override: Path | None = None) -> ChatTemplate | NoChatTemplate:
    """A checkpoint's template.

    Args:
        folder: with chat_template.jinja, or with tokenizer_config.json that has one.
        override: a file to be used instead.

    Raises:
        CheckpointError: `override` cannot be used. A checkpoint's own template that cannot be used is logged instead:
            its model can still complete.
    """
    config = read_tokenizer_config(folder)
    special_tokens = _special_tokens(config)
    if override is not None:
        try:
            return ChatTemplate(override.read_text(encoding="utf-8"), special_tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"chat_template: {override} cannot be read: {error}") from error
    try:
        source = _own_source(folder, config)
        if source is None:
            return NoChatTemplate("this model has no chat template")
        return ChatTemplate(source, special_tokens)
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        logger.warning("%s: /v1/chat/completions is refused: %s", folder, error)
        return NoChatTemplate("this model's chat template cannot be used")


def _own_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        # Several by name; the others are for purposes that are not served.
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json says; nothing where there is none, or none that can be read."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s/tokenizer_config.json is not read: %s", folder, error)
        return {}
    return config if isinstance(config, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        # An added token in full is an object.
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own escapes what has a meaning in HTML, which this is not.
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: its content, and no more."""

    tags = {"generation"}  # noqa: RUF012 as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a plain scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
