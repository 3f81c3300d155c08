"""The figures of a run, under the names that vLLM's `bench serve` gives them."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from outrider.coordinator.loadtest.records import RequestRecord

PERCENTILES = (50, 90, 99)
SLO_NAMES = ("ttft", "tpot", "e2el")


def parse_slos(texts: Sequence[str]) -> dict[str, float]:
    """Service level objectives in ms, from texts such as "ttft:500 tpot:50".

    Raises:
        ValueError: one cannot be read.
    """
    slos: dict[str, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLO_NAMES or not limit > 0:
            raise ValueError(
                f"goodput: {text!r} given, NAME:MILLISECONDS needed, with a name of {', '.join(SLO_NAMES)}"
            )
        slos[name] = limit
    return slos


def is_good(record: RequestRecord, slos: Mapping[str, float]) -> bool:
    """Return True if a request met every objective; an output of one token counts as TPOT 0."""
    if not record.is_complete:
        return False
    ms = {"ttft": record.ttft_s * 1e3, "tpot": (record.tpot_s or 0.0) * 1e3, "e2el": record.e2el_s * 1e3}
    return all(ms[name] <= limit for name, limit in slos.items())


def summarise(records: Sequence[RequestRecord], *, slos: Mapping[str, float], duration_s: float) -> dict[str, Any]:
    """All figures of a run.

    Args:
        slos: as `parse_slos` gives them; empty: no goodput.
        duration_s: from the beginning to the last end.
    """
    complete = [record for record in records if record.is_complete]
    total_input = sum(record.prompt_tokens for record in complete)
    total_output = sum(record.output_tokens for record in complete)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    good = sum(is_good(record, slos) for record in complete)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(records) - len(complete),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(complete) * per_second,
        "request_goodput": good * per_second if slos else None,
        "output_throughput": total_output * per_second,
        "total_token_throughput": (total_input + total_output) * per_second,
        "max_output_tokens_per_s": max(tokens_by_second(complete), default=0),
        "max_concurrent_requests": peak_concurrency(records),
    }
    latencies = {
        "ttft": [record.ttft_s for record in complete],
        "tpot": [record.tpot_s for record in complete if record.tpot_s is not None],
        "itl": [gap for record in complete for gap in record.itl_s],
        "e2el": [record.e2el_s for record in complete],
        "ttft_from_send": [record.ttft_from_send_s for record in complete],
        "e2el_from_send": [record.e2el_from_send_s for record in complete],
        "client_queue_time": [record.client_delay_s for record in complete],
    }
    for name, values in latencies.items():
        result |= distribution(name, values)
    return result | speculation(complete) | round_shares(complete) | errors(records)


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, spread and percentiles in ms, named as `mean_NAME_ms`; 0 where there is nothing."""
    values = np.asarray(seconds or [0.0]) * 1e3
    figures = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return figures | {f"p{rank}_{name}_ms": float(np.percentile(values, rank)) for rank in PERCENTILES}


def speculation(complete: Sequence[RequestRecord]) -> dict[str, Any]:
    """The spec_decode_* figures; empty where no verification is known of.

    A draft is one verification, as in vLLM. A tree has several nodes at a depth, of which one at most is accepted: the
    rate is that of all nodes. Positions are depths, over the requests whose protocol or trace tells.
    """
    steps = sum(record.verify_steps for record in complete)
    if not steps:
        return {}
    drafted = sum(record.drafted_tokens for record in complete)
    accepted = sum(record.accepted_tokens for record in complete)
    told_steps = sum(record.position_steps for record in complete)
    by_position = [
        sum(counts) for counts in zip_longest(*(record.accepted_per_position for record in complete), fillvalue=0)
    ]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / steps,
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        # The same two under the names of vLLM's counters.
        "spec_decode_num_draft_tokens": drafted,
        "spec_decode_num_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [count / told_steps for count in by_position],
    }


def round_shares(complete: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the mean ms of each part of a round over traced requests; empty if none was traced."""
    rounds = [each for record in complete for each in record.rounds]
    if not rounds:
        return {}
    parts = ("forward", "host", "between")
    return {"traced_rounds": len(rounds)} | {
        f"round_{part}_ms": statistics.fmean(getattr(each, f"{part}_ns") for each in rounds) / 1e6 for part in parts
    }


def errors(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the count of each error, most frequent first."""
    counts = Counter(record.error or "no token came" for record in records if not record.is_complete)
    return {"error_counts": dict(counts.most_common())}


def tokens_by_second(complete: Sequence[RequestRecord]) -> list[int]:
    """Tokens that came in each second of the run; where chunks are not counted, a request's are spread over them."""
    seconds: Counter[int] = Counter()
    for record in complete:
        counts = record.chunk_tokens or [record.output_tokens / max(1, len(record.chunk_s))] * len(record.chunk_s)
        for at_s, count in zip(record.chunk_s, counts, strict=True):
            seconds[int(at_s)] += count  # pyright: ignore[reportArgumentType] shares of tokens are rounded below
    return [round(seconds[second]) for second in range(max(seconds, default=-1) + 1)]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests that were under way at a time."""
    return max((count for _, count in running(records)), default=0)


def running(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Requests under way, as (time, from then on)."""
    changes = sorted(change for record in records for change in ((record.sent_s, 1), (record.left_s, -1)))
    levels, level = [], 0
    for at_s, change in changes:
        level += change
        levels.append((at_s, level))
    return levels
