"""Several processes of one host that run one model: this process leads, the others follow.

    leader     rank 0, the worker itself: plans, chooses, answers. Sends every command to all followers, then runs it
    follower   ranks 1 to N - 1, `python -m outrider.engine.tensor_parallel_rank`: runs the same commands in the same
               order on its own part of the model, on its own GPU

    leader   start_ranks ─────────── least(slots) ── connect ── lead("launch", step) ... ── close
    follower    started with a setup ── least(slots) ── connect ── follow: launch(step) ...

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.engine.checkpoint import read_checkpoint
from outrider.engine.config import EngineConfig
from outrider.engine.decoder_spec import DecoderSpec
from outrider.engine.decoder_weights import check_world_size
from outrider.engine.tensor_parallel_collectives import Collectives, Meeting, connect
from outrider.engine.weight_source import WeightSource
from outrider.errors import CheckpointError, OutriderError, WorkerUnavailable

logger = logging.getLogger(__name__)

Connection = multiprocessing.connection.Connection

# A rank that is alive and does not answer, a step that never ends: noticed by time alone. A first step may compile.
STEP_TIMEOUT_S = 120.0
# From the first sign of a dead rank to the end of this process, where it hangs in something that cannot be let go.
_LAST_RESORT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.25


class Ranks(Protocol):
    """One rank's way to the others.

    Attributes:
        rank: of this process.
        world_size: ranks of the model.
        device: of this rank.
        failed: done with the reason once another rank is lost.
    """

    rank: int
    world_size: int
    device: torch.device
    failed: "Future[None]"

    def least(self, value: int) -> int:
        """The least of the values that all ranks give; all must call it, as often."""
        ...

    def connect(self, *, letter_bytes: int, gathered_bytes: int, fixed: bool) -> Collectives:
        """Joins the ranks' sums; see `outrider.engine.tensor_parallel_collectives.connect`."""
        ...

    def lead(self, name: str, payload: object = None) -> None:
        """Sends a command to all followers, which they run after the ones before; nothing on a follower."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Around what only compiles: see `Collectives.apart`."""
        ...

    def guard(self, timeout_s: float = STEP_TIMEOUT_S) -> contextlib.AbstractContextManager[None]:
        """Around a wait for what all ranks do.

        Raises (as it is left):
            WorkerUnavailable: a rank was lost meanwhile or before, or the wait took too long.
        """
        ...

    def close(self) -> None:
        """Ends the followers and leaves the group."""
        ...


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a follower is told first.

    Attributes:
        meeting: where it meets the others, with its rank.
        config: of the model; its device names no number.
        source: of its weights; None for the files of the checkpoint.
        log_level: of the root logger.
    """

    meeting: Meeting
    config: EngineConfig
    source: WeightSource | None
    log_level: int


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank runs: the GPU of its number among those that this process sees, or the CPU."""
    return torch.device("cuda", rank) if config.device == "cuda" else torch.device(config.device)


def start_ranks(config: EngineConfig, source: WeightSource | None = None) -> "Leader | Alone":
    """Starts the followers of `config.tensor_parallel_size` ranks; they load while the leader does.

    Args:
        config: of the model.
        source: of its weights, which can be pickled; by default the files of the checkpoint.

    Raises:
        CheckpointError: the model does not divide into so many parts, or there are fewer GPUs.
    """
    wanted = config.tensor_parallel_size
    if wanted == 1:
        return Alone(torch.device(config.device))
    check_world_size(DecoderSpec.of(read_checkpoint(config)[0]), wanted)
    if config.device == "cuda" and torch.cuda.device_count() < wanted:
        raise CheckpointError(
            f"--tensor-parallel-size {wanted} given, {torch.cuda.device_count()} GPUs are here "
            "(CUDA_VISIBLE_DEVICES may hide others)"
        )
    return Leader(config, source)


class Alone:
    """One process that runs the whole model.

    Attributes:
        rank: 0.
        world_size: 1.
        device: of the process.
        failed: never done.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size, self.device = 0, 1, device
        self.failed: Future[None] = Future()

    def least(self, value: int) -> int:
        """The value."""
        return value

    def connect(self, *, letter_bytes: int, gathered_bytes: int, fixed: bool) -> Collectives:
        """There is nobody to connect to."""
        raise AssertionError("one rank has no others")

    def lead(self, name: str, payload: object = None) -> None:
        """Nobody follows."""

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """There is nobody to wait for."""
        return contextlib.nullcontext()

    def guard(self, timeout_s: float = STEP_TIMEOUT_S) -> contextlib.AbstractContextManager[None]:
        """Nobody can be lost."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nobody is to be ended."""


class Leader:
    """Rank 0's side.

    Attributes:
        rank: 0.
        world_size: ranks of the model.
        device: of this rank.
        failed: done with the reason once a rank is lost; cancelled when all ended as they should.
    """

    def __init__(self, config: EngineConfig, source: WeightSource | None) -> None:
        self.rank, self.world_size = 0, config.tensor_parallel_size
        self.device = rank_device(config, 0)
        self.failed: Future[None] = Future()
        self._changed = threading.Condition()
        self._error: OutriderError | None = None
        self._closing = False
        self._deadline: float | None = None
        self._collectives: Collectives | None = None
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

    @property
    def pids(self) -> list[int]:
        """Process numbers of the followers."""
        return [follower.pid for follower in self._followers]

    def least(self, value: int) -> int:
        """The least of the values that all ranks give, once all have given theirs.

        Raises:
            CheckpointError: a rank could not load its part, with the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or all(f.values for f in self._followers))
            self._raise_if_failed()
            agreed = min([value, *(follower.values.pop(0) for follower in self._followers)])
        self._send(("least", agreed))
        return agreed

    def connect(self, *, letter_bytes: int, gathered_bytes: int, fixed: bool) -> Collectives:
        """Joins the ranks' sums, once all have loaded.

        Raises:
            CheckpointError: a rank could not load its part, with the reason.
            WorkerUnavailable: a rank was lost.
        """
        self.least(0)
        with self.guard():
            self._collectives = connect(
                self._meeting,
                self.device,
                letter_bytes=letter_bytes,
                gathered_bytes=gathered_bytes,
                fixed=fixed,
            )
        return self._collectives

    def lead(self, name: str, payload: object = None) -> None:
        """Sends a command to all followers.

        Raises:
            WorkerUnavailable: a rank is lost.
        """
        self._raise_if_failed()
        self._send((name, payload))

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Around what only compiles: see `Collectives.apart`."""
        return contextlib.nullcontext() if self._collectives is None else self._collectives.apart()

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
        """Ends the followers, by word and then by force, and leaves the group."""
        with self._changed:
            already, self._closing = self._closing, True
            # Without collectives the others are still loading, and do not listen.
            by_force = self._error is not None or self._collectives is None
        if already:
            return
        self.failed.cancel()
        for follower in self._followers:
            follower.stop(by_force=by_force)
        if self._collectives is not None:
            self._collectives.close()
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
        """Takes what followers say, and notices those that end or keep everybody waiting."""
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
        """Tells everybody, and makes sure that nothing waits for the lost rank for ever."""
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
        if self._collectives is not None:
            self._collectives.abort()
        if self.failed.set_running_or_notify_cancel():
            self.failed.set_exception(self._copy_of_error())

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
                env=_environment(),
                # Ctrl-C at the terminal reaches the leader alone, which then ends the followers.
                start_new_session=True,
            )
        self.connection.send(setup)
        logger.info("tensor-parallel rank %d is process %d", self.rank, self.pid)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ending(self) -> str:
        """How the process ended, a moment after its end was noticed."""
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def stop(self, *, by_force: bool) -> None:
        """Ends the process."""
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
        """Ends the process without a word."""
        self._process.kill()


def _environment() -> dict[str, str]:
    # Followers use this interpreter's packages even where outrider is found through sys.path alone.
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


class Follower:
    """A follower's side.

    Attributes:
        rank: of this process.
        world_size: ranks of the model.
        device: of this rank.
        failed: never done: a follower ends with its leader.
    """

    def __init__(self, connection: Connection, setup: Setup) -> None:
        self.failed: Future[None] = Future()
        self.rank, self.world_size = setup.meeting.rank, setup.meeting.world_size
        self.device = rank_device(setup.config, self.rank)
        self._meeting = setup.meeting
        self._connection = connection
        self._collectives: Collectives | None = None

    def least(self, value: int) -> int:
        """The least of the values that all ranks give."""
        self._connection.send(("value", value))
        name, agreed = self._connection.recv()
        assert name == "least", f"the leader said {name}, not what the ranks agreed on"
        return agreed

    def connect(self, *, letter_bytes: int, gathered_bytes: int, fixed: bool) -> Collectives:
        """Joins the ranks' sums, once all have loaded."""
        self.least(0)
        self._collectives = connect(
            self._meeting,
            self.device,
            letter_bytes=letter_bytes,
            gathered_bytes=gathered_bytes,
            fixed=fixed,
        )
        return self._collectives

    def lead(self, name: str, payload: object = None) -> None:
        """Nothing: it is the leader who leads."""

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Around what only compiles: see `Collectives.apart`."""
        return contextlib.nullcontext() if self._collectives is None else self._collectives.apart()

    def guard(self, timeout_s: float = STEP_TIMEOUT_S) -> contextlib.AbstractContextManager[None]:
        """Nothing: a follower ends with its leader, which watches all."""
        return contextlib.nullcontext()

    def follow(self, commands: Mapping[str, Callable[[Any], object]]) -> None:
        """Runs what the leader sends until it says stop, or is gone.

        Args:
            commands: by name; each takes the payload.
        """
        while True:
            name, payload = self._connection.recv()
            if name == "stop":
                return
            commands[name](payload)

    def close(self) -> None:
        """Leaves the group."""
        if self._collectives is not None:
            self._collectives.close()
