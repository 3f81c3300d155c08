"""Runs every operator over malformed inputs, for a memory checker to watch:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 benchmarks/memory_check.py

Without the variable torch hands out parts of large blocks, and an access outside a tensor may hit another one unseen.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.kernel_bench.malformed import GROUPS, Inputs


def main() -> int:
    """Run the groups one after the other; print their names as they end."""
    parser = argparse.ArgumentParser(description="Runs every operator over malformed inputs, for a memory checker.")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="which; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    make = Inputs(torch.device(options.device))
    for name in options.groups or GROUPS:
        GROUPS[name](make)
        if make.device.type == "cuda":
            torch.cuda.synchronize()
        sys.stdout.write(f"{name} done\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
