"""The embedded pair's own trees and acceptance on virtual time, at a large model's step times.

    python benchmarks/pair_rounds.py [--sessions 1 16] [--temperatures 0 1] [--rounds learned ahead] [--live-nodes 256]

What policies and settings are worth, with neither a GPU nor made-up rates: the draft worker's own growth, estimates and
calibration, the coordinator's scheduler, loops and mirrors. Only what steps and ways take is given. The first minute
goes into the target's outputs; a second of virtual time takes half a minute with one session.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.pair_command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
