"""Many connections that send one request each at the same moment: who is refused, how long they wait, what it takes.

    python benchmarks/connections.py [--connections 200 1000] [--output-json results/connections.json]

What serves is the embedded pair, with the coordinator's own options but for its HTTP door. Its processes share this
machine's cores with the clients. A wait is the time from the beginning to a request's first token. The exit code is 1
where a request was refused or failed, or where the coordinator's memory grew from one run to the next like it.
"""

import argparse
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Of this folder only the packages below are meant: transformers looks for a package called kernels.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from benchmarks import results
from rich.console import Console
from rich.table import Table

from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.command import run
from outrider.coordinator.loadtest.options import LoadtestConfig
from outrider.local import LocalService

_DOORS = {"gRPC": "grpc", "HTTP": "openai"}
_SAMPLE_S = 0.1
# Of memory, between runs of as many connections.
_MOST_GROWTH = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where something asked for was missed."""
    options = _parser().parse_args(arguments)
    with LocalService(drafts=1, coordinator_args=("--http-port", "0")) as service:
        rows = [
            measure(service, door, connections, number, max_new_tokens=options.max_new_tokens)
            for connections in options.connections
            for door in _DOORS
            for number in range(options.repeats)
        ]
    missed = misses(rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=220, highlight=False).print(table, *missed, sep="\n", markup=False)
    if options.output_json is not None:
        document = results.provenance("connections.py", sys.argv[1:] if arguments is None else arguments)
        document |= {"machine": results.machine("cpu"), "runs": rows}
        results.write(document, options.output_json)
    return int(bool(missed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="connections.py", description=__doc__)
    add = parser.add_argument
    add("--connections", type=int, nargs="+", default=[200, 1000], help="of a run (default 200 1000)")
    add("--repeats", type=int, default=3, help="runs of each number and door (default 3)")
    add("--max-new-tokens", type=int, default=16, help="of a request (default 16)")
    add("--output-json", type=Path, default=None, help="file for the figures")
    return parser


def measure(service: LocalService, door: str, connections: int, number: int, *, max_new_tokens: int) -> dict[str, Any]:
    """Return the figures of one run: memory in MiB, times in seconds."""
    config = LoadtestConfig(
        endpoint=service.endpoint if door == "gRPC" else service.http_url,
        protocol=_DOORS[door],  # pyright: ignore[reportArgumentType] - one of the two
        num_prompts=connections,
        connections=connections,
        output_len=max_new_tokens,
        traced_requests=0,
    )
    with _memory_of(service.processes["coordinator"].pid) as rss_mib:
        (outcome,) = run(config, Access(), console=Console(stderr=True))
    figures = outcome.figures
    refused = sum(count for error, count in figures["error_counts"].items() if "Overloaded" in error or " 429" in error)
    return {
        "door": door,
        "connections": connections,
        "run": number + 1,
        "completed": figures["completed"],
        "refused": refused,
        "failed": figures["failed"] - refused,
        "errors": ", ".join(f"{count} x {error}" for error, count in figures["error_counts"].items()),
        "wait_s_median": round(figures["median_ttft_ms"] / 1e3, 2),
        "wait_s_p99": round(figures["p99_ttft_ms"] / 1e3, 2),
        "duration_s": round(figures["duration"], 2),
        "requests_per_s": round(figures["request_throughput"], 1),
        "client_is_bottleneck": figures["client_is_bottleneck"],
        "load_average": round(os.getloadavg()[0], 1),
        "rss_before_mib": round(rss_mib[0]),
        "rss_most_mib": round(max(rss_mib)),
    }


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was asked for and did not come true."""
    found = []
    for row in rows:
        what = f"{row['connections']} connections by {row['door']}, run {row['run']}"
        if row["completed"] != row["connections"]:
            found.append(f"MISSED: {what}: {row['refused']} refused, {row['failed']} failed ({row['errors']})")
    for before, after in itertools.pairwise(rows):
        # The first of a kind grows buffers that those after it use again.
        is_alike = all(before[name] == after[name] for name in ("door", "connections"))
        growth = after["rss_most_mib"] / before["rss_most_mib"] - 1
        if is_alike and before["run"] > 1 and growth > _MOST_GROWTH:
            what = f"{after['connections']} connections by {after['door']}, run {after['run']}"
            found.append(f"MISSED: {what}: the coordinator's memory grew by {growth:.1%} since the run before")
    return found


@contextmanager
def _memory_of(pid: int) -> Iterator[list[float]]:
    """Samples of a process's memory in MiB, the first from before the work."""
    done, samples = threading.Event(), [_rss_mib(pid)]

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            samples.append(_rss_mib(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    sys.exit(main())
