"""The process of one rank that follows: `python -m outrider.engine.tensor_parallel_rank FD`.

FD is its end of the socket pair to the leader. Standard input is a pipe that nothing is written to: it closes when the
leader's process ends, however it ends, and then this one ends too, whatever it is waiting for.
"""

import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from outrider.engine.model_runner import ModelRunner
from outrider.engine.tensor_parallel_collectives import Collectives, SumOptions, connect
from outrider.engine.tensor_parallel_ranks import Ranks, Setup, rank_device
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)

# After a command a follower on a GPU looks for the next one without sleeping: longer than most steps take.
_WAKEFUL_S = 0.05


class Follower(Ranks):
    """A follower's side. It never learns of a loss: it ends with its leader."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        meeting = setup.meeting
        super().__init__(rank_device(setup.config, meeting.rank), rank=meeting.rank, world_size=meeting.world_size)
        self._meeting, self._connection = meeting, connection

    def least(self, value: int) -> int:
        """The least of the values that all ranks give."""
        self._connection.send(("value", value))
        name, agreed = self._connection.recv()
        assert name == "least", f"the leader said {name}, not what the ranks agreed on"
        return agreed

    def connect(self, options: SumOptions) -> Collectives:
        """Join the ranks' sums, once all have loaded."""
        self.least(0)
        self._collectives = connect(self._meeting, self.device, options)
        return self._collectives

    def follow(self, commands: Mapping[str, Callable[[Any], object]]) -> None:
        """Run what the leader sends until it says stop, or is gone.

        Args:
            commands: by name; each takes the payload.
        """
        while True:
            self._await_command()
            name, payload = self._connection.recv()
            if name == "stop":
                return
            commands[name](payload)

    def _await_command(self) -> None:
        """Spin until a command comes, for a while at most: a sleeping process takes long to wake."""
        if self.device.type != "cuda":
            return
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        deadline = time.monotonic() + _WAKEFUL_S
        while not poll.poll(0) and time.monotonic() < deadline:
            pass


def main() -> None:
    """Load the model, then run the leader's commands."""
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
            is_refusal = isinstance(error, OutriderError)
            connection.send(("refused", str(error)) if is_refusal else ("broken", f"{type(error).__name__}: {error}"))
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


def _end_with_the_leader() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
