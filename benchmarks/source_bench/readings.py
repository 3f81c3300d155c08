"""What the processes counted during a pass, from their metrics: why its trees were what they were."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "outrider_"
_READ_TIMEOUT_S = 10.0

Readings = Mapping[str, Counter[str]]
"""By role, what has been counted so far; a label's value stands behind its name."""


def read_metrics(port: int) -> Counter[str]:
    """The samples of one process on this machine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_READ_TIMEOUT_S) as answer:
        return samples(answer.read().decode())


def samples(text: str) -> Counter[str]:
    """Those of a page of metrics, but for the buckets of histograms."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[" ".join([sample.name.removeprefix(_PREFIX), *sample.labels.values()])] += sample.value  # pyright: ignore[reportArgumentType] - it counts in floats as well
    return found


def in_between(before: Readings, after: Readings) -> dict[str, Counter[str]]:
    """What was counted since."""
    grown = {role: Counter(counts) for role, counts in after.items()}
    for role, counts in before.items():
        grown[role].subtract(counts)
    return grown


def told(grown: Readings, seconds: float) -> dict[str, Any]:
    """Return what it says of a pass that took so long; None where there was nothing to divide by.

    Nodes are those that the coordinator was sent, and the share of them that was late or of no use; `cpu` is cores in
    use, by role.
    """
    own, draft, target = (grown.get(role, Counter()) for role in ("coordinator", "draft-worker", "target-worker"))
    rounds, nodes = own["verify_rounds_total"], own["draft_nodes_received_total"]
    steps = draft["draft_model_step_seconds_count"]
    return {
        "draft_steps_per_s": steps / seconds,
        "draft_step_ms": _share(1e3 * draft["draft_model_step_seconds_sum"], steps),
        "draft_rows_a_step": _share(draft["draft_model_rows_total"], steps),
        "draft_holds": draft["draft_holds_total"],
        "nodes_a_round": _share(nodes, rounds),
        "nodes_dropped": _share(own["draft_nodes_dropped_total"], nodes),
        "target_step_ms": _share(
            1e3 * target["target_model_step_seconds_sum"], target["target_model_step_seconds_count"]
        ),
        "cpu": {role: counts["process_cpu_seconds_total"] / seconds for role, counts in grown.items()},
    }


_WORDS = {
    "draft_steps_per_s": "draft {:.0f} steps/s",
    "draft_step_ms": "of {:.2f} ms",
    "nodes_a_round": "{:.1f} nodes a round",
    "nodes_dropped": "{:.0%} of them dropped",
    "draft_holds": "{:.0f} holds",
}


def line(said: Mapping[str, Any]) -> str:
    """Return the part of it that tells a fast draft from a slow one, and both from one that is not heard."""
    found = ", ".join(words.format(said[name]) for name, words in _WORDS.items() if said[name])
    cores = ", ".join(f"{role.removesuffix('-worker')} {count:.2f}" for role, count in said["cpu"].items())
    return f"{found or 'no draft'}; cores in use: {cores}"


def _share(part: float, of: float) -> float | None:
    return part / of if of else None
