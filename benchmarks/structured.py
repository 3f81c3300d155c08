"""Are all structured outputs valid, and the same with speculation on and off? And what does speculation gain them?

    python benchmarks/structured.py [--generations 200] [--modes off async sync] [--output FILE]

A service of the embedded pair in processes of its own, in float32 on a CPU with --deterministic, answers JSON schemas
greedily and with seeds, in every mode. Every answer is parsed and held against its schema by the `jsonschema` package,
and against the tokens of the first mode. The exit code is 1 where one is invalid, cut off, or differs.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.structured_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
