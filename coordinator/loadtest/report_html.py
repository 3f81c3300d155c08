"""One HTML file that tells the whole load test and needs nothing beside it: tables, and pictures as data."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.coordinator.loadtest.plots import pictures
from outrider.coordinator.loadtest.running import Run
from outrider.coordinator.loadtest.tables import STATISTICS, client_warning, latency_rows, rate_text, total_rows
from outrider.errors import MissingPackage

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; background: white; }
figcaption, .note { color: #777; } .warning { color: #b00; font-weight: 600; }
"""
_CAPTIONS = {
    "latency_against_load": "Latency against load.",
    "throughput_against_load": "What was served against what was asked for.",
    "distributions": "How latencies are spread: the share of requests that took so long at most.",
    "acceptance": "What a verification emits, and how deep into the tree it goes.",
    "round_time": "Where a round's time goes, from one result of the target to the next.",
    "time_line": "How the runs went.",
}


def write(path: Path, runs: Sequence[Run], *, command: str) -> None:
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(runs, command=command), encoding="utf-8")


def page(runs: Sequence[Run], *, command: str) -> str:
    """The report; without matplotlib it has no pictures, and says so."""
    try:
        figures = "".join(_picture(name, data) for name, data in pictures(runs).items())
    except MissingPackage as error:
        figures = f'<p class="note">{html.escape(str(error))}</p>'
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Load test</title><style>{_STYLE}</style></head><body>",
        f"<h1>Load test</h1><p><code>{html.escape(command)}</code></p>{_notes(runs)}",
        figures,
        *(_run(run) for run in runs),
        "</body></html>",
    ]
    return "\n".join(parts)


def _notes(runs: Sequence[Run]) -> str:
    first = runs[0].figures
    since = "sending (the loop is closed)" if first["latency_from"] == "sending" else "intended arrival"
    return (
        f'<p class="note">{html.escape(str(first["date"]))}, protocol {html.escape(first["endpoint_type"])}, data set '
        f"{html.escape(first['dataset_name'])}, temperature {first['temperature']:g}, seed {first['seed']}. Latencies "
        f"count from a request's {since}: a request that had to wait at the client because others were under way is "
        "not left out (no coordinated omission); the lines “from the sending” leave the wait out. "
        "ITL is the time between two chunks of a stream, each of which may hold several tokens; TPOT is per token.</p>"
    )


def _picture(name: str, data: bytes) -> str:
    encoded, caption = base64.b64encode(data).decode("ascii"), html.escape(_CAPTIONS[name])
    image = f'<img alt="{caption}" src="data:image/png;base64,{encoded}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _run(run: Run) -> str:
    figures = run.figures
    warning = client_warning(figures)
    rate, cap = rate_text(figures["request_rate"]), figures["max_concurrency"] or "any number"
    return (
        f"<h2>{html.escape(run.point.label)}</h2>"
        + (f'<p class="warning">{html.escape(warning)}</p>' if warning else "")
        + f'<p class="note">rate {html.escape(rate)}, burstiness {figures["burstiness"]:g}, at most {cap} at a time</p>'
        + _table(("", "value"), total_rows(figures))
        + _table(("ms", *STATISTICS), latency_rows(figures, from_send=True))
        + _errors(figures)
    )


def _errors(figures: Mapping[str, Any]) -> str:
    counts = figures["error_counts"]
    return _table(("error", "times"), [(message, str(count)) for message, count in counts.items()]) if counts else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (("th", head), *(("td", row) for row in rows))
    ]
    return f"<table>{''.join(lines)}</table>"
