"""Which source of growth would have drafted what the embedded target writes, and how fast, at given times of steps.

    python benchmarks/source_replay.py                              the texts are written first: a minute or two
    python benchmarks/source_replay.py --texts /tmp/texts.json      written once, and read from there the next time
    python benchmarks/source_replay.py --insert-us 200              an n-gram worker that inserts slowly

The coordinator's own scheduler, loops and mirrors, and the worker's own n-grams, on virtual time: the same figures on
any machine, busy or not. Nobody has to wait for a GPU to see what a change to the sources is worth.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.source_bench.replay_command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
