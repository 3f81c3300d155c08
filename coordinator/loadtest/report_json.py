"""The figures as JSON: one object a run, with the names of vLLM's `bench serve`; several are held under "runs"."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.coordinator.loadtest.records import RequestRecord
from outrider.coordinator.loadtest.running import Run
from outrider.errors import FieldViolation, InvalidRequest


def document(runs: Sequence[Run], *, is_detailed: bool) -> dict[str, Any]:
    """The document that is written."""
    objects = [run.figures | (details(run.records) if is_detailed else {}) for run in runs]
    return _plain(objects[0] if len(objects) == 1 else {"runs": objects})


def write(path: Path, runs: Sequence[Run], *, is_detailed: bool) -> None:
    """Write the runs, all or nothing: an earlier file stays whole until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document(runs, is_detailed=is_detailed), indent=2) + "\n"
    if path.exists() and not path.is_file():
        # A pipe, or a device.
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, also of one that vLLM's `bench serve` wrote.

    Raises:
        InvalidRequest: it holds something else.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest([FieldViolation(str(path), f"it is not JSON: {error}")]) from error
    runs = content.get("runs", [content]) if isinstance(content, dict) else []
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) and "duration" in run for run in runs):
        raise InvalidRequest([FieldViolation(str(path), "not the figures of a load test: no run with a duration")])
    return runs


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Every request's figures, in seconds, as `--save-detailed` of vLLM has them."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft_s if record.is_complete else None for record in records],
        "itls": [record.itl_s for record in records],
        "latencies": [record.e2el_s if record.is_complete else None for record in records],
        "start_times": [record.sent_s for record in records],
        "intended_times": [record.intended_s for record in records],
        "queue_times": [record.client_delay_s for record in records],
        "errors": [record.error for record in records],
    }


def _plain(value: Any) -> Any:
    """Without what JSON has no word for: infinity is written as vLLM does, as a text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value
