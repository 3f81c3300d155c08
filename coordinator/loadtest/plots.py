"""PNG pictures of a load test's report: latency against load, acceptance, where a round's time goes, how a run went."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from outrider.coordinator.loadtest import metrics
from outrider.coordinator.loadtest.running import Run
from outrider.errors import MissingPackage

_ROUND_PARTS = (
    ("forward", "target's device"),
    ("host", "rest of the round"),
    ("between", "between two rounds"),
)
# A run of thousands of seconds needs no point for each.
_MOST_POINTS = 600


def pictures(runs: Sequence[Run]) -> dict[str, bytes]:
    """All pictures that the runs have figures for: name to PNG.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingPackage("pictures need matplotlib: pip install 'outrider[plots]'") from error
    mpl.use("Agg")
    drawn = {name: draw(runs) for name, draw in _PICTURES.items()}
    return {name: picture for name, picture in drawn.items() if picture is not None}


def load_axis(runs: Sequence[Run]) -> tuple[str, Callable[[Run], float]]:
    """Return the x axis: concurrency if it is swept, else the achieved request rate."""
    if len({run.point.max_concurrency for run in runs}) > 1:
        return "most requests at a time", lambda run: run.point.max_concurrency or 0
    if len({run.point.request_rate for run in runs}) > 1:
        return "requests a second, as asked for", lambda run: run.point.request_rate
    return "requests a second, as completed", lambda run: run.figures["request_throughput"]


def _latency_against_load(runs: Sequence[Run]) -> bytes:
    figure, axes = _panels(2)
    label, along = load_axis(runs)
    for mode, own in _by_mode(runs):
        points = sorted(own, key=along)
        for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
            x = [along(run) for run in points]
            line = axis.plot(x, [run.figures[f"median_{name}_ms"] for run in points], "o-", label=f"{mode}, median")
            p99 = [run.figures[f"p99_{name}_ms"] for run in points]
            axis.plot(x, p99, "o--", color=line[0].get_color(), alpha=0.6, label=f"{mode}, p99")
    for axis, title in zip(axes, ("time to first token", "time a token after it"), strict=True):
        axis.set(xlabel=label, ylabel="ms", title=title)
    return _png(figure, axes)


def _throughput_against_load(runs: Sequence[Run]) -> bytes:
    figure, axes = _panels(2)
    label, along = load_axis(runs)
    for mode, own in _by_mode(runs):
        points = sorted(own, key=along)
        x = [along(run) for run in points]
        axes[0].plot(x, [run.figures["output_throughput"] for run in points], "o-", label=mode)
        line = axes[1].plot(x, [run.figures["request_throughput"] for run in points], "o-", label=f"{mode}, completed")
        if points[0].figures.get("request_goodput") is not None:
            good = [run.figures["request_goodput"] for run in points]
            axes[1].plot(x, good, "o--", color=line[0].get_color(), label=f"{mode}, good")
    axes[0].set(xlabel=label, ylabel="tokens a second", title="output")
    axes[1].set(xlabel=label, ylabel="requests a second", title="requests")
    return _png(figure, axes)


def _distributions(runs: Sequence[Run]) -> bytes:
    figure, axes = _panels(3)
    for run in runs:
        complete = [record for record in run.records if record.is_complete]
        values = (
            [record.ttft_s for record in complete],
            [record.tpot_s for record in complete if record.tpot_s is not None],
            [record.e2el_s for record in complete],
        )
        for axis, seconds in zip(axes, values, strict=True):
            if seconds:
                ranks = [100 * (place + 1) / len(seconds) for place in range(len(seconds))]
                axis.step([1e3 * each for each in sorted(seconds)], ranks, where="post", label=run.point.label)
    for axis, title in zip(axes, ("TTFT", "TPOT", "E2EL"), strict=True):
        axis.set(xlabel="ms", ylabel="% of requests at most", title=title)
    return _png(figure, axes, from_zero=False)


def _acceptance(runs: Sequence[Run]) -> bytes | None:
    told = [run for run in runs if "spec_decode_acceptance_length" in run.figures]
    if not told:
        return None
    figure, axes = _panels(2)
    names = [run.point.label for run in told]
    axes[0].barh(names, [run.figures["spec_decode_acceptance_length"] for run in told])
    axes[0].set(xlabel="tokens a verification", title="acceptance length")
    for run in told:
        rates = run.figures["spec_decode_per_position_acceptance_rates"]
        axes[1].plot(range(1, len(rates) + 1), [100 * rate for rate in rates], "o-", label=run.point.label)
    axes[1].set(
        xlabel="depth in the tree", ylabel="% of verifications that accept so deep", title="acceptance by depth"
    )
    return _png(figure, axes)


def _round_time(runs: Sequence[Run]) -> bytes | None:
    traced = [run for run in runs if "traced_rounds" in run.figures]
    if not traced:
        return None
    figure, axes = _panels(1, height=1.5 + 0.5 * len(traced))
    names, left = [run.point.label for run in traced], [0.0] * len(traced)
    for part, title in _ROUND_PARTS:
        widths = [run.figures[f"round_{part}_ms"] for run in traced]
        axes[0].barh(names, widths, left=left, label=title)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    axes[0].set(xlabel="ms, mean over all rounds of the traced requests", title="where a round's time goes")
    # The bars leave it no room.
    axes[0].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _png(figure, axes)


def _time_line(runs: Sequence[Run]) -> bytes:
    figure, axes = _panels(3)
    for run in runs:
        levels = metrics.running(run.records)
        thinned = levels[:: max(1, len(levels) // _MOST_POINTS)]
        axes[0].step(*zip(*thinned, strict=True) if thinned else ([], []), where="post", label=run.point.label)
        complete = [record for record in run.records if record.is_complete]
        tokens = metrics.tokens_by_second(complete)
        axes[1].plot(range(len(tokens)), tokens, label=run.point.label)
        ttft = [(record.intended_s, 1e3 * record.ttft_s) for record in complete]
        axes[2].plot(*zip(*ttft, strict=True) if ttft else ([], []), ".", markersize=3, label=run.point.label)
    axes[0].set(xlabel="s", ylabel="requests", title="under way")
    axes[1].set(xlabel="s", ylabel="tokens in this second", title="output")
    axes[2].set(xlabel="s, intended arrival", ylabel="ms", title="TTFT")
    return _png(figure, axes)


_PICTURES: dict[str, Callable[[Sequence[Run]], bytes | None]] = {
    "latency_against_load": _latency_against_load,
    "throughput_against_load": _throughput_against_load,
    "distributions": _distributions,
    "acceptance": _acceptance,
    "round_time": _round_time,
    "time_line": _time_line,
}


def _by_mode(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    modes = dict.fromkeys(run.point.speculation for run in runs)
    return [(mode, [run for run in runs if run.point.speculation == mode]) for mode in modes]


def _panels(count: int, *, height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(4.6 * max(count, 2), height), squeeze=False)
    return figure, axes[0]


def _png(figure: Any, axes: Any, *, from_zero: bool = True) -> bytes:
    from matplotlib import pyplot

    for axis in axes:
        if from_zero:
            # Bars across have no lower end of their own to be moved.
            axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
        axis.grid(alpha=0.3)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="x-small")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()
