"""How long a draft's growth step takes, in a growth thread that serves sessions: the period from step to step.

    python benchmarks/draft_step.py [--shape 160m 1b] [--only parts host device] [--graph-cuts 2,8 none] [--json FILE]

parts   where the host's time goes; needs no GPU
host    what the host takes where the device answers at once; needs no GPU
device  the period on this GPU, through the graphs that serve (*graph*) and with logits that are looked at eagerly, as
        rules and processors need it (*logits*); random weights, contexts of about 1,000 tokens

A width is the nodes of a step over all sessions. docs/draft-step.md says how to read the table.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.draft_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
