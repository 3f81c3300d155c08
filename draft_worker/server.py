"""The draft worker process: load, serve, register, stop."""

import asyncio
import logging
from collections.abc import Callable

from outrider.addresses import Resolve, resolver
from outrider.draft_worker.calibration_report import pack_calibration
from outrider.draft_worker.config import DraftWorkerConfig
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_thread import GrowthThread, spare_collector
from outrider.draft_worker.metrics import draft_metrics
from outrider.draft_worker.service import DraftServicer, pack_load
from outrider.engine.model_runner import ModelRunner
from outrider.errors import WorkerHung
from outrider.metrics.endpoint import MetricsEndpoint, open_endpoint
from outrider.registration import Registrar
from outrider.request_decoding import add_service
from outrider.rpc import RoleServer
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.v1 import common_pb2, draft_pb2, registry_pb2
from outrider.worker import introduce, model_info, until_any

__all__ = ["DraftWorkerConfig", "serve"]

logger = logging.getLogger(__name__)

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]


async def serve(
    config: DraftWorkerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    resolve: Resolve | None = None,
) -> None:
    """Serves a draft until `stop` is set or a coordinator asks it to end; then it drains.

    Args:
        config: the worker.
        ready: called once with the host:port that is bound, when the model is loaded and the port answers.
        stop: set by whoever wants it to end.
        resolve: gives the coordinators to register at; default those of `config`.

    Raises:
        CheckpointError: the model folder cannot be served.
        OSError: the address is taken.
        CertificateError: the TLS files cannot be used.
        WorkerRefused: a coordinator does not take this worker.
        WorkerHung: a step does not come back; its thread runs on, and the process has to end.
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
        add_services=lambda server: add_service(servicer, SERVICE, server),
        address=config.address,
        tls=config.tls,
    )
    thread.start()
    registrar: Registrar | None = None
    metrics: MetricsEndpoint | None = None
    in_order = is_hung = False
    try:
        growth = await asyncio.wrap_future(thread.ready)
        assert isinstance(growth.runner, ModelRunner)
        metrics = open_endpoint(
            draft_metrics(thread, model_name=growth.runner.info.name),
            host=config.metrics_host,
            port=config.metrics_port,
            tls=config.tls,
        )
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
            name=config.name,
        )

        def heartbeat() -> common_pb2.WorkerLoad:
            load = pack_load(thread.load())
            load.calibration.CopyFrom(pack_calibration(growth.calibration))
            load.step_age_ms, load.preparing = int(1e3 * thread.watch.age_s), thread.watch.is_preparing
            return load

        registrar = Registrar(
            resolve or resolver(config.coordinators),
            introduction,
            heartbeat,
            drain_s=config.drain_s,
            tls=config.tls,
        )
        registrar.start()
        if ready is not None:
            ready(server.address)
        await until_any(
            (stop or asyncio.Event()).wait(),
            registrar.drain_asked.wait(),
            registrar.failed,
            thread.watch.watch(),
            asyncio.wrap_future(thread.stopped),
        )
        in_order = True
    except WorkerHung:
        # Neither waited for nor closed: that would hang as well.
        is_hung = True
        raise
    finally:
        if metrics is not None:
            await metrics.close()
        await server.stop(drain=lambda: _leave(registrar, servicer, in_order=in_order))
        if not is_hung:
            thread.stop()
            # What ended the thread, if anything did, has been raised above.
            await asyncio.gather(asyncio.wrap_future(thread.stopped), return_exceptions=True)
    logger.info("stopped")


async def _leave(registrar: Registrar | None, servicer: DraftServicer, *, in_order: bool) -> None:
    if registrar is not None:
        await registrar.close(in_order=in_order)
    await servicer.end_streams()
