"""The page of all measurements, and README's tables, from results/*.json.

A file says how it came about (command, commit or commits, machine, versions, notes). Every list of objects in it
becomes a table, with the plain values of its objects as columns.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
ORIGIN = ("command", "commit", "commits", "machine", "versions", "notes")
_README_FILE = "chat.json"
_LOADS = {
    "temperature": "temperature",
    "sessions": "sessions",
    "off_tokens_per_s": "without drafts",
    "vllm_best_tokens_per_s": "vLLM, its best",
    "draft_model_tokens_per_s": "draft model",
    "eagle_head_tokens_per_s": "EAGLE-3 head",
    "eagle_head_over_both": "head over the better of the first two",
    "two_gpus_tokens_per_s": "draft model, two GPUs",
}
_TEXTS = "categories, 16 sessions"


def results_page(note: str, folder: Path = RESULTS) -> str:
    """Return docs/results.md."""
    files = sorted(folder.glob("*.json"))
    parts = [
        note,
        "# Results",
        "All figures of this project, each with the command that measures it. Units stand in the names; a pair is a "
        "median and a 99th percentile. `make bench` measures the service on your machine; `benchmarks/end_to_end.py` "
        "measures it with other models and loads, and `benchmarks/against_vllm.py` measures vLLM with the same.",
        "Measured: " + ", ".join(f"[{file.stem}](#{file.name.replace('.', '')})" for file in files) + ".",
    ]
    for file in files:
        measured = json.loads(file.read_text())
        parts.append(f"## {file.name}")
        parts.append("\n".join(f"- **{name}**: {_origin(measured[name])}" for name in ORIGIN if name in measured))
        values = {name: value for name, value in measured.items() if name not in ORIGIN}
        parts += [text for name, rows in _tables("", values) for text in (f"**{name}**", table(rows))]
    return "\n\n".join(parts) + "\n"


def readme_tables(folder: Path = RESULTS) -> str:
    """Return the tables that README shows: tokens/s on conversations by load, and the EAGLE-3 head's gain by text."""
    measured = json.loads((folder / _README_FILE).read_text())
    loads = [{head: cell.get(name) for name, head in _LOADS.items()} for cell in measured["cells"]]
    texts: dict[str, dict[str, Any]] = {}
    for cell in measured[_TEXTS]:
        row = texts.setdefault(cell["category"], {"text": cell["category"]})
        at = f"temperature {cell['temperature']:g}"
        row[f"tokens a round, {at}"] = cell["eagle_head_tokens_a_verification"]
        row[f"times as fast, {at}"] = cell["eagle_head_over_off"]
    return f"{table(loads)}\n\nBy text, with the head and 16 sessions:\n\n{table(list(texts.values()))}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the plain values of objects; columns stand in the order in which they first appear."""
    flat = [dict(_plain("", row)) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(name)) for name in columns] for row in flat)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _tables(name: str, value: Any) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    if isinstance(value, Mapping):
        kept = (pair for pair in value.items() if not _is_table(pair[1]) and not isinstance(pair[1], Mapping))
        single = {key: each for key, each in kept if each not in (None, [], "")}
        if single:
            yield name or "all", [single]
        for key, each in value.items():
            if _is_table(each) or isinstance(each, Mapping):
                yield from _tables(f"{name} {key}".strip(), each)
    elif _is_table(value):
        yield name, value


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _plain(f"{name}.{key}".removeprefix("."), each)
    elif value not in (None, [], ""):
        yield name, value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "\\|")


def _origin(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    text = str(value)
    return f"`{text}`" if text.startswith(("python ", "outrider ")) else text
