"""Messages that nobody should send, at every service of a whole one in this process.

    python benchmarks/fuzz.py [--messages 10000] [--only TargetService DraftService] [--seed 1]

Real servers, real streams, a model so small that a step costs a millisecond. Messages are made from the protocol's own
descriptors: fields at their boundaries, columns of wrong lengths, several openings in one, bytes cut, flipped and
spliced. Every call has to end with a status that is right for its bytes, or to be served; now and then a correct
request has to get the tokens that it got at first; and in the end sessions, KV slots, tasks, files and memory have to
be where they were. The other direction: `RoundResults`, `DraftGrowth` and `WorkerReport` are workers that talk to a
coordinator so, `Lease` are coordinators that answer a worker so.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Run the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Read when gRPC is imported: it tells of every broken connection otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from benchmarks.fuzz_bench.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
