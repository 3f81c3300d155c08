"""The target worker process: load, serve, register, stop."""

import asyncio
import logging
from collections.abc import Callable

from outrider.addresses import Resolve, resolver
from outrider.engine.model_runner import ModelRunner
from outrider.errors import WorkerHung
from outrider.metrics.endpoint import MetricsEndpoint, open_endpoint
from outrider.registration import Registrar
from outrider.request_decoding import add_service
from outrider.rpc import RoleServer
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.metrics import target_metrics
from outrider.target_worker.service import TargetServicer, pack_load
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier
from outrider.v1 import registry_pb2, target_pb2
from outrider.worker import introduce, model_info, until_any

__all__ = ["TargetWorkerConfig", "serve"]

logger = logging.getLogger(__name__)

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]


async def serve(
    config: TargetWorkerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    resolve: Resolve | None = None,
) -> None:
    """Serves a target until `stop` is set or a coordinator asks it to end; then it drains.

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
        WorkerUnavailable: a process that shares the model was lost.
    """
    runners: list[ModelRunner] = []

    def make_verifier() -> Verifier:
        runners.append(ModelRunner(config.engine()))
        runners[0].warm_up()
        return Verifier(
            runners[0],
            max_step_tokens=config.max_step_tokens,
            max_prefill_tokens=config.prefill_tokens,
            prefill_slowdown=config.prefill_slowdown,
        )

    steps = StepThread(make_verifier)
    if config.tls is not None:
        config.tls.check(Role.TARGET)
    warn_of_bind(config.host, tls_ca=config.tls)
    server = RoleServer(
        services=["outrider.v1.TargetService"],
        add_services=lambda server: add_service(TargetServicer(steps), SERVICE, server),
        address=config.address,
        tls=config.tls,
    )
    steps.start()
    registrar: Registrar | None = None
    metrics: MetricsEndpoint | None = None
    in_order = is_hung = False
    try:
        verifier = await asyncio.wrap_future(steps.ready)
        metrics = open_endpoint(
            target_metrics(steps, model_name=verifier.model.name),
            host=config.metrics_host,
            port=config.metrics_port,
            tls=config.tls,
        )
        await server.start()
        introduction = introduce(
            registry_pb2.WORKER_ROLE_TARGET,
            address=f"{config.advertised_host or config.host}:{server.port}",
            model=model_info(verifier.model),
            limits=registry_pb2.WorkerLimits(
                max_sessions=config.max_num_seqs,
                max_tree_nodes=config.max_tree_nodes,
                max_step_tokens=config.max_step_tokens,
            ),
            name=config.name,
        )
        registrar = Registrar(
            resolve or resolver(config.coordinators),
            introduction,
            lambda: pack_load(steps.report()),
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
            steps.watch.watch(),
            asyncio.wrap_future(steps.stopped),
            asyncio.wrap_future(runners[0].ranks.failed),
        )
        in_order = True
    except WorkerHung:
        # Neither waited for nor closed: that would hang as well.
        is_hung = True
        raise
    finally:
        if metrics is not None:
            await metrics.close()
        await server.stop(drain=lambda: _leave(registrar, in_order=in_order))
        if not is_hung:
            steps.stop()
            # What ended the thread, if anything did, has been raised above.
            await asyncio.gather(asyncio.wrap_future(steps.stopped), return_exceptions=True)
            for runner in runners:
                runner.close()
    logger.info("stopped")


async def _leave(registrar: Registrar | None, *, in_order: bool) -> None:
    if registrar is not None:
        await registrar.close(in_order=in_order)
