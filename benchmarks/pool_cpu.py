"""Time the candidate pool's operators on a CPU: a target's round and a draft worker's step.

    python benchmarks/pool_cpu.py [--sessions 8] [--output-json FILE]

Medians in microseconds of calls as a worker makes them, checks included, with one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REPEATS = 500
# Of each session.
_ENTRIES = 128


def main() -> int:
    """Run the command line."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import torch
    from benchmarks import results
    from benchmarks.kernel_bench import pool

    parser = argparse.ArgumentParser(description="Times the candidate pool's operators on a CPU.")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="default: standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = {"graft": pool.run_graft, "select": pool.run_select, "pack": pool.run_pack, "re_root": pool.run_re_root}
    drafter = {
        "re_root": pool.run_re_root,
        "select": pool.run_select,
        "pack": pool.run_pack,
        "append": pool.run_append,
    }
    report = results.provenance("pool_cpu.py", sys.argv[1:]) | {
        "machine": results.machine("cpu"),
        "sessions": options.sessions,
        "entries": _ENTRIES,
        "repeats": _REPEATS,
    }
    for name, makers, nodes in (("target", target, 64), ("drafter", drafter, 32)):
        bench = pool.PoolBench(options.sessions, nodes, name == "drafter", torch.device("cpu"), entries=_ENTRIES)
        report[name] = _time({operator: make(bench) for operator, make in makers.items()}, bench.restore)
    results.write(report, options.output_json)
    return 0


def _time(runs: dict[str, Callable[[], Any]], restore: Callable[[], Any]) -> dict[str, float]:
    """Medians of each, and of all in their order, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in (*runs, "together")}
    for _ in range(_REPEATS):
        restore()
        began = last = time.perf_counter()
        for name, run in runs.items():
            run()
            now = time.perf_counter()
            times[name].append(now - last)
            last = now
        times["together"].append(last - began)
    return {name: round(1e6 * statistics.median(taken), 1) for name, taken in times.items()}


if __name__ == "__main__":
    sys.exit(main())
