"""Pictures of a report: one file a figure, one panel a temperature, sessions along the bottom, medians over turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# (file, axis, entry of a cell)
_FIGURES = (
    ("speedup", "tokens per second, relative to off with one target", "speedup"),
    ("acceptance_length", "tokens emitted by a verification", "acceptance_length"),
    ("exposed_time", "ms of a round beside the target's own step, median", "exposed_ms"),
    ("target_busy", "share of the time that the target is in a step", "busy"),
    ("tokens_per_gpu", "tokens per second and GPU", "tokens_per_s_per_gpu"),
)
Cells = Sequence[Mapping[str, Any]]


def draw(cells: Cells, folder: Path, title: str) -> list[Path]:
    """Writes the pictures as PNG.

    Args:
        cells: of a report.
        folder: made if it is not there.
        title: above each of them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # pyright: ignore[reportMissingImports] an extra

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    compared = [cell for cell in cells if cell["rule"] == "coupled"]
    return [_draw(compared, folder / f"{file}.png", title, label, entry) for file, label, entry in _FIGURES]


def _draw(cells: Cells, path: Path, title: str, label: str, entry: str) -> Path:
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports] as above

    temperatures = sorted({cell["temperature"] for cell in cells})
    figure, axes = pyplot.subplots(
        1, max(len(temperatures), 1), figsize=(5 * max(len(temperatures), 1), 4), sharey=True, squeeze=False
    )
    for axis, temperature in zip(axes[0], temperatures, strict=False):
        of_panel = [cell for cell in cells if cell["temperature"] == temperature and cell.get(entry) is not None]
        for way in dict.fromkeys((cell["mode"], cell["setup"]) for cell in of_panel):
            of_way = [cell for cell in of_panel if (cell["mode"], cell["setup"]) == way]
            points = [
                (count, statistics.median(cell[entry] for cell in of_way if cell["sessions"] == count))
                for count in sorted({cell["sessions"] for cell in of_way})
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{way[0]}, {way[1]}")
        axis.set(xscale="log", xlabel="sessions", title=f"temperature {temperature:g}")
        sessions = sorted({cell["sessions"] for cell in of_panel})
        axis.set_xticks(sessions, [str(count) for count in sessions])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(label)
    # A cell in which no round ended has no point.
    if axes[0][-1].get_legend_handles_labels()[0]:
        axes[0][-1].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
