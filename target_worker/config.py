"""How a target worker is set up (torch-free, so that command lines may build it)."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from outrider.addresses import check_coordinators
from outrider.engine.config import AttentionBackend, DtypeName, EngineConfig, KvCacheDtype, Quantization
from outrider.metrics.options import check_metrics_options
from outrider.models import embedded_target_path
from outrider.security.binding import check_bind
from outrider.security.tls import TlsConfig
from outrider.target_worker.rounds.draft_steps import MOST_STEPS

_CPU_PREFILL_PART, _GPU_PREFILL_TOKENS = 4, 2048


@dataclass(frozen=True, kw_only=True)
class TargetWorkerConfig:
    """One target worker process.

    Attributes:
        model_path: checkpoint folder; default the embedded target.
        draft_model: checkpoint folder of a draft model, or of an EAGLE head or block drafter of this target, that grows
            trees inside this worker, on its device and with a share of its memory for KV: for a machine with one GPU.
            Default: none.
        draft_branching: children of a node that it grows; 1 grows chains, to compare trees with.
        max_draft_steps: most growth steps before a round, 1 to 8; 1 as above, to compare with a drafter that guesses
            one token a round.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        advertised_host: host under which coordinators dial this worker; default `host`.
        coordinators: to register at; none serves whoever dials. host:port, or lists that may change while this runs:
            file:PATH (one address a line), dns:NAME:PORT (every address of the name).
        name: the same after a restart, such as a place or a number: what coordinators know a worker by that is lost
            again and again.
        drain_s: longest that coordinators get to move their sessions away, or end them, when this is told to stop.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; default float32 on a CPU, bfloat16 on a GPU.
        quantization: fp8 rounds the layers' matrices to 8 bits while they are loaded; a checkpoint that has them so
            needs no option.
        threads: CPU threads of one operator.
        max_num_seqs: sessions at a time.
        max_model_len: most tokens of a session (prompt and output); default the checkpoint's own limit.
        max_tree_nodes: most rows of one session in a round: its root and the best of its nodes.
        max_step_tokens: most verified rows of a round: roots and nodes of all sessions.
        max_prefill_tokens: most rows of prompts beside them; default a quarter of max_step_tokens on a CPU, 2048 on a
            GPU.
        prefill_slowdown: how much longer than its verification alone a round may take for the sake of prefill beside
            it: 0.4 is 40 %. At least some rows of prefill always go along.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, kv_cache_memory_fraction on a GPU.
        kv_cache_memory_fraction: of the GPU memory that is free once the weights are loaded, what KV takes.
        kv_cache_dtype: of KV: auto is dtype, fp8_e4m3 takes a byte a number (on a GPU).
        enable_prefix_caching: keep the KV of tokens that no session holds any more, for those that begin alike.
        attention_backend: what runs the attention: triton (default on a GPU), flashinfer (on a GPU, with the extra of
            that name) or reference (plain torch; default on a CPU).
        enforce_eager: one operator after the other, without CUDA graphs: slow, for finding errors.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its step; neither with
            attention_backend flashinfer nor with enforce_eager.
        tensor_parallel_size: GPUs that share the model.
        tls_ca: certificates (PEM) of the authorities whose certificates are believed; with the next two, everything is
            encrypted and proven on both sides.
        tls_certificate: own certificate (PEM), of the role target (`outrider certs` makes one).
        tls_key: its private key (PEM).
        metrics_port: on which Prometheus reads this worker; 0 takes a free one. Default: none.
        metrics_host: address of metrics_port; beyond loopback it needs TLS, and whoever reads a certificate.
        insecure: listen beyond loopback without protection: whoever reaches the port may use it.

    Raises:
        ValueError: a value out of range, with the value.
    """

    model_path: str | Path | None = field(default=None, metadata={"option": "--model"})
    draft_model: Path | None = None
    draft_branching: int = 4
    max_draft_steps: int = MOST_STEPS
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
    max_tree_nodes: int = 64
    max_step_tokens: int = 512
    max_prefill_tokens: int | None = None
    prefill_slowdown: float = 0.3
    num_slots: int | None = None
    kv_bytes: int | None = None
    kv_cache_memory_fraction: float = 0.9
    kv_cache_dtype: KvCacheDtype = "auto"
    enable_prefix_caching: bool = True
    attention_backend: AttentionBackend | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    tensor_parallel_size: int = 1
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: empty, an address such as 127.0.0.1 needed")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} given, 0 to 65535 needed")
        if self.max_step_tokens < 1:
            raise ValueError(f"max_step_tokens: {self.max_step_tokens} given, at least 1 needed")
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} given, at least max_num_seqs ({self.max_num_seqs}) needed, "
                "so that every session can take a plain step"
            )
        if self.max_tree_nodes < 1:
            raise ValueError(f"max_tree_nodes: {self.max_tree_nodes} given, at least 1 needed")
        if self.draft_branching < 1:
            raise ValueError(f"draft_branching: {self.draft_branching} given, at least 1 needed")
        if not 1 <= self.max_draft_steps <= MOST_STEPS:
            raise ValueError(f"max_draft_steps: {self.max_draft_steps} given, 1 to {MOST_STEPS} needed")
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens: {self.max_prefill_tokens} given, at least 1 needed")
        if not 0 <= self.prefill_slowdown < math.inf:
            raise ValueError(f"prefill_slowdown: {self.prefill_slowdown} given, 0 or more needed")
        check_coordinators(self.coordinators)
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s: {self.drain_s} given, 0 or more needed")
        check_bind(self.host, insecure=self.insecure, tls_ca=self.tls)
        check_metrics_options(self.metrics_port, self.metrics_host, insecure=self.insecure, tls=self.tls)
        self.engine()

    @property
    def address(self) -> str:
        """host:port to listen on."""
        return f"{self.host}:{self.port}"

    @property
    def prefill_tokens(self) -> int:
        """`max_prefill_tokens` with its default filled in."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return -(-self.max_step_tokens // _CPU_PREFILL_PART) if self.device == "cpu" else _GPU_PREFILL_TOKENS

    @property
    def tls(self) -> TlsConfig | None:
        """None talks in the clear."""
        return TlsConfig.of_options(self.tls_ca, self.tls_certificate, self.tls_key)

    def engine(self) -> EngineConfig:
        """The model's part."""
        return EngineConfig(
            model_path=self.model_path or embedded_target_path(),
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            num_slots=self.num_slots,
            kv_bytes=self.kv_bytes,
            kv_cache_memory_fraction=self.kv_cache_memory_fraction,
            kv_cache_dtype=self.kv_cache_dtype,
            enable_prefix_caching=self.enable_prefix_caching,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_tree_nodes=self.max_tree_nodes,
            torch_threads=self.threads,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            deterministic=self.deterministic,
            tensor_parallel_size=self.tensor_parallel_size,
        )
