"""How a draft worker is set up (torch-free, so that command lines may build it)."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from outrider.addresses import check_coordinators
from outrider.draft_worker.drafters.ngram.options import MatchType, check_ngram_options
from outrider.drafting.config import GrowthConfig, step_defaults
from outrider.engine.config import AttentionBackend, DtypeName, EngineConfig, Quantization
from outrider.metrics.options import check_metrics_options
from outrider.models import embedded_draft_path
from outrider.security.binding import check_bind
from outrider.security.tls import TlsConfig
from outrider.wire import MOST_NODES

DraftSource = Literal["model", "ngram", "model+ngram"]


@dataclass(frozen=True, kw_only=True)
class DraftWorkerConfig:
    """One draft worker process.

    Attributes:
        source: by what trees grow: model, ngram (of what prompts and outputs said before; no weights are loaded and no
            GPU is used), or model+ngram.
        model_path: checkpoint folder; default the embedded draft. With source ngram its tokenizer.json and config.json
            are read.
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
        max_live_nodes: most nodes of one session's tree, whatever its credit.
        max_step_nodes: most nodes expanded in one step, over all sessions; default 8 on a CPU, 128 on a GPU.
        max_session_nodes: of these, most of one session: with more a step takes longer, and a tree is less deep by the
            time that it is asked for.
        max_step_tokens: most prefill tokens of one step.
        ngram_capacity: most nodes of the trie of n-grams, of some 50 bytes each; the least recently used make room.
        ngram_max_trie_depth: tokens of an n-gram: all but the last are compared, and what is longer is not seen.
        ngram_min_breadth: most continuations of a node below the longest suffix that was seen before.
        ngram_max_breadth: likewise, below the shortest one; 1 makes a single branch.
        ngram_draft_tokens: most nodes that are guessed for a session at a time.
        ngram_match_type: which continuations come first: prob, the most frequent; bfs, the most recent.
        ngram_corpus: a file of texts that the trie begins with, read in the background; may be given several times.
            JSON lines, each an object with "text" or "token_ids".
        branching: children of a node.
        min_path_value: nodes less likely to be reached are not expanded; default 0.03 on a CPU, 0.003 on a GPU.
        min_acceptance: children less likely to be accepted are not grown.
        rejection_top_k: under the rejection rule, a token is drawn from this many of the most likely.
        rejection_acceptance: under the rejection rule, the estimate that a node is accepted.
        num_slots: tokens whose KV fits; default is what `kv_bytes` holds.
        kv_bytes: memory for KV; default 1 GiB on a CPU, kv_cache_memory_fraction on a GPU.
        kv_cache_memory_fraction: of the GPU memory that is free once the weights are loaded, what KV takes.
        attention_backend: what runs the attention: triton (default on a GPU), flashinfer (on a GPU, with the extra of
            that name) or reference (plain torch; default on a CPU).
        enforce_eager: one operator after the other, without CUDA graphs: slow, for finding errors.
        tls_ca: certificates (PEM) of the authorities whose certificates are believed; with the next two, everything is
            encrypted and proven on both sides.
        tls_certificate: own certificate (PEM), of the role draft (`outrider certs` makes one).
        tls_key: its private key (PEM).
        metrics_port: on which Prometheus reads this worker; 0 takes a free one. Default: none.
        metrics_host: address of metrics_port; beyond loopback it needs TLS, and whoever reads a certificate.
        insecure: listen beyond loopback without protection: whoever reaches the port may use it.

    Raises:
        ValueError: a value out of range, with the value.
    """

    source: DraftSource = "model"
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
    max_live_nodes: int = 256
    max_step_nodes: int | None = None
    max_session_nodes: int = GrowthConfig.max_session_nodes
    max_step_tokens: int = 256
    ngram_capacity: int = 10_000_000
    ngram_max_trie_depth: int = 18
    ngram_min_breadth: int = 1
    ngram_max_breadth: int = 10
    ngram_draft_tokens: int = 12
    ngram_match_type: MatchType = "prob"
    ngram_corpus: tuple[Path, ...] = ()
    branching: int = 4
    min_path_value: float | None = None
    min_acceptance: float = GrowthConfig.min_acceptance
    rejection_top_k: int = GrowthConfig.rejection_top_k
    rejection_acceptance: float = GrowthConfig.rejection_acceptance
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
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} given, 0 to 65535 needed")
        check_coordinators(self.coordinators)
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s: {self.drain_s} given, 0 or more needed")
        check_bind(self.host, insecure=self.insecure, tls_ca=self.tls)
        check_metrics_options(self.metrics_port, self.metrics_host, insecure=self.insecure, tls=self.tls)
        if self.source not in get_args(DraftSource):
            raise ValueError(f"source: {self.source!r} given, {', '.join(get_args(DraftSource))} needed")
        check_ngram_options(self)
        if self.max_live_nodes > MOST_NODES:
            raise ValueError(
                f"max_live_nodes: {self.max_live_nodes} given, at most {MOST_NODES} needed: a pool holds no more"
            )
        self.engine()
        self.growth(max_model_len=self.max_model_len or 1)

    @property
    def uses_model(self) -> bool:
        """Whether a draft model grows."""
        return "model" in self.source

    @property
    def uses_ngram(self) -> bool:
        """Whether n-grams grow."""
        return "ngram" in self.source

    @property
    def model_folder(self) -> Path:
        """The checkpoint folder."""
        return Path(self.model_path or embedded_draft_path())

    @property
    def address(self) -> str:
        """host:port to listen on."""
        return f"{self.host}:{self.port}"

    @property
    def tls(self) -> TlsConfig | None:
        """None talks in the clear."""
        return TlsConfig.of_options(self.tls_ca, self.tls_certificate, self.tls_key)

    def engine(self) -> EngineConfig:
        """The model's part."""
        own = {"model_path": self.model_folder, "max_tree_nodes": self.max_live_nodes, "torch_threads": self.threads}
        return EngineConfig(**self._fields_of(EngineConfig) | own)

    def growth(self, *, max_model_len: int) -> GrowthConfig:
        """The trees' part; the length is the loaded model's."""
        own = self._fields_of(GrowthConfig)
        defaults = {name: value for name, value in step_defaults(self.device).items() if own[name] is None}
        return GrowthConfig(**own | defaults | {"max_model_len": max_model_len})

    def _fields_of(self, part: type) -> dict[str, Any]:
        """The values of the fields that a part's configuration has under the same name."""
        own = {field.name for field in fields(self)}
        return {field.name: getattr(self, field.name) for field in fields(part) if field.name in own}
