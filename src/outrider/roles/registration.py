"""A worker's leases: one with every coordinator of a list that may change, and how it leaves them (torch-free)."""

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from outrider import rpc
from outrider.addresses import AddressFollower, Resolve
from outrider.errors import WorkerRefused, WorkerUnavailable
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc

logger = logging.getLogger(__name__)

Load = Callable[[], common_pb2.WorkerLoad]
"""Return the worker's load; called once a heartbeat."""

_FIRST_LEASE_S = 10.0
SHORTEST_HEARTBEAT_S = 0.01
"""No coordinator is told more often, whatever it asks for."""
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
_MIN_BACKOFF_S = 0.1
# A coordinator that restarts has its workers back within this time of its own start.
_MAX_BACKOFF_S = 1.0


class Registration:
    """One coordinator's leases, one after the other.

    A coordinator that cannot be reached or goes away is dialled again, with growing pauses. So is one that refuses, if
    it has given a lease before, or the worker serves others.

    Args:
        tls: own proof, of the introduction's role; the coordinator has to prove its own. None talks in the clear.
        serves_others: whether the worker is of use without this coordinator.
    """

    def __init__(
        self,
        address: str,
        introduction: registry_pb2.WorkerIntroduction,
        load: Load,
        *,
        tls: TlsConfig | None = None,
        serves_others: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address = address
        self._tls = tls
        self._introduction = introduction
        self._load = load
        self._serves_others = serves_others
        self._leaving = asyncio.Event()
        self.leases = 0  # that it has given so far
        self.holds_lease = False

    def leave(self) -> None:
        """Say at once that the worker drains; `keep` returns when the coordinator has ended the lease."""
        self._leaving.set()

    async def keep(self) -> None:
        """Hold a lease until cancelled, or until the worker leaves.

        Raises:
            WorkerRefused: the coordinator does not take this worker, with its reason.
        """
        pause_s = _MIN_BACKOFF_S
        while True:
            held_before = self.leases
            try:
                await self._hold()
                reason = "the coordinator ended the lease"
            except WorkerUnavailable as error:
                reason = str(error)
            except WorkerRefused as error:
                if not self.leases and not self._serves_others():
                    raise
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except TimeoutError:
                reason = "no answer"
            if self._leaving.is_set():
                return
            pause_s = _MIN_BACKOFF_S if self.leases > held_before else min(pause_s * 2, _MAX_BACKOFF_S)
            logger.warning("not registered at %s: %s; trying again", self.address, reason)
            # Jitter: the workers of a restarted coordinator should not come back as one.
            if await self._leaves_within(pause_s * random.uniform(0.7, 1.3)):
                return

    async def _hold(self) -> None:
        """One stream, from introduction to its end."""
        lease: asyncio.Future[registry_pb2.Lease] = asyncio.get_running_loop().create_future()
        async with rpc.open_channel(self.address, tls=self._tls, peer=Role.COORDINATOR) as channel:
            call = registry_pb2_grpc.RegistryServiceStub(channel).Register(self._reports(lease))
            try:
                async with asyncio.timeout(_FIRST_LEASE_S) as first_answer:
                    async for answer in call:
                        # What gRPC gives for bytes that are no message.
                        if answer is None:
                            raise WorkerUnavailable("its lease cannot be read")
                        first_answer.reschedule(None)
                        if not lease.done():
                            lease.set_result(answer)
                            self.leases += 1
                            self.holds_lease = True
                            logger.info("registered at %s as %s", self.address, self._introduction.worker_id)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    logger.error("%s refuses this worker: %s", self.address, error.details())
                    raise WorkerRefused(f"{self.address}: {error.details()}") from error
                raise
            finally:
                self.holds_lease = False
                call.cancel()
                lease.cancel()

    async def _reports(self, lease: asyncio.Future[registry_pb2.Lease]) -> AsyncIterator[registry_pb2.WorkerReport]:
        if (load := self._load()).HasField("weights"):
            # Those that the worker was started with may have been replaced.
            self._introduction.model.weights.CopyFrom(load.weights)
        yield registry_pb2.WorkerReport(introduction=self._introduction)
        interval_s = max((await lease).heartbeat_interval_ms / 1e3, SHORTEST_HEARTBEAT_S)
        while True:
            is_leaving = self._leaving.is_set()
            yield registry_pb2.WorkerReport(load=self._load(), draining=is_leaving)
            if is_leaving:
                await asyncio.sleep(interval_s)
            else:
                await self._leaves_within(interval_s)

    async def _leaves_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
        return self._leaving.is_set()


_Held = tuple[Registration, asyncio.Task[None]]


class Registrar:
    """Keeps a worker registered with every coordinator of a list; those that leave the list are left in order.

    Args:
        resolve: gives the list; asked every second.
        drain_s: longest that a coordinator gets to end its sessions here, or move them, when it is left.
    """

    def __init__(
        self,
        resolve: Resolve,
        introduction: registry_pb2.WorkerIntroduction,
        load: Load,
        *,
        drain_s: float,
        tls: TlsConfig | None = None,
    ) -> None:
        self._introduction = introduction
        self._load = load
        self._tls = tls
        self._drain_s = drain_s
        self._followed = AddressFollower(resolve, join=self._join, leave=self._leave)
        # Done with WorkerRefused when a coordinator does not take this worker, and none has before.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Begin to register."""
        self._followed.start()

    async def close(self, *, in_order: bool = True) -> None:
        """Leave every coordinator.

        Args:
            in_order: tells them first and lets them move their sessions away, within `drain_s`.
        """
        await self._followed.close(functools.partial(self._leave, in_order=in_order))
        self.failed.cancel()

    def _join(self, address: str) -> _Held:
        registration = Registration(
            address,
            self._introduction,
            self._shared_load,
            tls=self._tls,
            serves_others=lambda: any(other.leases for other, _ in self._followed.members.values()),
        )
        task = asyncio.create_task(registration.keep(), name=f"registration at {address}")
        task.add_done_callback(self._note_end)
        return registration, task

    def _shared_load(self) -> common_pb2.WorkerLoad:
        load = self._load()
        load.coordinators = sum(registration.holds_lease for registration, _ in self._followed.members.values())
        return load

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _leave(self, held: _Held, *, in_order: bool = True) -> None:
        registration, task = held
        registration.leave()
        if in_order and registration.holds_lease:
            await asyncio.wait([task], timeout=self._drain_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
