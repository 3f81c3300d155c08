"""Several processes of one host that run one model: this process leads, the others follow.

    leader     rank 0, the worker itself: plans, chooses, answers. Sends every command to all followers, then runs it
    follower   ranks 1 to N - 1, `python -m outrider.engine.tensor_parallel_rank`: runs the same commands in the same
               order on its own part of the model, on its own GPU

    leader   start_ranks ─────────── least(slots) ── connect ── lead("packed", shape) ... ── close
    follower    started with a setup ── least(slots) ── connect ── follow: packed(shape) ...

Commands go over one socket pair a follower. It ends with the process at its other end however that ended, and so does
the follower's standard input: a rank that dies is noticed at once, by whoever is left. The leader then ends the other
followers, lets go what waits for them on the device, and fails with the reason.
"""

import contextlib
import logging
import multiprocessing.connection
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_weights import check_world_size
from outrider.engine.tensor_parallel_collectives import Collectives, Meeting, SumOptions, connect
from outrider.engine.tensor_parallel_ranks import STEP_TIMEOUT_S, Ranks, Setup, rank_device
from outrider.engine.weight_source import WeightSource
from outrider.errors import CheckpointError, OutriderError, WorkerUnavailable
from outrider.roles.role_process import child_environment

logger = logging.getLogger(__name__)

# From the first sign of a dead rank to the end of this process, where it hangs in something that cannot be let go.
_LAST_RESORT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.25
# Large checkpoints on slow disks take minutes to load; a rank that hangs there is named this often.
_LOAD_NOTICE_S = 60.0


class Leader(Ranks):
    """Rank 0's side; `failed` is cancelled when all ended as they should."""

    def __init__(self, config: EngineConfig, source: WeightSource | None) -> None:
        super().__init__(rank_device(config, 0), world_size=config.tensor_parallel_size)
        self._changed = threading.Condition()
        self._error: OutriderError | None = None
        self._closing = False
        self._deadline: float | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-ranks-"))
        store_path = str(self._folder / secrets.token_hex(8))
        self._meeting = Meeting(rank=0, world_size=self.world_size, store_path=store_path)
        self._followers: list[_Process] = []
        try:
            for rank in range(1, self.world_size):
                meeting = Meeting(rank=rank, world_size=self.world_size, store_path=store_path)
                level = logging.getLogger().getEffectiveLevel()
                self._followers.append(_Process(Setup(meeting=meeting, config=config, source=source, log_level=level)))
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def least(self, value: int) -> int:
        """The least of the values that all ranks give, once all have given theirs.

        Raises:
            CheckpointError: a rank could not load its part, with the reason.
        """
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._error is not None or all(f.values for f in self._followers), _LOAD_NOTICE_S
            ):
                missing = ", ".join(str(follower.rank) for follower in self._followers if not follower.values)
                logger.warning("still waiting for tensor-parallel rank %s to load", missing)
            self._raise_if_failed()
            agreed = min([value, *(follower.values.pop(0) for follower in self._followers)])
        self._send(("least", agreed))
        return agreed

    def connect(self, options: SumOptions) -> Collectives:
        """Join the ranks' sums, once all have loaded.

        Raises:
            CheckpointError: a rank could not load its part, with the reason.
            WorkerUnavailable: a rank was lost.
        """
        self.least(0)
        with self.guard():
            self._collectives = connect(self._meeting, self.device, options)
        return self._collectives

    def lead(self, name: str, payload: object = None) -> None:
        """Send a command to all followers; WorkerUnavailable where one is lost."""
        self._raise_if_failed()
        self._send((name, payload))

    @contextlib.contextmanager
    def guard(self, timeout_s: float = STEP_TIMEOUT_S) -> Iterator[None]:
        """Around a wait for what all ranks do; whatever goes wrong in it because a rank is lost, the loss is raised.

        Raises:
            WorkerUnavailable: a rank was lost meanwhile or before, or the wait took too long.
        """
        outer, deadline = self._deadline, time.monotonic() + timeout_s
        self._deadline = deadline if outer is None else min(outer, deadline)
        try:
            yield
        except Exception as error:
            # A lost rank breaks the sums of the others; what is to be told is who was lost, once it is known.
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, _POLL_S)
            if self._error is not None:
                raise self._copy_of_error() from error
            raise
        finally:
            self._deadline = outer
        self._raise_if_failed()

    def close(self) -> None:
        """End the followers, by word and then by force, and leave the group."""
        with self._changed:
            already, self._closing = self._closing, True
            # Without collectives the others are still loading, and do not listen.
            by_force = self._error is not None or self._collectives is None
        if already:
            return
        self.failed.cancel()
        for follower in self._followers:
            follower.stop(by_force=by_force)
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: tuple[str, object]) -> None:
        for follower in self._followers:
            try:
                follower.connection.send(message)
            except OSError as error:
                # The watcher reads what the follower said before it ended.
                with self._changed:
                    self._changed.wait_for(lambda: self._error is not None, _STOP_TIMEOUT_S)
                self._fail(f"tensor-parallel rank {follower.rank} {follower.ending()}")
                raise self._copy_of_error() from error

    def _watch(self) -> None:
        """Take the followers' messages, and notice those that end or keep everybody waiting."""
        by_connection: dict[Any, _Process] = {follower.connection: follower for follower in self._followers}
        while not self._closing and self._error is None:
            for ready in multiprocessing.connection.wait(list(by_connection), _POLL_S):
                follower = by_connection[ready]
                try:
                    kind, value = follower.connection.recv()
                except (EOFError, OSError):
                    self._fail(f"tensor-parallel rank {follower.rank} {follower.ending()}")
                    return
                if kind == "value":
                    with self._changed:
                        follower.values.append(value)
                        self._changed.notify_all()
                else:
                    self._fail(f"tensor-parallel rank {follower.rank}: {value}", refused=kind == "refused")
                    return
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._fail("the tensor-parallel ranks have not answered in time")

    def _fail(self, reason: str, *, refused: bool = False) -> None:
        """Tell everybody, and make sure that nothing waits for the lost rank for ever."""
        with self._changed:
            if self._closing or self._error is not None:
                return
            self._error = CheckpointError(reason) if refused else WorkerUnavailable(reason)
            self._changed.notify_all()
        logger.error("%s", reason)
        timer = threading.Timer(_LAST_RESORT_S, self._end_process)
        timer.daemon = True
        timer.start()
        for follower in self._followers:
            follower.kill()
        if self.failed.set_running_or_notify_cancel():
            self.failed.set_exception(self._copy_of_error())
        if self._collectives is not None:
            self._collectives.abort()

    def _end_process(self) -> None:
        if not self._closing:
            logger.critical("a rank is lost and this process does not come to its end by itself: it is ended")
            os._exit(1)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._copy_of_error()

    def _copy_of_error(self) -> OutriderError:
        assert self._error is not None
        return type(self._error)(str(self._error))


class _Process:
    """A follower as its leader sees it."""

    def __init__(self, setup: Setup) -> None:
        self.rank = setup.meeting.rank
        self.values: list[int] = []
        self.connection, theirs = multiprocessing.connection.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.engine.tensor_parallel_rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
                # Ctrl-C at the terminal reaches the leader alone, which then ends the followers.
                start_new_session=True,
            )
        self.connection.send(setup)
        logger.info("tensor-parallel rank %d is process %d", self.rank, self._process.pid)

    def ending(self) -> str:
        """Return how the process ended, waiting a moment for its exit status."""
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def stop(self, *, by_force: bool) -> None:
        """End the process."""
        if by_force:
            self._process.kill()
        else:
            with contextlib.suppress(OSError):
                self.connection.send(("stop", None))
        assert self._process.stdin is not None
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()
        self.connection.close()

    def kill(self) -> None:
        """End the process without a word."""
        self._process.kill()


def start_ranks(config: EngineConfig, source: WeightSource | None = None) -> Ranks:
    """Start the followers of `config.tensor_parallel_size` ranks; they load while the leader does.

    Args:
        source: of its weights, which can be pickled; by default the files of the checkpoint.

    Raises:
        CheckpointError: the model does not divide into so many parts, or there are fewer GPUs.
    """
    wanted = config.tensor_parallel_size
    if wanted == 1:
        return Ranks(torch.device(config.device))
    check_world_size(read_checkpoint(config)[0], wanted)
    if config.device == "cuda" and torch.cuda.device_count() < wanted:
        raise CheckpointError(
            f"--tensor-parallel-size {wanted} given, {torch.cuda.device_count()} GPUs are here "
            "(CUDA_VISIBLE_DEVICES may hide others)"
        )
    return Leader(config, source)
