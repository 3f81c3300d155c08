"""Other weights for a target that serves: read and checked beside the rounds, put in place between two of them.

    check   a thread reads the checkpoint, the model goes on      -> its version, or why it cannot be run with
    swap    on the round thread, with nothing in flight            -> sessions closed, KV forgotten, weights copied

A swap that fails once it has begun leaves a mixture: the round thread ends with it, and the process with that.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from outrider.engine.model_runner import ModelRunner
from outrider.engine.weight_reload import CheckedWeights, check_weights
from outrider.engine.weight_version import weights_version
from outrider.errors import CheckpointError, FieldViolation, InvalidRequest, WorkerRefused, WorkerUnavailable
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.rounds.thread import RoundThread
from outrider.v1 import common_pb2, target_pb2

logger = logging.getLogger(__name__)


class Reloader:
    """Knows what a target's model runs with, and changes it.

    Args:
        thread: that runs the model.
    """

    def __init__(self, thread: RoundThread) -> None:
        self._thread = thread
        self._runner: ModelRunner | None = None
        self._one_at_a_time = asyncio.Lock()
        self._checked: CheckedWeights | None = None
        self.running = common_pb2.Weights()
        """Weights of the model; the version is empty while unknown."""

    def load(self, folder: Path, make: Callable[[], ModelRunner]) -> ModelRunner:
        """Load the model and read the version of its weights meanwhile; on the round thread.

        Args:
            folder: of its checkpoint.
            make: loads it.

        Raises:
            CheckpointError: the folder cannot be served.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="weights-version") as pool:
            version: Future[str] = pool.submit(weights_version, folder)
            # Of two errors its own says more.
            runner = self._runner = make()
            try:
                self.running = common_pb2.Weights(version=version.result(), path=str(folder))
            except BaseException:
                runner.close()
                raise
        self._thread.weights = self.running.version
        return runner

    async def reload(self, request: target_pb2.ReloadRequest) -> target_pb2.ReloadResponse:
        """Check, or check and swap, the weights.

        Raises:
            InvalidRequest: no folder is named.
            CheckpointError: the weights do not fit, or are not those that were asked for; nothing has changed.
            WorkerRefused: a later reload has been here; nothing has changed.
            WorkerUnavailable: the worker stops, or could not go on.
        """
        if not request.path:
            raise InvalidRequest([FieldViolation("path", "empty: the folder of a checkpoint needed")])
        async with self._one_at_a_time:
            wanted = request.swap
            if request.HasField("swap") and wanted.version == self.running.version:
                # It may have been told by another coordinator; or started again with these.
                self.running.reloads = max(self.running.reloads, wanted.reloads)
                return target_pb2.ReloadResponse(found=self.running, running=self.running)
            if request.HasField("swap") and wanted.reloads <= self.running.reloads:
                raise WorkerRefused(
                    f"reload {self.running.reloads} has brought weights {self.running.version} since: who orders "
                    f"reload {wanted.reloads} has not heard of it"
                )
            checked = await self._check(Path(request.path))
            found = common_pb2.Weights(version=checked.version, path=str(checked.folder), reloads=wanted.reloads)
            if not request.HasField("swap"):
                return target_pb2.ReloadResponse(found=found, running=self.running)
            if found.version != wanted.version:
                raise CheckpointError(
                    f"{checked.folder} holds weights {found.version}, {wanted.version} needed: it is another folder on "
                    "this machine, or was written since"
                )
            swap_ns = await asyncio.wrap_future(self._thread.run_alone(lambda own: self._swap(own, checked, found)))
            logger.info("weights %s of %s are in place after %.3f s", found.version, found.path, swap_ns / 1e9)
            return target_pb2.ReloadResponse(found=found, running=self.running, swap_ns=swap_ns)

    async def _check(self, folder: Path) -> CheckedWeights:
        """Return the last check's result if it still holds, else check again."""
        if self._runner is None:
            raise WorkerUnavailable("the model is not loaded yet")
        if (known := self._checked) is not None and known.folder == folder:
            try:
                await asyncio.to_thread(known.check_unchanged)
            except CheckpointError:
                pass
            else:
                return known
        self._checked = None
        try:
            self._checked = await asyncio.to_thread(check_weights, self._runner.running(), folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
        return self._checked

    def _swap(self, rounds: RoundLoop, checked: CheckedWeights, found: common_pb2.Weights) -> int:
        begin_ns = time.perf_counter_ns()
        rounds.reload(checked.folder)
        # What was written while it was copied is a mixture of nobody's.
        checked.check_unchanged()
        self.running, self._thread.weights = found, found.version
        return time.perf_counter_ns() - begin_ns
