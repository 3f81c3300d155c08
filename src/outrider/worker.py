"""What both workers do as processes: introduce themselves to coordinators and keep a lease with each (torch-free)."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from outrider import __version__, rpc
from outrider.errors import WorkerRefused
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig
from outrider.v1 import common_pb2, registry_pb2, registry_pb2_grpc

if TYPE_CHECKING:
    from outrider.engine.checkpoint import ModelCard

logger = logging.getLogger(__name__)

Load = Callable[[], common_pb2.WorkerLoad]
"""What the worker is doing now; called once a heartbeat."""

_SWITCH_INTERVAL_S = 0.0005
_FIRST_LEASE_S = 10.0
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


def share_interpreter() -> None:
    """Lets the thread of the event loop have the interpreter soon while another thread computes.

    By default a thread gives the interpreter up after 5 ms. A message passes through it several times, so that on two
    busy cores growth and commits arrived in bursts, up to 70 ms late; docs/performance.md has what this changed.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def model_info(card: ModelCard) -> common_pb2.ModelInfo:
    """A model's card as it travels."""
    return common_pb2.ModelInfo(
        name=card.name,
        vocab_size=card.vocab_size,
        tokenizer_hash=card.tokenizer_hash,
        dtype=card.dtype,
        max_model_len=card.max_model_len,
        eos_token_ids=card.eos_token_ids,
    )


def introduce(
    role: registry_pb2.WorkerRole,
    *,
    address: str,
    model: common_pb2.ModelInfo,
    limits: registry_pb2.WorkerLimits,
) -> registry_pb2.WorkerIntroduction:
    """An introduction with an id of its own: make one per process start.

    Args:
        role: draft or target.
        address: host:port of the worker's server, as coordinators can dial it.
        model: what it serves.
        limits: how much of it.
    """
    name = registry_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
    return registry_pb2.WorkerIntroduction(
        worker_id=f"{name}-{secrets.token_hex(6)}",
        role=role,
        address=address,
        model=model,
        limits=limits,
        version=__version__,
    )


async def keep_registered(
    coordinator_address: str,
    introduction: registry_pb2.WorkerIntroduction,
    load: Load,
    *,
    tls: TlsConfig | None = None,
) -> None:
    """Holds a lease with one coordinator until cancelled: introduces the worker, then reports its load.

    A coordinator that cannot be reached or goes away is dialled again, with growing pauses up to 2 s. Once it has
    given a lease, a refusal is retried as well: it may not have noticed yet that the former lease is over.

    Args:
        coordinator_address: host:port.
        introduction: sent at each registration.
        load: called for each heartbeat.
        tls: own proof, of the introduction's role; the coordinator has to prove its own. None talks in the clear.

    Raises:
        WorkerRefused: the coordinator does not take this worker, with its reason.
    """
    registration = _Registration(coordinator_address, introduction, load, tls)
    pause_s = _MIN_BACKOFF_S
    while True:
        held_before = registration.leases
        try:
            await registration.hold()
            reason = "the coordinator ended the lease"
        except WorkerRefused as error:
            if not registration.leases:
                raise
            reason = str(error)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            reason = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no answer"
        pause_s = _MIN_BACKOFF_S if registration.leases > held_before else min(pause_s * 2, _MAX_BACKOFF_S)
        logger.warning("not registered at %s: %s; trying again", coordinator_address, reason)
        # Jitter: the workers of a restarted coordinator should not come back as one.
        await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))


async def keep_registered_everywhere(
    coordinator_addresses: Sequence[str],
    introduction: registry_pb2.WorkerIntroduction,
    load: Load,
    *,
    tls: TlsConfig | None = None,
) -> None:
    """`keep_registered` with several coordinators at once, until cancelled or one refuses.

    Raises:
        WorkerRefused: see `keep_registered`.
    """
    tasks = [
        asyncio.create_task(keep_registered(address, introduction, load, tls=tls), name=f"registration at {address}")
        for address in coordinator_addresses
    ]
    try:
        if not tasks:
            await asyncio.Event().wait()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Registration:
    """One coordinator's leases, one after the other."""

    def __init__(
        self, address: str, introduction: registry_pb2.WorkerIntroduction, load: Load, tls: TlsConfig | None
    ) -> None:
        self._address = address
        self._introduction = introduction
        self._load = load
        self._tls = tls
        self.leases = 0

    async def hold(self) -> None:
        """One stream, from introduction to its end."""
        lease: asyncio.Future[registry_pb2.Lease] = asyncio.get_running_loop().create_future()
        async with rpc.open_channel(self._address, tls=self._tls, peer=Role.COORDINATOR) as channel:
            call = registry_pb2_grpc.RegistryServiceStub(channel).Register(self._reports(lease))
            try:
                async with asyncio.timeout(_FIRST_LEASE_S) as first_answer:
                    async for answer in call:
                        first_answer.reschedule(None)
                        if not lease.done():
                            lease.set_result(answer)
                            self.leases += 1
                            logger.info("registered at %s as %s", self._address, self._introduction.worker_id)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    logger.error("%s refuses this worker: %s", self._address, error.details())
                    raise WorkerRefused(f"{self._address}: {error.details()}") from error
                raise
            finally:
                call.cancel()
                lease.cancel()

    async def _reports(self, lease: asyncio.Future[registry_pb2.Lease]) -> AsyncIterator[registry_pb2.WorkerReport]:
        yield registry_pb2.WorkerReport(introduction=self._introduction)
        interval_s = (await lease).heartbeat_interval_ms / 1e3
        while True:
            yield registry_pb2.WorkerReport(load=self._load())
            await asyncio.sleep(interval_s)
