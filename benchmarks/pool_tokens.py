"""Whether the pool's operators give plain decoding, over many rounds of a toy target and toy drafters.

    python benchmarks/pool_tokens.py [--rounds 100000] [--device cpu|cuda] [--seed 1]

Eight sessions at a time, up to four drafters each, whose growth comes late, twice or again after a loss; rows open, are
held and closed, workers replaced. Prints what happened as JSON; the exit code is 1 if a token differs from
plain decoding.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.pool_bench.toy_service import ToyService

    parser = argparse.ArgumentParser(prog="benchmarks/pool_tokens.py", description="Plain decoding through the pool.")
    parser.add_argument("--rounds", type=int, default=100_000, help="default 100000")
    parser.add_argument("--device", default="cpu", help="of the pool (default cpu)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    service = ToyService(options.seed, options.device)
    # Loops and kernels are compiled first.
    service.run(min(options.rounds, 50))
    start = time.perf_counter()
    outcome = service.run(max(options.rounds - 50, 0))
    seconds = time.perf_counter() - start
    report = asdict(outcome)
    report["tokens_per_row_round"] = outcome.tokens / max(outcome.row_rounds, 1)
    report["rounds_per_second"] = max(options.rounds - 50, 0) / seconds
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(outcome.mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
