"""How a target worker is set up (torch-free, so that command lines may build it)."""

from dataclasses import dataclass
from pathlib import Path

from outrider.engine.config import AttentionBackend, DtypeName, EngineConfig
from outrider.models import embedded_target_path


@dataclass(frozen=True, kw_only=True)
class TargetWorkerConfig:
    """One target worker process.

    Attributes:
        model_path: checkpoint folder; default the embedded target.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        advertised_host: host under which coordinators dial this worker; default `host`.
        coordinators: host:port of every coordinator to register at; none serves whoever dials.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and KV; default float32 on a CPU, bfloat16 on a GPU.
        threads: CPU threads of one operator.
        max_sessions: sessions at a time.
        max_model_len: most tokens of a session (prompt and output); default the checkpoint's own limit.
        max_tree_nodes: most nodes of one session's tree, root excluded; larger trees are cut to their root.
        max_step_tokens: most rows of one forward: nodes, roots and prefill tokens.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; see `EngineConfig`.
        attention_backend: what runs the attention: triton (default on a GPU), flashinfer (on a GPU, with the extra of
            that name) or reference (plain torch; default on a CPU).

    Raises:
        ValueError: a value out of range, with the value.
    """

    model_path: str | Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    coordinators: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: DtypeName | None = None
    threads: int = 1
    max_sessions: int = 64
    max_model_len: int | None = None
    max_tree_nodes: int = 64
    max_step_tokens: int = 512
    num_slots: int | None = None
    kv_bytes: int | None = None
    attention_backend: AttentionBackend | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host: empty, an address such as 127.0.0.1 needed")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} given, 0 to 65535 needed")
        if self.max_step_tokens < 1:
            raise ValueError(f"max_step_tokens: {self.max_step_tokens} given, at least 1 needed")
        if self.max_step_tokens < self.max_sessions:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} given, at least max_sessions ({self.max_sessions}) needed, "
                "so that every session can take a plain step"
            )
        for address in self.coordinators:
            if not address.rpartition(":")[2].isdigit():
                raise ValueError(f"coordinators: {address!r} given, host:port needed")
        self.engine()

    @property
    def address(self) -> str:
        """host:port to listen on."""
        return f"{self.host}:{self.port}"

    def engine(self) -> EngineConfig:
        """The model's part."""
        return EngineConfig(
            model_path=self.model_path or embedded_target_path(),
            device=self.device,
            dtype=self.dtype,
            num_slots=self.num_slots,
            kv_bytes=self.kv_bytes,
            max_sessions=self.max_sessions,
            max_model_len=self.max_model_len,
            max_tree_nodes=self.max_tree_nodes,
            torch_threads=self.threads,
            attention_backend=self.attention_backend,
        )
