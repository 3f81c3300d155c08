"""Calibration status of drafts: predicted against observed acceptance, from heartbeats.

A reliability diagram has a bin for each range of estimates. Children of committed tokens fall into the bin of what was
predicted of them; a calibrated draft has, in every bin, about as large a share of accepted ones as it predicted. The
calibration error of a rule is the mean over its children of |predicted - observed|, by bin.
"""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from outrider.drafting.growth_source import GrowthSource, sources_from_proto
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire import floats_from_bytes

_BAR_CELLS = 20


def calibration_dict(report: common_pb2.CalibrationReport) -> dict[str, Any]:
    """Rule to its bins and figures; empty for a worker that has not observed anything.

    Of other sources than a model the key is the rule and the source, such as "greedy, ngram".
    """
    edges = [0.0, *(round(edge, 6) for edge in floats_from_bytes(report.edges).tolist()), 1.0]
    return {_key(found): _rule_dict(found, edges) for found in report.rules}


def _key(found: common_pb2.RuleReliability) -> str:
    sources = sources_from_proto([found.source] if found.source else [], default=(GrowthSource.MODEL,))
    return ", ".join([found.rule, *(source.word for source in sources - {GrowthSource.MODEL})])


def _rule_dict(found: common_pb2.RuleReliability, edges: list[float]) -> dict[str, Any]:
    predicted = floats_from_bytes(found.predicted).tolist()
    bins = [
        {
            "above": edges[place],
            "to": edges[place + 1],
            "children": children,
            "accepted": hits,
            "predicted": predicted[place] if children else None,
            "observed": hits / children if children else None,
        }
        for place, (children, hits) in enumerate(zip(found.children, found.hits, strict=True))
    ]
    filled = [part for part in bins if part["children"]]
    total = sum(part["children"] for part in filled)
    return {
        "children": total,
        "accepted": sum(part["accepted"] for part in filled),
        "calibration_error": sum(part["children"] * abs(part["predicted"] - part["observed"]) for part in filled)
        / max(total, 1),
        "bins": bins,
    }


def calibration_tables(workers: Iterable[generation_pb2.WorkerStatus]) -> list[Table]:
    """A table for each draft worker and rule that has observed something."""
    return [
        _rule_table(f"{worker.introduction.model.name} at {worker.introduction.worker_id}, {rule}", figures)
        for worker in workers
        for rule, figures in calibration_dict(worker.load.calibration).items()
    ]


def _rule_table(title: str, figures: dict[str, Any]) -> Table:
    table = Table(title=f"{title}: calibration error {figures['calibration_error']:.3f}", title_justify="left")
    for heading in ("estimate", "children", "predicted", "observed"):
        table.add_column(heading, justify="right")
    table.add_column("observed # , predicted |")
    for part in figures["bins"]:
        if part["children"]:
            table.add_row(
                f"{part['above']:.2f} to {part['to']:.2f}",
                str(part["children"]),
                f"{part['predicted']:.3f}",
                f"{part['observed']:.3f}",
                _bar(part["observed"], part["predicted"]),
            )
    return table


def _bar(observed: float, predicted: float) -> str:
    """One line of the diagram, with a mark where its end should be."""
    cells = [*("#" * round(observed * _BAR_CELLS)).ljust(_BAR_CELLS + 1)]
    cells[round(predicted * _BAR_CELLS)] = "|"
    return "".join(cells).rstrip()
