"""The learned timing of rounds where greedy requests are followed by sampled ones, on virtual time.

    python benchmarks/changing_requests.py [--sessions 1 4 16] [--seeds 4] [--phases 6 6] [--jobs 2] [--json]

Clients send one request after the other: greedy ones, and from then on sampled ones, of which drafts guess fewer. The
learned choice of ways stands beside each way alone. The coordinator's scheduler, loops and mirrors run with fake
workers on a clock that jumps, as in policies.py; benchmarks/simulation/changing_requests.py has what is simulated.
"""

import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.simulation.changing_requests import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
