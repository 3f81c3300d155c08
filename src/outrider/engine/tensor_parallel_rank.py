"""The process of one rank that follows: `python -m outrider.engine.tensor_parallel_rank FD`.

FD is its end of the socket pair to the leader. Standard input is a pipe that nothing is written to: it closes when the
leader's process ends, however it ends, and then this one ends too, whatever it is waiting for.
"""

import contextlib
import logging
import os
import sys
import threading
from multiprocessing.connection import Connection

import torch

from outrider.engine.model_runner import ModelRunner
from outrider.engine.tensor_parallel import Follower, Setup
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)


def main() -> None:
    """Loads, then does what it is told."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    threading.Thread(target=_end_with_the_leader, name="leader", daemon=True).start()
    try:
        setup: Setup = connection.recv()
        _run(connection, setup)
    except EOFError:
        code = 0  # the leader is gone, and has said why where it is read
    except BaseException as error:
        logger.exception("this rank ends")
        with contextlib.suppress(OSError):
            connection.send(("refused" if isinstance(error, OutriderError) else "broken", _told(error)))
        code = 1
    else:
        code = 0
    # Not sys.exit: what torch tears down at the end may wait for ranks that are gone.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _run(connection: Connection, setup: Setup) -> None:
    rank = setup.meeting.rank
    logging.basicConfig(
        level=setup.log_level, stream=sys.stderr, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s %(message)s"
    )
    ranks = Follower(connection, setup)
    if ranks.device.type == "cuda":
        # Triton launches on the current device.
        torch.cuda.set_device(ranks.device)
    runner = ModelRunner(setup.config, source=setup.source, ranks=ranks)
    ranks.follow(runner.commands())


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"


def _end_with_the_leader() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
