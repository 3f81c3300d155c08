"""Serves a worker: loads its model in its thread, listens, registers with the coordinators, drains, ends (torch-free).

What a draft and a target worker differ in is a `Worker`; the order of things is the same for both.
"""

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outrider import __version__
from outrider.addresses import Resolve, resolver
from outrider.drafting.growth_source import GrowthSource, sources_to_proto
from outrider.errors import OutriderError, WorkerHung, WorkerUnavailable
from outrider.front.handle import Front
from outrider.front.inbox import Inbox
from outrider.metrics.endpoint import MetricsEndpoint
from outrider.metrics.families import Describe
from outrider.roles.registration import Registrar
from outrider.roles.step_watch import StepWatch
from outrider.roles.worker import until_any
from outrider.roles.worker_config import WorkerConfig
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire import WIRE_VERSION

logger = logging.getLogger(__name__)

_REGISTERED_AS = {Role.DRAFT: registry_pb2.WORKER_ROLE_DRAFT, Role.TARGET: registry_pb2.WORKER_ROLE_TARGET}


class WorkThread(Protocol):
    """The thread that owns the model."""

    watch: StepWatch
    ready: Future[Any]  # done when the model is loaded, or could not be
    stopped: Future[None]  # done when the thread has ended, with what ended it

    def start(self) -> None:
        """Load the model, then work."""
        ...

    def stop(self) -> None:
        """Ask the thread to end."""
        ...


Thread = TypeVar("Thread", bound=WorkThread)
Config = TypeVar("Config", bound=WorkerConfig)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A worker's description once its model is loaded."""

    model: common_pb2.ModelInfo
    limits: registry_pb2.WorkerLimits
    metrics: Describe  # its values for Prometheus
    # Done when something else than the thread and the front process has failed.
    failures: Sequence[Future[None]] = ()
    sources: Collection[GrowthSource] = ()  # by what a draft grows (none: a model)


class Worker(ABC, Generic[Thread]):
    """A draft or a target worker."""

    role: Role
    thread: Thread
    front: Front  # the process that speaks gRPC for it
    inbox: Inbox[Any]  # where `thread` finds what `front` passes on

    @abstractmethod
    def loaded(self) -> Loaded:
        """Take up the loaded model; called once, when `thread.ready` is done."""

    @abstractmethod
    def load(self) -> common_pb2.WorkerLoad:
        """Return the load for a heartbeat."""

    def close(self) -> None:
        """Release what the worker holds; called last, unless the worker hangs."""


async def serve_worker(
    make_worker: Callable[[Config], Worker[Any]],
    config: Config,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    resolve: Resolve | None = None,
) -> None:
    """Serve a worker until `stop` is set; then it drains.

    Args:
        make_worker: makes it of its configuration, not started yet.
        ready: called once with the host:port that is bound, when the model is loaded and the port answers.
        resolve: gives the coordinators to register at; default those of `config`.

    Raises:
        OSError: the address is taken.
        CertificateError: the TLS files cannot be used.
        WorkerRefused: a coordinator does not take this worker.
        WorkerHung: a step does not come back; its thread runs on, and the process has to end.
        WorkerUnavailable: the process that speaks gRPC has ended.
        Exception: what the thread raised while it loaded or ran.
    """
    worker = make_worker(config)
    with contextlib.closing(worker.front), contextlib.closing(worker.inbox):
        await _serve(worker, config, ready, stop or asyncio.Event(), resolve)


async def _serve(
    worker: Worker[Any],
    config: WorkerConfig,
    ready: Callable[[str], None] | None,
    stop: asyncio.Event,
    resolve: Resolve | None,
) -> None:
    if config.tls is not None:
        config.tls.check(worker.role)
    warn_of_bind(config.host, tls_ca=config.tls)
    front, thread = worker.front, worker.thread
    await front.listen()
    thread.start()
    registrar: Registrar | None = None
    metrics: MetricsEndpoint | None = None
    in_order = is_hung = False
    failure: OutriderError | None = None
    try:
        await until_any(asyncio.wrap_future(thread.ready), asyncio.wrap_future(front.failed))
        loaded = worker.loaded()
        if (port := config.metrics_port) is not None:
            metrics = MetricsEndpoint(loaded.metrics, host=config.metrics_host, port=port, tls=config.tls)
        await front.start()
        registrar = _registrar(worker, loaded, config, port=front.port, resolve=resolve)
        registrar.start()
        if ready is not None:
            ready(front.address)
        # Whoever was told may have chosen cores for this process.
        front.share_cores()
        await until_any(
            stop.wait(),
            registrar.failed,
            thread.watch.watch(),
            *(asyncio.wrap_future(end) for end in (thread.stopped, front.failed, *loaded.failures)),
        )
        in_order = True
    except Exception as error:
        # Neither waited for nor closed where it hangs: that would hang as well.
        is_hung = isinstance(error, WorkerHung)
        failure = WorkerUnavailable(f"the {worker.role.value} worker failed: {error}")
        raise
    finally:
        try:
            await front.stop(drain=lambda: _leave(registrar, in_order=in_order), failure=failure)
            # How it drains is read, too.
            if metrics is not None:
                await metrics.close()
        finally:
            if not is_hung:
                thread.stop()
                # What ended the thread, if anything did, has been raised above.
                await asyncio.gather(asyncio.wrap_future(thread.stopped), return_exceptions=True)
                worker.close()
    logger.info("stopped")


def _registrar(
    worker: Worker[Any], loaded: Loaded, config: WorkerConfig, *, port: int, resolve: Resolve | None
) -> Registrar:
    introduction = registry_pb2.WorkerIntroduction(
        # Another one at every start; the name stays.
        worker_id=f"{worker.role}-{secrets.token_hex(6)}",
        role=_REGISTERED_AS[worker.role],
        address=f"{config.advertised_host or config.host}:{port}",
        model=loaded.model,
        limits=loaded.limits,
        version=__version__,
        name=config.name,
        sources=sources_to_proto(loaded.sources),
        wire_version=WIRE_VERSION,
    )
    return Registrar(
        resolve or resolver(config.coordinators),
        introduction,
        worker.load,
        drain_s=config.drain_s,
        tls=config.tls,
    )


async def _leave(registrar: Registrar | None, *, in_order: bool) -> None:
    if registrar is not None:
        await registrar.close(in_order=in_order)
