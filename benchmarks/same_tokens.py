"""How often a token depends on what else its round computes: sessions alone, and the same sessions beside others.

    python benchmarks/same_tokens.py --device cuda [--deterministic] [--shape 8b | --model FOLDER] [--temperatures 0 1]

Texts are decoded one after the other, then all at once: without growth, with trees, and with sessions that are opened
anew so that chunks of their prompts stand beside the others' trees. Every choice is compared. Rows of a bfloat16
product differ in their last bits with the number of rows, and so do sums over keys, so a choice between two scores
that are nearly equal may fall either way.

The exit code is 1 where tokens must not differ and do: with --deterministic any, in float32 those whose two scores lie
more than 1e-4 apart. Without a GPU it runs in float32, with less to do.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.target_bench.same_tokens_command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
