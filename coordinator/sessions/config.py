"""Configuration of a coordinator."""

import importlib.util
import socket
from dataclasses import dataclass, field
from pathlib import Path

from outrider.addresses import check_address
from outrider.config_checks import check_at_least_one, check_between, check_not_negative, check_positive
from outrider.models import embedded_target_path
from outrider.security.binding import check_bind, check_metrics_options
from outrider.security.tls import TlsConfig
from outrider.wire import MOST_NODES


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """One coordinator process.

    Attributes:
        host: address to listen on, and part of what `ready HOST:PORT` prints.
        port: to listen on; 0 takes a free one.
        model_path: checkpoint folder of the target, for its tokenizer and limits; default the embedded target.
        tokenizer_path: folder with tokenizer.json, where it is not the model's.
        served_model_name: that clients know the model by; default the folder's name. May be given several times: the
            first is what answers say, each is taken.
        max_model_len: most tokens of a session (prompt and output); default the model's own limit.
        default_max_new_tokens: output limit of a request that names none.
        max_running_sessions: choices that are generated at a time; further requests wait.
        max_queue: requests that may wait, each with all its prompts and choices; another one is refused with
            RESOURCE_EXHAUSTED. By default as many as begin within a minute, at least 1,000 and four for each choice
            that may run; fewer where their prompts have more than 16 million tokens.
        max_queue_wait_s: longest that a request may expect to wait, else it is refused at once; default no such bound.
        max_buffered_events: rounds of a request whose tokens a slow reader may leave unread before it rests until these
            are read, counted over all its choices together.
        max_nodes: most nodes verified for a choice in one step, and the default of a request in async mode (in sync
            mode 24 at most). By default as many as a pool holds: targets decide (--max-tree-nodes).
        max_depth: deepest node of a tree, and the default of a request in async mode (in sync mode 8 at most).
        max_live_nodes: most nodes that all drafts of a choice may hold together, for the target's pool takes no more;
            a draft's own max_live_nodes bounds its memory.
        drafts_per_session: draft workers of each source that grow one choice's tree in async mode, where there are as
            many.
        sync_wait_cap_ms: longest that a round of sync mode waits for its tree; after that it goes with what is there.
        heartbeat_interval_ms: how often a worker reports.
        lease_ms: silence after which a worker counts as lost.
        step_timeout_s: least time after which a target counts as lost whose step does not come back, as two of its
            heartbeats tell; otherwise 10 times what its steps take.
        quarantine_losses: a worker that is lost so often within quarantine_window_s is left alone for a while.
        quarantine_window_s: see there.
        quarantine_s: for how long at first; every further loss doubles it, to a minute at most.
        target_wait_s: longest that a request waits for a lost target worker to be replaced.
        connect_timeout_s: longest to wait for a worker to introduce itself, and to dial it then.
        retry_after_s: least that an overloaded server tells clients to wait; more where its queue takes longer.
        drain_s: time that running requests get when the process is told to stop.
        allow_synthetic: take requests whose drafts are accepted at given rates, whatever they are: for benchmarks.
        tls_ca: certificates (PEM) of the authorities whose certificates are believed; with the next two, everything is
            encrypted and proven on both sides.
        tls_certificate: own certificate (PEM), of the role coordinator (`outrider certs` makes one).
        tls_key: its private key (PEM).
        token_file: hashes of the tokens that clients must have (`outrider token new` adds one); default: none needed.
        worker_port: port on which workers register; default `port`, or with TLS the next one (port 0: a free one), as
            workers there prove who they are, which clients need not.
        peers: the other coordinators of the service, where each takes workers in: host:port, a file of them
            (file:PATH) or a name that has several addresses (dns:NAME:PORT); may be given several times, and may name
            this one, too. Requests are then aborted and taken over by way of any of them (docs/coordinators.md).
        shared_port: a further port for clients, on which several coordinators of one machine listen together: the
            kernel spreads connections over them (Linux).
        shared_http_port: likewise, of the HTTP door; with http_port.
        vllm_grpc: serve vLLM's gRPC engine service beside the own one, for routers that drive vLLM so
            (docs/vllm-grpc.md); needs the extra vllm-grpc.
        insecure: listen beyond loopback without protection: whoever reaches the port may use it.
        metrics_port: on which Prometheus reads this process; 0 takes a free one. Default: none (the HTTP door has
            /metrics in any case).
        metrics_host: address of metrics_port; beyond loopback it needs TLS, and whoever reads a certificate.
        http_port: of the HTTP door (OpenAI's API, see docs/openai.md); 0 takes a free one. Default: no such door.
        http_host: address of the HTTP door, where it is not `host`.
        http_cors: origin whose web pages may send requests to the HTTP door (CORS), such as https://chat.example, or *
            for every one; may be given several times.
        chat_template: Jinja file that makes text of a conversation, where it is not the model's own.
        live_page: serve a page at /live of the HTTP door that shows token trees growing and being verified, with their
            text (docs/live-page.md). Without http_port it takes a free one, which the log says.

    Raises:
        ValueError: a value out of range, with the value.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    model_path: Path | None = field(default=None, metadata={"option": "--model"})
    tokenizer_path: Path | None = None
    served_model_name: tuple[str, ...] = ()
    max_model_len: int | None = None
    default_max_new_tokens: int = 128
    max_running_sessions: int = 64
    max_queue: int | None = None
    max_queue_wait_s: float | None = None
    max_buffered_events: int = 1024
    max_nodes: int = MOST_NODES
    max_depth: int = 16
    max_live_nodes: int = 256
    drafts_per_session: int = 1
    sync_wait_cap_ms: float = 1000.0
    heartbeat_interval_ms: int = 500
    lease_ms: int = 2000
    step_timeout_s: float = 5.0
    quarantine_losses: int = 3
    quarantine_window_s: float = 60.0
    quarantine_s: float = 5.0
    target_wait_s: float = 0.0
    connect_timeout_s: float = 5.0
    retry_after_s: float = 1.0
    drain_s: float = 5.0
    allow_synthetic: bool = False
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    worker_port: int | None = None
    peers: tuple[str, ...] = ()
    shared_port: int | None = None
    shared_http_port: int | None = None
    vllm_grpc: bool = False
    insecure: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    http_port: int | None = None
    http_host: str | None = None
    http_cors: tuple[str, ...] = ()
    chat_template: Path | None = None
    live_page: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: empty, an address such as 127.0.0.1 needed")
        check_between(self, 0, 65535, "port", "worker_port", "http_port")
        self._check_doors()
        if self.vllm_grpc and importlib.util.find_spec("smg_grpc_proto") is None:
            raise ValueError("vllm_grpc: the package smg-grpc-proto is missing: pip install 'outrider[vllm-grpc]'")
        check_at_least_one(self, *_AT_LEAST_ONE)
        check_not_negative(self, "max_queue", "max_queue_wait_s", "target_wait_s", "drain_s")
        check_positive(self, "sync_wait_cap_ms", "connect_timeout_s", "retry_after_s", "step_timeout_s")
        check_positive(self, "quarantine_window_s", "quarantine_s")
        for name in ("max_nodes", "max_live_nodes"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_NODES:
                raise ValueError(f"{name}: {value} given, 1 to {MOST_NODES} needed: a pool holds no more")
        if self.lease_ms < 2 * self.heartbeat_interval_ms:
            raise ValueError(
                f"lease_ms: {self.lease_ms} given, at least twice heartbeat_interval_ms "
                f"({self.heartbeat_interval_ms}) needed"
            )

    def _check_doors(self) -> None:
        check_bind(self.host, insecure=self.insecure, tls_ca=self.tls, token_file=self.token_file)
        check_metrics_options(self.metrics_port, self.metrics_host, insecure=self.insecure, tls=self.tls)
        self._check_shared()
        for name in ("http_host", "http_cors"):
            if self.http_port is None and (value := getattr(self, name)):
                raise ValueError(f"{name}: {value} given, with http_port needed")
        if self.http_host is None:
            return
        try:
            check_bind(self.http_host, insecure=self.insecure, tls_ca=self.tls, token_file=self.token_file)
        except ValueError as error:
            raise ValueError(f"http_{error}") from error

    def _check_shared(self) -> None:
        for entry in self.peers:
            try:
                check_address(entry)
            except ValueError as error:
                raise ValueError(f"peers: {error}") from error
        check_between(self, 1, 65535, "shared_port", "shared_http_port")
        for name in ("shared_port", "shared_http_port"):
            port = getattr(self, name)
            if port is not None and not hasattr(socket, "SO_REUSEPORT"):
                raise ValueError(f"{name}: {port} given, and this system has no ports that processes share")
        if self.shared_http_port is not None and self.http_port is None:
            raise ValueError(f"shared_http_port: {self.shared_http_port} given, with http_port needed")

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    @property
    def worker_address(self) -> str | None:
        """host:port at which workers register, where it is not `address`."""
        port = self.worker_port
        if port is None and self.tls is not None:
            port = self.port + 1 if self.port else 0
        return None if port is None else f"{self.host}:{port}"

    @property
    def shared_address(self) -> str | None:
        """host:port that several coordinators share."""
        return None if self.shared_port is None else f"{self.host}:{self.shared_port}"

    @property
    def tls(self) -> TlsConfig | None:
        """None talks in the clear."""
        return TlsConfig.of_options(self.tls_ca, self.tls_certificate, self.tls_key)

    @property
    def model_folder(self) -> Path:
        """`model_path` with its default filled in."""
        return self.model_path or embedded_target_path()

    @property
    def tokenizer_folder(self) -> Path:
        """`tokenizer_path` with its default filled in."""
        return self.tokenizer_path or self.model_folder


_AT_LEAST_ONE = (
    "max_model_len",
    "default_max_new_tokens",
    "max_running_sessions",
    "max_buffered_events",
    "max_depth",
    "drafts_per_session",
    "heartbeat_interval_ms",
    "quarantine_losses",
)
