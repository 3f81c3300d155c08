"""What the processes counted during a pass, from their metrics and logs: why its trees were what they were."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "outrider:"
_READ_TIMEOUT_S = 10.0
# Lines of a draft worker's log that say what else it did (`outrider.step_holdups`, and its drafter by a model).
_LINES = {"prepared while serving": "lines_prepared_while_serving", "waits for slots": "lines_waits_for_slots"}

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


def log_lines(text: str) -> Counter[str]:
    """How many lines of a log say what `_LINES` names."""
    return Counter({name: text.count(words) for words, name in _LINES.items()})


def in_between(before: Readings, after: Readings) -> dict[str, Counter[str]]:
    """What was counted since."""
    grown = {role: Counter(counts) for role, counts in after.items()}
    for role, counts in before.items():
        grown[role].subtract(counts)
    return grown


def told(grown: Readings, seconds: float) -> dict[str, Any]:
    """What it says of a pass that took so long; None where there was nothing to divide by.

    Nodes are those that the coordinator was sent, and the share of them that was late or of no use. Rounds of sessions
    with a draft end covered (it was ahead), missed (it was wrong) or starved (it was behind). `cpu` is cores in use.
    """
    own, draft, target = (grown.get(role, Counter()) for role in ("coordinator", "draft-worker", "target-worker"))
    rounds, nodes, steps = own["verify_rounds_total"], own["draft_nodes_received_total"], _steps(draft)
    ends = {word: own[f"draft_rounds_total {word}"] for word in ("covered", "missed", "starved")}
    return {
        "draft_steps_per_s": steps / seconds,
        "draft_step_ms": _share(1e3 * draft["draft_model_step_seconds_sum"], steps),
        "draft_forward_ms": _share(1e3 * draft["draft_model_forward_seconds_sum"], steps),
        "draft_rows_a_step": _share(draft["draft_model_rows_total"], steps),
        "draft_holds": draft["draft_holds_total"],
        "growth_messages_per_s": own["draft_steps_total"] / seconds,
        "nodes_a_round": _share(nodes, rounds),
        "nodes_dropped": _share(own["draft_nodes_dropped_total"], nodes),
        **{word: _share(count, sum(ends.values())) for word, count in ends.items()},
        "without_nodes": _share(own["spec_decode_rounds_without_draft_total no_nodes"], rounds),
        "without_draft": _share(own["spec_decode_rounds_without_draft_total no_worker"], rounds),
        "target_step_ms": _share(
            1e3 * target["target_model_step_seconds_sum"], target["target_model_step_seconds_count"]
        ),
        "held_s": own["draft_exposed_seconds_total"],
        "cpu": {role: counts["process_cpu_seconds_total"] / seconds for role, counts in grown.items()},
        **{name: draft[name] for name in _LINES.values()},
    }


def line(said: Mapping[str, Any]) -> str:
    """The part of it that tells a fast draft from a slow one, and both from one that is not heard."""
    if not said["draft_steps_per_s"]:
        return _line([("nodes_a_round", "{:.1f} nodes a round"), ("nodes_dropped", "{:.0%} of them dropped")], said)
    parts = [
        ("draft_steps_per_s", "draft {:.0f} steps/s"),
        ("draft_step_ms", "of {:.2f} ms"),
        ("nodes_a_round", "{:.1f} nodes a round"),
        ("nodes_dropped", "{:.0%} of them dropped"),
        ("starved", "{:.0%} of the rounds starved"),
        ("draft_holds", "{:.0f} holds"),
        ("lines_prepared_while_serving", "{:.0f} times preparing"),
        ("lines_waits_for_slots", "{:.0f} waits for slots"),
    ]
    return _line(parts, said)


def _line(parts: Iterable[tuple[str, str]], said: Mapping[str, Any]) -> str:
    own = [text.format(said[name]) for name, text in parts if said[name] is not None]
    cores = ", ".join(f"{role.removesuffix('-worker')} {count:.2f}" for role, count in said["cpu"].items())
    return "; ".join([", ".join(own), f"cores in use: {cores}"])


def _steps(draft: Counter[str]) -> float:
    return draft["draft_model_step_seconds_count"]


def _share(part: float, of: float) -> float | None:
    return part / of if of else None
