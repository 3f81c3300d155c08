"""The target worker process: load, serve, register, stop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outrider.engine.model_runner import ModelRunner
from outrider.rpc import RoleServer
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.target_worker.config import TargetWorkerConfig
from outrider.target_worker.service import TargetServicer, pack_load
from outrider.target_worker.step_thread import StepThread
from outrider.target_worker.verifier import Verifier
from outrider.v1 import registry_pb2, target_pb2_grpc
from outrider.worker import introduce, keep_registered_everywhere, model_info

__all__ = ["TargetWorkerConfig", "serve"]

logger = logging.getLogger(__name__)


async def serve(
    config: TargetWorkerConfig, *, ready: Callable[[str], None] | None = None, stop: asyncio.Event | None = None
) -> None:
    """Serves a target until `stop` is set.

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
        add_services=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(steps), server),
        address=config.address,
        tls=config.tls,
    )
    steps.start()
    try:
        verifier = await asyncio.wrap_future(steps.ready)
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
        )
        registration = keep_registered_everywhere(
            config.coordinators, introduction, lambda: pack_load(steps.report()), tls=config.tls
        )
        if ready is not None:
            ready(server.address)
        await _until_any(
            (stop or asyncio.Event()).wait(),
            registration,
            asyncio.wrap_future(steps.stopped),
            asyncio.wrap_future(runners[0].ranks.failed),
        )
    finally:
        await server.stop()
        steps.stop()
        # What ended the thread, if anything did, has been raised above.
        await asyncio.gather(asyncio.wrap_future(steps.stopped), return_exceptions=True)
        for runner in runners:
            runner.close()
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
