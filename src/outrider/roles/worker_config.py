"""Settings that both kinds of worker have (torch-free, so that command lines may build them)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.addresses import check_coordinators
from outrider.config_checks import check_between, check_not_negative
from outrider.engine.config import AttentionBackend, DtypeName, EngineConfig, Quantization
from outrider.security.binding import check_bind, check_metrics_options
from outrider.security.tls import TlsConfig


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ABC):
    """One worker process.

    Attributes:
        model_path: checkpoint folder; default an embedded model.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        advertised_host: host under which coordinators dial this worker; default `host`.
        coordinators: to register at; none serves whoever dials. host:port, or lists that may change while this runs:
            file:PATH (one address a line), dns:NAME:PORT (every address of the name).
        name: stable across restarts: coordinators recognise by it a worker that keeps failing.
        drain_s: longest that coordinators get to move their sessions away, or end them, when this is told to stop.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; default float32 on a CPU, bfloat16 on a GPU.
        quantization: fp8 rounds the layers' matrices to 8 bits while they are loaded; a checkpoint that has them so
            needs no option.
        threads: CPU threads of one operator.
        max_num_seqs: sessions at a time.
        max_model_len: most tokens of a session (prompt and output); default the checkpoint's own limit.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, kv_cache_memory_fraction on a GPU.
        kv_cache_memory_fraction: of the GPU memory that is free once the weights are loaded, what KV takes.
        attention_backend: what runs the attention: triton (default on a GPU), flashinfer (on a GPU, with the extra of
            that name) or reference (plain torch; default on a CPU).
        enforce_eager: one operator after the other, without CUDA graphs: slow, for finding errors.
        tls_ca: certificates (PEM) of the authorities whose certificates are believed; with the next two, everything is
            encrypted and proven on both sides.
        tls_certificate: own certificate (PEM), of this worker's role (`outrider certs` makes one).
        tls_key: its private key (PEM).
        metrics_port: on which Prometheus reads this worker; 0 takes a free one. Default: none.
        metrics_host: address of metrics_port; beyond loopback it needs TLS, and whoever reads a certificate.
        insecure: listen beyond loopback without protection: whoever reaches the port may use it.

    Raises:
        ValueError: a value out of range, with the value.
    """

    model_path: str | Path | None = field(default=None, metadata={"option": "--model"})
    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    coordinators: tuple[str, ...] = ()
    name: str = ""
    drain_s: float = 5.0
    device: str = "cpu"
    dtype: DtypeName | None = None
    quantization: Quantization | None = None
    threads: int = 1
    max_num_seqs: int = 64
    max_model_len: int | None = None
    num_slots: int | None = None
    kv_bytes: int | None = None
    kv_cache_memory_fraction: float = 0.9
    attention_backend: AttentionBackend | None = None
    enforce_eager: bool = False
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: empty, an address such as 127.0.0.1 needed")
        check_between(self, 0, 65535, "port")
        check_coordinators(self.coordinators)
        check_not_negative(self, "drain_s")
        check_bind(self.host, insecure=self.insecure, tls_ca=self.tls)
        check_metrics_options(self.metrics_port, self.metrics_host, insecure=self.insecure, tls=self.tls)
        self.engine()

    @property
    @abstractmethod
    def model_folder(self) -> Path:
        """The checkpoint folder."""

    @property
    def address(self) -> str:
        """host:port to listen on."""
        return f"{self.host}:{self.port}"

    @property
    def tls(self) -> TlsConfig | None:
        """TLS settings; None for plaintext."""
        return TlsConfig.of_options(self.tls_ca, self.tls_certificate, self.tls_key)

    def engine(self) -> EngineConfig:
        """The model's part."""
        own = {"model_path": self.model_folder, "torch_threads": self.threads}
        return EngineConfig(**self.fields_of(EngineConfig) | own)

    def fields_of(self, part: type) -> dict[str, Any]:
        """The values of the fields that a part's configuration has under the same name."""
        own = {field.name for field in fields(self)}
        return {field.name: getattr(self, field.name) for field in fields(part) if field.name in own}
