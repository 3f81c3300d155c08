"""How a target worker is set up (torch-free, so that command lines may build it)."""

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.addresses import check_coordinators
from outrider.engine.config import AttentionBackend, DtypeName, EngineConfig, KvCacheDtype, Quantization
from outrider.engine.one_graph_shape import RoundShape
from outrider.metrics.options import check_metrics_options
from outrider.models import embedded_target_path
from outrider.security.binding import check_bind
from outrider.security.tls import TlsConfig
from outrider.target_worker.resident_config import ResidentConfig, head_folder

_CPU_PREFILL_PART, _GPU_PREFILL_TOKENS = 4, 4096


@dataclass(frozen=True, kw_only=True)
class TargetWorkerConfig:
    """One target worker process.

    Attributes:
        model_path: checkpoint folder; default the embedded target.
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
        max_tree_nodes: most nodes of one session's tree, root excluded; larger trees are cut to their root.
        max_step_tokens: most rows of one verification: nodes and roots, and prefill tokens beside them.
        max_prefill_tokens: most rows of a step that only prefills; default a quarter of max_step_tokens on a CPU, 4096
            on a GPU. Where it is more than max_step_tokens, prefill may take the difference beside a verification.
        prefill_slowdown: how much longer than its verification alone a step may take for the sake of prefill beside
            it: 0.4 is 40 %. At least some rows of prefill always go along.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, kv_cache_memory_fraction on a GPU.
        kv_cache_memory_fraction: of the GPU memory that is free once the weights are loaded, what KV takes.
        kv_cache_dtype: of KV: auto is dtype, fp8_e4m3 takes a byte a number (on a GPU).
        enable_prefix_caching: keep the KV of tokens that no session holds any more, for those that begin alike.
        attention_backend: what runs the attention: triton (default on a GPU), flashinfer (on a GPU, with the extra of
            that name) or reference (plain torch; default on a CPU).
        enforce_eager: one operator after the other, without CUDA graphs: slow, for finding errors.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its step.
        tensor_parallel_size: GPUs that share the model.
        resident_draft: folder of an EAGLE or EAGLE-3 head with which the target drafts by itself; "embedded" is that of
            the embedded target.
        resident_depth: levels of the trees that it grows; each costs a step of the head.
        resident_topk: children of a node, and nodes of a level that are expanded.
        resident_nodes: most nodes of such a tree.
        resident_max_sessions: with more sessions in a step it grows no trees.
        one_graph: with resident_draft, for large batches: a round verifies what the head has drafted, extends the head
            and drafts on in one CUDA graph; the nodes never leave the device.
        one_graph_steps: tokens that such a draft reaches ahead.
        one_graph_candidates: tokens that it offers for each of them.
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

    model_path: str | Path | None = None
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
    resident_draft: str | None = None
    resident_depth: int = 5
    resident_topk: int = 4
    resident_nodes: int = 16
    resident_max_sessions: int = 64
    one_graph: bool = False
    one_graph_steps: int = 1
    one_graph_candidates: int = 1
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
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens: {self.max_prefill_tokens} given, at least 1 needed")
        if not 0 <= self.prefill_slowdown < math.inf:
            raise ValueError(f"prefill_slowdown: {self.prefill_slowdown} given, 0 or more needed")
        self._check_resident()
        self._check_one_graph()
        check_coordinators(self.coordinators)
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s: {self.drain_s} given, 0 or more needed")
        check_bind(self.host, insecure=self.insecure, tls_ca=self.tls)
        check_metrics_options(self.metrics_port, self.metrics_host, insecure=self.insecure, tls=self.tls)
        self.engine()

    def _check_resident(self) -> None:
        for name in ("resident_depth", "resident_topk", "resident_nodes", "resident_max_sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")
        if self.resident_draft is None:
            return
        if not self.resident_draft:
            raise ValueError("resident_draft: empty, a folder or embedded needed")
        if self.tensor_parallel_size > 1:
            raise ValueError("resident_draft: not with tensor_parallel_size above 1: leave one of the two out")
        if self.kv_cache_dtype != "auto":
            raise ValueError(f"resident_draft: not with kv_cache_dtype {self.kv_cache_dtype}: leave one of the two out")

    @property
    def resident(self) -> ResidentConfig | None:
        """The draft beside the target, if there is one."""
        if self.resident_draft is None:
            return None
        return ResidentConfig(
            head=head_folder(self.resident_draft),
            depth=self.resident_depth,
            top_k=self.resident_topk,
            nodes=self.resident_nodes,
            max_sessions=self.resident_max_sessions,
        )

    def _check_one_graph(self) -> None:
        slots = self.round_shape.slots
        if not self.one_graph:
            return
        if self.resident_draft is None:
            raise ValueError("one_graph: needs resident_draft: give the folder of a head, or leave one_graph out")
        if slots - 1 > self.max_tree_nodes:
            raise ValueError(
                f"max_tree_nodes: {self.max_tree_nodes} given, at least {slots - 1} needed for one_graph_steps "
                f"{self.one_graph_steps} and one_graph_candidates {self.one_graph_candidates}"
            )
        if self.round_shape.rows > self.max_step_tokens:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} given, at least {self.round_shape.rows} needed for "
                f"one_graph_steps {self.one_graph_steps} and one_graph_candidates {self.one_graph_candidates}"
            )
        refused = {"deterministic": self.deterministic, "tensor_parallel_size": self.tensor_parallel_size > 1}
        for name in (name for name, given in refused.items() if given):
            raise ValueError(f"one_graph: not with {name}: leave one of the two out")
        if self.engine().attention_backend_name == "flashinfer":
            raise ValueError("one_graph: not with attention_backend flashinfer: take triton, or leave one_graph out")

    @property
    def round_shape(self) -> RoundShape:
        """Of the trees of one-graph rounds."""
        return RoundShape(steps=self.one_graph_steps, candidates=self.one_graph_candidates)

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
