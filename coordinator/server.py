"""The coordinator process: build its parts, serve, stop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
from starlette.routing import BaseRoute

from outrider import __version__
from outrider.addresses import Resolve, resolver
from outrider.coordinator.api.access import Access, TokenInterceptor
from outrider.coordinator.api.field_checks import RequestLimits
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.api.http.app import create_app
from outrider.coordinator.api.http.chat_template import load_chat_template, read_tokenizer_config
from outrider.coordinator.api.http.server import HttpServer
from outrider.coordinator.api.service import GenerationServicer
from outrider.coordinator.api.validation import max_request_bytes
from outrider.coordinator.live.routes import OPEN_PATHS as LIVE_PATHS
from outrider.coordinator.live.routes import live_routes
from outrider.coordinator.metrics.families import CoordinatorMetrics, metrics_routes
from outrider.coordinator.sessions.config import CoordinatorConfig
from outrider.coordinator.sessions.scheduler import Scheduler
from outrider.coordinator.sessions.tokenizer import TextTokenizer, read_model_info
from outrider.coordinator.workers.peers import Peers, PeerServicer
from outrider.coordinator.workers.registry import RegistryServicer
from outrider.errors import WorkerUnavailable
from outrider.metrics.endpoint import MetricsEndpoint, on_loop
from outrider.request_decoding import add_service
from outrider.roles import collector
from outrider.roles.ports import allow_many_files
from outrider.rpc import RoleServer
from outrider.security.binding import warn_of_bind
from outrider.security.roles import Role
from outrider.v1 import generation_pb2, registry_pb2

if TYPE_CHECKING:
    from outrider.coordinator.api.vllm.service import VllmEngineServicer

logger = logging.getLogger(__name__)

SERVICES = ("outrider.v1.GenerationService", "outrider.v1.RegistryService", "outrider.v1.PeerService")
VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"


class CoordinatorServer:
    """All parts of one coordinator, joined.

    Args:
        peers: gives where the service's coordinators take workers in; default as `config` has it.

    Raises:
        CheckpointError: the model folder lacks what a coordinator needs.
        OSError: the address cannot be bound.
        CertificateError: the TLS files cannot be used.
        TokenFileError: the token file cannot be used.
    """

    def __init__(self, config: CoordinatorConfig, *, peers: Resolve | None = None) -> None:
        self._config = config
        self._is_stopping = False
        self._started_ns = time.monotonic_ns()
        self._incarnation = secrets.randbits(63)
        model = read_model_info(
            config.model_folder, max_model_len=config.max_model_len, name=next(iter(config.served_model_name), None)
        )
        self.scheduler = Scheduler(config)
        self.registry = RegistryServicer(self.scheduler, config=config, model=model, incarnation=self._incarnation)
        if peers is None and config.peers:
            peers = resolver(config.peers)
        self._peers = Peers(incarnation=self._incarnation, resolve=peers, tls=config.tls)
        access, tokenizer = Access(config.token_file), TextTokenizer.load(config.tokenizer_folder)
        generations = Generations(
            self.scheduler,
            model=model,
            tokenizer=tokenizer,
            other_names=config.served_model_name[1:],
            limits=RequestLimits(
                default_max_new_tokens=config.default_max_new_tokens,
                max_nodes=config.max_nodes,
                max_depth=config.max_depth,
                allow_synthetic=config.allow_synthetic,
            ),
            peers=self._peers,
        )
        generations.on_refusal = self.scheduler.totals.note_refusal
        generation_service = GenerationServicer(generations, server_info=self.info, access=access)
        peer_service = PeerServicer(generations, incarnation=self._incarnation)
        self.metrics = CoordinatorMetrics(
            self.scheduler,
            workers=self.registry.workers,
            access=access,
            model_name=model.name,
            max_depth=config.max_depth,
        )
        self.metrics_endpoint: MetricsEndpoint | None = None

        def add_services(server: grpc.aio.Server) -> None:
            generation_service.add_to(server)
            add_service(self.registry, registry_pb2.DESCRIPTOR.services_by_name["RegistryService"], server)
            peer_service.add_to(server)
            if config.vllm_grpc:
                self._vllm_door(generations, access).add_to(server)

        if config.tls is not None:
            config.tls.check(Role.COORDINATOR)
        warn_of_bind(config.host, tls_ca=config.tls, token_file=config.token_file)
        self._server = RoleServer(
            services=(*SERVICES, VLLM_SERVICE) if config.vllm_grpc else SERVICES,
            add_services=add_services,
            address=config.worker_address or config.address,
            public_address=None if config.worker_address is None else config.address,
            shared_address=config.shared_address,
            tls=config.tls,
            max_request_bytes=max_request_bytes(model, tokenizer),
            interceptors=[] if config.token_file is None else [TokenInterceptor(access)],
        )
        http_port = 0 if config.live_page and config.http_port is None else config.http_port
        self._http = None if http_port is None else self._http_door(generation_service, http_port)

    @property
    def address(self) -> str:
        """host:port that is bound, of the public door."""
        return self._server.public_address

    @property
    def worker_address(self) -> str:
        """host:port at which workers register; the same where nothing sets them apart."""
        return self._server.address

    @property
    def http_address(self) -> str:
        """host:port of the HTTP door; empty where there is none."""
        return "" if self._http is None else self._http.address

    def _vllm_door(self, generations: Generations, access: Access) -> "VllmEngineServicer":
        # Its messages are an extra.
        from outrider.coordinator.api.vllm.service import VllmEngineServicer

        return VllmEngineServicer(
            generations,
            access,
            server_info=self.info,
            model_folder=self._config.model_folder,
            max_running=self._config.max_running_sessions,
        )

    def _http_door(self, service: GenerationServicer, port: int) -> HttpServer:
        config = self._config
        routes, open_paths = self._http_routes(service.generations)
        app = create_app(
            service,
            template=load_chat_template(config.tokenizer_folder, config.chat_template),
            tokenizer_config=read_tokenizer_config(config.tokenizer_folder),
            cors=config.http_cors,
            is_serving=lambda: not self._is_stopping,
            extra_routes=routes,
            open_paths=open_paths,
        )
        host = config.http_host or config.host
        warn_of_bind(host, tls_ca=config.tls, token_file=config.token_file)
        return HttpServer(app, host=host, port=port, shared_port=config.shared_http_port, tls=config.tls)

    def _http_routes(self, generations: Generations) -> tuple[list[BaseRoute], set[str]]:
        """Return routes that other modules serve on the HTTP port, and the paths that need no token."""
        routes: list[BaseRoute] = [*metrics_routes(self.metrics.registry)]
        open_paths: set[str] = set()
        if self._config.live_page:
            hosts = (self._config.http_host or self._config.host,)
            routes += live_routes(generations, lambda: self.scheduler.sessions, hosts=hosts)
            open_paths.update(LIVE_PATHS)
        return routes, open_paths

    def info(self) -> generation_pb2.ServerInfo:
        """The state of the server now."""
        totals = self.scheduler.totals
        speculating, undrafted = self.scheduler.drafts.speculating()
        return generation_pb2.ServerInfo(
            incarnation=self._incarnation,
            address=self.address,
            version=__version__,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            running_sessions=self.scheduler.running_sessions,
            waiting_requests=self.scheduler.waiting_requests,
            workers=self.registry.statuses(),
            requests_total=totals.requests,
            emitted_tokens_total=totals.emitted_tokens,
            speculation=totals.speculation.message(),
            dropped_nodes_total=totals.dropped_nodes,
            steps_total=totals.steps,
            refused_total=sum(totals.refused.values()),
            weights=self.registry.reloads.running if self.registry.reloads.running.version else None,
            draft_demand=totals.demand.message(sessions=speculating, undrafted_sessions=undrafted),
        )

    async def start(self) -> None:
        """Begin to serve."""
        config = self._config
        if (port := config.metrics_port) is not None:
            describe = on_loop(self.metrics.describe, asyncio.get_running_loop())
            self.metrics_endpoint = MetricsEndpoint(describe, host=config.metrics_host, port=port, tls=config.tls)
        await self._server.start()
        self._peers.start(self.worker_address)
        if self._http is not None:
            await self._http.start()
            if config.live_page:
                logger.info("live page at %s/live: it shows what requests say", self._http.url)

    async def stop(self) -> None:
        """Health NOT_SERVING, running requests get `drain_s`, then everything ends."""
        self._is_stopping = True
        if self._http is not None and self._config.shared_http_port is not None:
            self._http.close_listeners()
        await self._server.stop(drain=self._drain)
        await self._peers.close()
        if self.metrics_endpoint is not None:
            await self.metrics_endpoint.close()
        if self._http is not None:
            await self._http.stop()

    async def _drain(self) -> None:
        self.scheduler.drain()
        deadline = time.monotonic() + self._config.drain_s
        while self.scheduler.running_sessions and time.monotonic() < deadline:  # noqa: ASYNC110 - bounded, at shutdown
            await asyncio.sleep(0.02)
        self.scheduler.stop(WorkerUnavailable("the coordinator is shutting down; resume at another one"))


async def serve(
    config: CoordinatorConfig,
    *,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    peers: Resolve | None = None,
    tell: Callable[[Callable[[], generation_pb2.ServerInfo]], None] | None = None,
) -> None:
    """Run a coordinator until `stop` is set.

    Args:
        ready: called with host:port once it serves.
        tell: given the function that says how the server is, before `ready`.
    """
    allow_many_files()
    server = CoordinatorServer(config, peers=peers)
    await server.start()
    if tell is not None:
        tell(server.info)
    collector.begin_serving()
    if ready is not None:
        ready(server.address)
    try:
        await (stop or asyncio.Event()).wait()
    finally:
        await server.stop()
