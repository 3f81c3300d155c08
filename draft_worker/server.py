"""The draft worker process: load, serve, register, stop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outrider.draft_worker.calibration_report import pack_calibration
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_thread import GrowthThread, spare_collector
from outrider.draft_worker.service import DraftServicer, pack_load
from outrider.engine.model_runner import ModelRunner
from outrider.rpc import RoleServer
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.v1 import common_pb2, draft_pb2_grpc, registry_pb2
from outrider.worker import introduce, keep_registered_everywhere, model_info

__all__ = ["DraftWorkerConfig", "serve"]

logger = logging.getLogger(__name__)


async def serve(
    config: DraftWorkerConfig, *, ready: Callable[[str], None] | None = None, stop: asyncio.Event | None = None
) -> None:
    """Serves a draft until `stop` is set.

    Args:
        config: the worker.
        ready: called once with the host:port that is bound, when the model is loaded and the port answers.
        stop: set by whoever wants it to end.

    Raises:
        CheckpointError: the model folder cannot be served.
        OSError: the address is taken.
        CertificateError: the TLS files cannot be used.
        WorkerRefused: a coordinator does not take this worker.
        RuntimeError: the model failed while it ran.
    """

    def make_growth() -> TreeGrowth:
        runner = ModelRunner(config.engine())
        growth = TreeGrowth(runner, config.growth(max_model_len=runner.info.max_model_len))
        growth.warm_up()
        spare_collector()
        return growth

    thread = GrowthThread(make_growth)
    servicer = DraftServicer(thread)
    if config.tls is not None:
        config.tls.check(Role.DRAFT)
    warn_of_bind(config.host, tls_ca=config.tls)
    server = RoleServer(
        services=["outrider.v1.DraftService"],
        add_services=lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server),
        address=config.address,
        tls=config.tls,
    )
    thread.start()
    try:
        growth = await asyncio.wrap_future(thread.ready)
        assert isinstance(growth.runner, ModelRunner)
        await server.start()
        introduction = introduce(
            registry_pb2.WORKER_ROLE_DRAFT,
            address=f"{config.advertised_host or config.host}:{server.port}",
            model=model_info(growth.runner.info),
            limits=registry_pb2.WorkerLimits(
                max_sessions=config.max_num_seqs,
                max_tree_nodes=config.max_live_nodes,
                max_step_tokens=growth.config.max_step_nodes + growth.config.max_step_tokens,
            ),
        )

        def heartbeat() -> common_pb2.WorkerLoad:
            load = pack_load(thread.load())
            load.calibration.CopyFrom(pack_calibration(growth.calibration))
            return load

        registration = keep_registered_everywhere(config.coordinators, introduction, heartbeat, tls=config.tls)
        if ready is not None:
            ready(server.address)
        await _until_any((stop or asyncio.Event()).wait(), registration, asyncio.wrap_future(thread.stopped))
    finally:
        await server.stop(drain=servicer.end_streams)
        thread.stop()
        # What ended the thread, if anything did, has been raised above.
        await asyncio.gather(asyncio.wrap_future(thread.stopped), return_exceptions=True)
    logger.info("stopped")


async def _until_any(*awaitables: Awaitable[object]) -> None:
    """Waits for the first to end, cancels the rest, and raises what the first raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
