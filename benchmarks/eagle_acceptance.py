"""How many tokens a drafted tree of a fixed shape gains: the embedded target's EAGLE head against the separate draft.

    python benchmarks/eagle_acceptance.py [--prompts 48] [--tokens 128] [--eagle FOLDER] [--json FILE]

The target writes a continuation of every held-out prompt, greedily and at temperature 1 with a seed. Both sources then
draft from every place of it on; a token counts where it is in the tree under its predecessors. docs/eagle.md says how
to read the table.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.eagle_bench.acceptance import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
