"""Outrider's services beside transformers' `generate` and its assisted generation, on the same checkpoints.

    python benchmarks/against_transformers.py --device cuda [--shapes 1b 160m | --target FOLDER --draft FOLDER]

One request at a time, greedy, the same held-out prompts as token ids. Without folders the embedded pair is widened to
the two shapes first (docs/embedded-pair.md): real acceptance at real cost. Everything is loaded at once on one device
and the contenders take turns over the prompts; what does not run is idle. Ratios are medians over the turns.

TPOT is (latency - time to the first token) / (tokens - 1): of transformers by a streamer in this process, of Outrider
as its coordinator measures it. Tokens per second go by the client's clock for both.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.target_bench.against_transformers import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
