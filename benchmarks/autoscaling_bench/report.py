"""What a run has shown: figures of each phase, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.autoscaling_bench.load import Record

# Beginning of a phase that is not measured: clients come and go.
_SETTLE_S = 2.0


def bins(record: Record, *, seconds: float) -> list[dict[str, float]]:
    """Second by second: clients, drafts, and the time that a client waits for a token, in the mean."""
    found = []
    for second in range(int(seconds)):
        looks = [look for look in record.looks if second <= look[0] < second + 1]
        if not looks:
            continue
        tokens = sum(count for at_s, count in record.deltas if second <= at_s < second + 1)
        clients = sum(look[1] for look in looks) / len(looks)
        found.append(
            {
                "second": second,
                "clients": clients,
                "wanted": looks[-1][2],
                "serving": looks[-1][3],
                "tokens_per_s": tokens,
                "tpot_ms": 1e3 * clients / tokens if tokens else float("nan"),
            }
        )
    return found


def phases(record: Record, plan: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Figures of each phase: mean TPOT of its settled part, and when the drafts changed."""
    found, began = [], 0.0
    for clients, seconds in plan:
        inside = [look for look in record.looks if began <= look[0] < began + seconds]
        first, last = began + _SETTLE_S, began + seconds
        found.append(
            {
                "clients": clients,
                "seconds": seconds,
                "tpot_ms_first_third": _tpot_ms(record, clients, first, began + seconds / 3),
                "tpot_ms_last_third": _tpot_ms(record, clients, began + 2 * seconds / 3, last),
                "serving_at_start": inside[0][3] if inside else None,
                "serving_at_end": inside[-1][3] if inside else None,
                "most_serving_after_s": _reached(inside, max((look[3] for look in inside), default=0), began),
                "least_serving_after_s": _reached(inside, min((look[3] for look in inside), default=0), began),
            }
        )
        began += seconds
    return found


def _tpot_ms(record: Record, clients: int, first_s: float, last_s: float) -> float | None:
    tokens = sum(count for at_s, count in record.deltas if first_s <= at_s < last_s)
    return 1e3 * clients * (last_s - first_s) / tokens if tokens else None


def _reached(looks: Sequence[tuple[float, int, int, int]], count: int, began_s: float) -> float | None:
    return next((at_s - began_s for at_s, _, _, serving in looks if serving == count), None)


def draw(seconds: Sequence[dict[str, float]], path: Path, title: str) -> None:
    """Clients and drafts above, TPOT below, over time, as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # pyright: ignore[reportMissingImports] an extra

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    at = [own["second"] for own in seconds]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), constrained_layout=True)
    above.step(at, [own["clients"] for own in seconds], where="post", color="tab:gray", label="clients")
    above.set_ylabel("clients")
    drafts = above.twinx()
    drafts.step(at, [own["wanted"] for own in seconds], where="post", color="tab:orange", ls=":", label="drafts wanted")
    drafts.step(at, [own["serving"] for own in seconds], where="post", color="tab:blue", label="drafts serving")
    drafts.set_ylabel("draft workers")
    drafts.set_yticks(range(int(max(own["wanted"] for own in seconds)) + 1))
    lines = [*above.get_lines(), *drafts.get_lines()]
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=3, fontsize=9)
    below.plot(at, [own["tpot_ms"] for own in seconds], color="tab:green")
    below.set_ylabel("ms a token, each client")
    below.set_ylim(bottom=0)
    below.set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
