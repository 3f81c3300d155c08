"""What a draft's acceptance estimates are worth, and how much of its trees the target accepts: embedded pair, CPU.

    python benchmarks/calibration.py estimates [--json]     area under the curve beside that of the raw probability
    python benchmarks/calibration.py acceptance [--json]    tokens a round by rule and temperature
    python benchmarks/calibration.py prior [--write]        fits the prior's numbers anew, on prompts of their own

No times are measured, so the figures are the same on a busy machine. docs/calibration.md explains them.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from benchmarks.calibration_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
