"""Tables that a load test prints when it is over, and puts into its report."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

Figures = Mapping[str, Any]
_LATENCIES = (
    ("ttft", "TTFT: time to first token"),
    ("tpot", "TPOT: a token after the first"),
    ("itl", "ITL: between chunks of tokens"),
    ("e2el", "E2EL: the whole request"),
)
_FROM_SEND = (
    ("ttft_from_send", "TTFT from the sending"),
    ("e2el_from_send", "E2EL from the sending"),
    ("client_queue_time", "waited at the client"),
)
STATISTICS = ("mean", "median", "std", "p90", "p99")
_MOST_ERRORS = 3
# Without a cap on the concurrency: below it the two figures are the same but for the client's own time.
_NOTABLE_DELAY_MS = 10.0


def run_tables(figures: Figures) -> list[Table]:
    """All tables of one run."""
    return [_totals(figures), _latencies(figures)]


def _totals(figures: Figures) -> Table:
    table = Table(title=str(figures["label"]), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    errors = list(figures["error_counts"].items())[:_MOST_ERRORS]
    rows = total_rows(figures) + [(f"error, {count} times", escape(message[:100])) for message, count in errors]
    for row in rows:
        table.add_row(*row)
    return table


def total_rows(figures: Figures) -> list[tuple[str, str]]:
    """Return all totals of a run as (name, value), without latencies and errors."""
    rows = [
        ("requests", f"{figures['completed']} completed, {figures['failed']} failed"),
        ("duration", f"{figures['duration']:.2f} s"),
        ("tokens", f"{figures['total_input_tokens']:,} in, {figures['total_output_tokens']:,} out"),
        ("requests a second", f"{figures['request_throughput']:.2f}"),
        ("output tokens a second", f"{figures['output_throughput']:.1f}"),
        ("most under way at a time", f"{figures['max_concurrent_requests']}"),
    ]
    if figures.get("request_goodput") is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in figures["goodput_slos_ms"].items())
        rows.append((f"good requests a second ({limits})", f"{figures['request_goodput']:.2f}"))
    if "spec_decode_acceptance_length" in figures:
        rows += [
            ("acceptance length", f"{figures['spec_decode_acceptance_length']:.2f} tokens a verification"),
            ("draft tokens accepted", f"{figures['spec_decode_acceptance_rate']:.1f} %"),
        ]
    if "traced_rounds" in figures:
        shares = ((figures[f"round_{part}_ms"], part) for part in ("forward", "host", "between"))
        rows.append(("a round's time", ", ".join(f"{ms:.2f} ms {part}" for ms, part in shares)))
    return rows


def _latencies(figures: Figures) -> Table:
    since = "the sending, as the loop is closed" if figures["latency_from"] == "sending" else "the intended arrival"
    table = Table(
        "ms", *STATISTICS, title=f"Latencies, counted from {since}", title_justify="left", caption_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    has_waited = figures["max_concurrency"] is not None or figures["p99_client_queue_time_ms"] > _NOTABLE_DELAY_MS
    if has_waited:
        table.caption = "Requests waited at the client: the first lines count that, those from the sending do not."
    for row in latency_rows(figures, from_send=has_waited):
        table.add_row(*row)
    return table


def latency_rows(figures: Figures, *, from_send: bool) -> list[tuple[str, ...]]:
    """(title, a value for each of `STATISTICS`) of every latency.

    Args:
        from_send: also what leaves out the wait at the client.
    """
    rows = _LATENCIES + (_FROM_SEND if from_send else ())
    return [(title, *(f"{figures[f'{each}_{name}_ms']:.2f}" for each in STATISTICS)) for name, title in rows]


def runs_table(runs: Sequence[Figures]) -> Table:
    """One line a run; columns that no run has a figure for are left out."""
    table = Table(title="All runs; p50 / p99 in ms", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns: tuple[tuple[str, Callable[[Figures], str]], ...] = (
        ("mode", lambda run: run["speculation"]),
        ("rate", lambda run: rate_text(run["request_rate"])),
        ("at most", lambda run: _number(run["max_concurrency"], "")),
        ("done", lambda run: _number(run["completed"], "")),
        ("failed", lambda run: _number(run["failed"] or None, "")),
        ("req/s", lambda run: _number(run["request_throughput"], ".2f")),
        ("good/s", lambda run: _number(run["request_goodput"], ".2f")),
        ("tokens/s", lambda run: _number(run["output_throughput"], ".0f")),
        ("TTFT", lambda run: f"{run['median_ttft_ms']:.0f} / {run['p99_ttft_ms']:.0f}"),
        ("TPOT", lambda run: f"{run['median_tpot_ms']:.1f} / {run['p99_tpot_ms']:.1f}"),
        ("accepted", lambda run: _number(run.get("spec_decode_acceptance_length"), ".2f")),
    )
    shown = [(title, show) for title, show in columns if any(show(run) for run in runs)]
    for title, _ in shown:
        table.add_column(title, justify="left" if title == "mode" else "right", no_wrap=True)
    for run in runs:
        table.add_row(*(show(run) for _, show in shown))
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def client_warning(figures: Figures) -> str:
    """Return a warning if the load generator was the bottleneck; empty otherwise."""
    if not figures["client_is_bottleneck"]:
        return ""
    return (
        "the load generator was late itself, so that not all of a latency is the service's: its busiest process used "
        f"{figures['client_cpu_share']:.0%} of a core, its event loop was up to "
        f"{figures['client_p99_loop_lag_ms']:.0f} ms late (p99), requests began "
        f"{figures['client_p99_start_lag_ms']:.0f} ms late (p99): try more --client-processes, or a machine of its own"
    )


def rate_text(rate: object) -> str:
    """A request rate for people."""
    return ("inf" if math.isinf(rate) else f"{rate:g}") if isinstance(rate, float) else str(rate)
