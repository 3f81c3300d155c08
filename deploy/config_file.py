"""A deployment written down: a YAML file whose keys, section by section, are the fields of `DeployConfig`.

The dataclass stays the one truth: it has the defaults and it checks the values. Here a key only gets its place in the
file, and an error the name that the key has there (`draft.workers`, not `drafts`).
"""

import difflib
import typing
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from outrider.deploy.config import NGRAM_FIELDS, DeployConfig


def _keys(same: Iterable[str], **renamed: str) -> dict[str, str]:
    """A section's keys, each with its field: those of another name than the field's, and those of the same."""
    return renamed | {name: name for name in same}


def _of(prefix: str, *keys: str) -> dict[str, str]:
    """Keys of fields that begin with the section's name, which the file does not repeat."""
    return {key: f"{prefix}_{key}" for key in keys}


# Section -> key -> field; the section "" is the top of the file.
SECTIONS: dict[str, dict[str, str]] = {
    "": _keys(("name", "address", "bind", "metrics_port")),
    "coordinator": _keys(
        (
            "port", "http_port", "shared_port", "shared_http_port", "http_cors", "served_model_name", "tokenizer_path",
            "chat_template", "default_max_new_tokens", "max_running_sessions", "max_queue", "live_page", "vllm_grpc",
            "drafts_per_session", "target_wait_s", "allow_synthetic",
        ),
        count="coordinators",
        resources="coordinator_resources",
    ),
    "target": _keys(
        (
            "tensor_parallel_size", "quantization", "kv_cache_dtype", "enable_prefix_caching", "max_prefill_tokens",
            "prefill_slowdown", "enforce_eager", "deterministic",
        ),
        workers="targets",
        **_of("target", "model", "port", "gpus", "resources", "threads", "kv_bytes"),
    ),
    "draft": _keys(
        ("source", *NGRAM_FIELDS),
        workers="drafts",
        min_workers="min_drafts",
        max_workers="max_drafts",
        placement="drafter_placement",
        resident_model="resident_draft",
        beside_target="drafts_beside_target",
        **_of("draft", "model", "port", "gpus", "resources", "threads", "kv_bytes"),
    ),
    "security": _keys(("certs", "token_file", "insecure")),
    "autoscale": _of("autoscale", "draft_cost", "up_s", "down_s", "probe_s"),
    "workers": _keys(("max_model_len", "max_num_seqs", "kv_cache_memory_fraction")),
    "timeouts": _keys(
        ("start_timeout_s", "ping_interval_s", "hang_timeout_s", "node_timeout_s", "owner_timeout_s", "stop_timeout_s")
    ),
    "observe": _keys(("log_level", "log_format", "otlp_endpoint")),
    "ray": _keys(("object_store_bytes", "standby", "keep_cores_awake", "role_logs")),
}  # fmt: skip


def read_config(path: Path) -> DeployConfig:
    """The deployment that a file describes.

    Raises:
        ValueError: see `read_fields`, and a value out of range; with the file and the key.
        OSError: it cannot be read.
    """
    fields = read_fields(path)
    try:
        return DeployConfig(**fields)
    except ValueError as error:
        raise ValueError(as_in_file(str(error), path)) from error


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of `DeployConfig` that a file sets.

    Raises:
        ValueError: it is no YAML, a key is unknown or given twice, or a value is of the wrong type; with file and key.
        OSError: it cannot be read.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        return _fields({} if content is None else content)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def as_in_file(message: str, path: Path) -> str:
    """Rewrite an error of `DeployConfig` with the field name of the file."""
    field, colon, rest = message.partition(":")
    return f"{path}: {KEYS.get(field, field)}{colon}{rest}"


def _fields(content: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _mapping("the file", content).items():
        if key in SECTIONS[""]:
            found[key] = _read(key, value, key)
            continue
        if key not in SECTIONS:
            raise ValueError(_unknown(key, "", [*SECTIONS[""], *filter(None, SECTIONS)]))
        for entry, given in _mapping(key, {} if value is None else value).items():
            if entry not in SECTIONS[key]:
                raise ValueError(_unknown(entry, key, list(SECTIONS[key])))
            field = SECTIONS[key][entry]
            found[field] = _read(field, given, f"{key}.{entry}")
    return found


def _mapping(name: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {value!r} given, keys with values needed")
    return value


def _unknown(key: object, section: str, known: list[str]) -> str:
    name = f"{section}.{key}" if section else str(key)
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"{name}: unknown; {hint}"


def _read(field: str, value: object, key: str) -> Any:
    """A value of YAML as the field wants it."""
    hint = _HINTS[field]
    kinds = [kind for kind in (get_args(hint) if get_origin(hint) in _UNIONS else (hint,)) if kind is not NoneType]
    (kind,) = kinds
    if value is None and NoneType in get_args(hint):
        return None
    if field in _LISTS:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{key}: {value!r} given, a list of texts needed")
        return tuple(get_args(kind)[0](each) for each in value)
    if get_origin(kind) is tuple:
        return tuple(_resource(key, name, amount) for name, amount in _mapping(key, value).items())
    choices = [member.value for member in kind] if _is_enum(kind) else get_args(kind)
    if choices:
        if value not in choices:
            raise ValueError(f"{key}: {value!r} given, one of {', '.join(map(str, choices))} needed")
        return kind(value) if _is_enum(kind) else value
    wanted = {Path: str, float: (float, int)}.get(kind, kind)
    # YAML's yes and no are numbers to Python.
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key}: {value!r} given, {_SPOKEN[kind]} needed")
    return kind(value)


def _resource(key: str, name: object, amount: object) -> str:
    if not isinstance(name, str) or not isinstance(amount, int | float) or isinstance(amount, bool):
        raise ValueError(f"{key}.{name}: {amount!r} given, a number needed")
    return f"{name}={amount}"


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


class _StrictLoader(yaml.SafeLoader):
    """YAML without tags that build objects, which refuses a key that is given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"a key that is no text, in line {key_node.start_mark.line + 1}")
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ValueError(f"{key}: given twice, the second time in line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_LISTS = ("ngram_corpus", "http_cors", "served_model_name")
_UNIONS = (typing.Union, type(int | None))
_HINTS = get_type_hints(DeployConfig)
_SPOKEN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
KEYS = {
    field: f"{section}.{key}" if section else key for section, keys in SECTIONS.items() for key, field in keys.items()
}
"""Field of `DeployConfig` -> its key in a file."""
