"""What each source of growth is worth where text repeats itself, through the whole service.

    python benchmarks/sources.py                                            the embedded pair on a CPU
    python benchmarks/sources.py --mixtures off model/ngram                 one worker a source
    python benchmarks/sources.py --device cuda --gpus 2 --shapes 8b 160m    two GPUs, the widened pair

Three workloads (benchmarks/source_bench/workloads.py): code edits of a given file, answers that quote a passage, and
the same requests twice. Each mixture of sources has drafts of its own, started anew, so that every trie begins empty;
requests of all mixtures are the same, and so have to be their outputs. Ratios are to `off` in the same run. Each pass
says what its draft did and what the coordinator made of it (benchmarks/source_bench/readings.py).
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs the command line."""
    # Of this folder only the packages below are meant: transformers looks for a package called kernels.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from benchmarks.source_bench.command import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
