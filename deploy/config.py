"""Configuration of a deployment: roles, placement, resources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from outrider.config_checks import check_at_least_one, check_between, check_not_negative, check_positive
from outrider.draft_worker.config import DraftSource, DraftWorkerConfig
from outrider.draft_worker.drafters.ngram.options import MatchType
from outrider.engine.config import EngineConfig, KvCacheDtype, Quantization
from outrider.models import embedded_draft_path
from outrider.roles.log_output import LogFormat
from outrider.target_worker.config import TargetWorkerConfig


class Bind(StrEnum):
    """Network that the servers listen on.

    LOOPBACK: 127.0.0.1, every role on one machine. NODE: each on its own node's address, spread by Ray; only with
    certificates and tokens, unless `insecure` says otherwise.
    """

    LOOPBACK = "loopback"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """One deployment: coordinators, target workers and draft workers as Ray actors, and the controller that owns them.

    Attributes:
        address: "local" starts a Ray of its own; "auto" joins the cluster of this machine; "host:port" or
            "ray://host:port" joins the cluster there.
        name: of the deployment; its actors are called NAME/controller, NAME/coordinator-0, NAME/target-0, NAME/draft-0.
        target_model: the model that is served: a name on the Hugging Face Hub, a checkpoint folder, or a .gguf file;
            default the embedded pair. With `bind` node a folder at the same path on every machine.
        draft_model: the model that drafts, of the target's tokenizer, or an EAGLE head of the target: named likewise.
            Default the embedded draft beside the embedded target; beside any other, n-grams draft.
        drafter_placement: where the draft model runs: worker, in draft workers; resident, inside each target worker and
            on its device; both. Default resident where targets leave no GPU free and no option of draft workers is
            given, and for an EAGLE head, which runs nowhere else. Otherwise worker.
        resident_draft: drafter inside each target worker, where it is another one than that of the draft workers: an
            EAGLE head or a draft model, named likewise.
        targets: number of target workers.
        drafts: number of draft workers at the start; default 1, and none where the drafter is resident. With 0 of them,
            and no resident one, nothing is speculated.
        min_drafts: fewest draft workers that the deployment scales itself to; with `max_drafts`.
        max_drafts: most draft workers that the deployment scales itself to, by demand; by default it keeps `drafts`.
        drafts_per_session: draft workers of each source that grow one choice's tree, where there are so many.
        coordinators: number of coordinators; clients and workers know them by one list of addresses.
        port: of a coordinator; the second on the same machine takes the next one, and so on. 0 takes ones that are
            free when the deployment starts. A coordinator keeps its port over restarts.
        http_port: of a coordinator's HTTP door (OpenAI's API), numbered as `port` is; 0 takes a free one. Default 8000,
            and a free one where `port` is 0.
        shared_port: at which all coordinators of a machine listen together, beside their own ports: clients need one
            address, and the kernel spreads their connections. It may be `port`, whose next ones they then have for
            themselves. Default: none.
        shared_http_port: likewise, of the HTTP doors; with http_port.
        http_cors: origin whose web pages may send requests to the HTTP door (CORS), or * for every one; may be given
            several times.
        served_model_name: that clients know the model by, for each time it is given; the first is what answers say.
            Default the name on the Hub, the folder's or the file's.
        tokenizer_path: folder with tokenizer.json, where it is not the model's.
        chat_template: Jinja file that makes text of a conversation, where it is not the model's own.
        default_max_new_tokens: output limit of a request that names none.
        max_running_sessions: choices that a coordinator lets run at a time; default as many as the targets take.
        max_queue: how many wait beyond these; default what the coordinator works out.
        live_page: serve a page at /live of that door that shows token trees growing and being verified, with their
            text (docs/live-page.md).
        vllm_grpc: serve vLLM's gRPC engine service beside the own one, for routers that drive vLLM so.
        metrics_port: on which Prometheus reads workers: target-N on metrics_port + N, draft-N on metrics_port + 100 +
            N, where they listen (docs/metrics.md). Coordinators are read at their HTTP door. Default: not at all.
        target_wait_s: longest that a request waits at a coordinator that has no target: one is being started anew.
        allow_synthetic: take requests whose drafts are accepted at given rates, whatever they are: for benchmarks.
        target_port: of every target worker; for machines that hold one each. By default each takes a free one.
        draft_port: of every draft worker; likewise.
        bind: where the servers listen.
        certs: folder with every role's certificate, as `outrider certs` writes it, at the same path on every machine.
            With it all traffic is encrypted, each role checks the other's certificate, and workers register one port
            above the coordinator's `port`.
        token_file: hashed bearer tokens of the clients that are served, at the same path on every machine.
        insecure: listen beyond loopback without certificates and tokens, on a network that is closed by other means.
        tensor_parallel_size: GPUs that share each target's model, all of one node.
        target_gpus: GPUs per target worker; default `tensor_parallel_size` where that is more than one, else what the
            cluster has, shared evenly, at most one each. 0 runs targets on CPUs.
        draft_gpus: GPUs per draft worker; likewise.
        max_model_len: most tokens of a session (prompt and output); default the checkpoints' own limits.
        max_num_seqs: sessions at a time, of each worker.
        quantization: fp8 rounds the targets' layers to 8 bits while they are loaded; by default they are not touched.
        kv_cache_memory_fraction: of the GPU memory that is free once a worker's weights are loaded, what its KV takes.
        target_kv_bytes: memory of each target's KV. Default: where workers share a GPU, the budget that the plan names;
            otherwise kv_cache_memory_fraction, on a CPU 1 GiB.
        draft_kv_bytes: likewise, of each draft's.
        kv_cache_dtype: of the targets' KV: auto is the model's, fp8_e4m3 takes a byte a number (on a GPU).
        enable_prefix_caching: targets keep the KV of tokens that no session holds any more, for those that begin alike.
        max_prefill_tokens: most prompt rows of a target's round; default 128 on a CPU, 2048 on a GPU.
        prefill_slowdown: how much longer than its verification alone a target's step may take for the sake of prefill.
        enforce_eager: targets run one operator after the other, without CUDA graphs: slow, for finding errors.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its target's step.
        source: by what draft workers grow trees: model, ngram (of what prompts and outputs said before; they take no
            GPU), or model+ngram. Default model where there is one, else ngram.
        ngram_capacity: most nodes of each draft worker's trie of n-grams.
        ngram_max_trie_depth: tokens of an n-gram.
        ngram_min_breadth: most continuations of a node below the longest suffix that was seen before.
        ngram_max_breadth: likewise, below the shortest one; 1 makes a single branch.
        ngram_draft_tokens: most nodes proposed for a session at a time.
        ngram_match_type: which continuations come first: prob, the most frequent; bfs, the most recent.
        ngram_corpus: a file of texts that the tries begin with, on every node that may hold a draft; may be given
            several times.
        coordinator_resources: custom Ray resources per coordinator, as NAME=AMOUNT.
        target_resources: custom Ray resources per target worker, as NAME=AMOUNT.
        draft_resources: custom Ray resources per draft worker, as NAME=AMOUNT.
        drafts_beside_target: so many drafts have a place kept for them on each target's own machine, in one placement
            group with the target; further drafts go where there is room.
        autoscale_draft_cost: what a draft worker costs, as a share of a target worker: one more has to bring as much.
        autoscale_up_s: how long more drafts have to look worth having before they are started.
        autoscale_down_s: how long fewer drafts have to suffice before one is ended.
        autoscale_probe_s: without any draft: how often one is started to see whether it would pay.
        target_threads: CPU threads per target worker; default the cores that the drafts leave, shared evenly.
        draft_threads: CPU threads per draft worker.
        start_timeout_s: longest that a role may take to serve, loading its model included.
        ping_interval_s: time between two looks at an actor's health.
        hang_timeout_s: silence of a serving actor after which it is killed and started anew.
        node_timeout_s: silence of a machine after which what ran there is started on others; Ray takes some 15 s.
        owner_timeout_s: silence of the `serve` process after which a deployment that is not detached ends.
        stop_timeout_s: time that a role gets to finish its requests when the deployment stops.
        object_store_bytes: of a local Ray; the data path does not use it.
        standby: on every machine with workers a process that has imported what they need forks them, which saves each
            some four seconds of CPU. By default with `bind` loopback, where the machine is known to have this
            package at the same path (on Linux).
        keep_cores_awake: run each role on so many cores of its own once it serves, and never let them sleep: shorter
            rounds, at the price of power and of cores that nothing else can use.
        role_logs: print what the roles log; otherwise it is only in Ray's session folder.
        log_level: least severity that the roles log.
        log_format: of the roles' logs: lines for people, or a JSON object a line for programs.
        otlp_endpoint: OpenTelemetry collector that gets the roles' traces (OTLP over gRPC, http://HOST:4317), as
            every machine reaches it; default: no traces.

    Raises:
        ValueError: a value out of range, with the value.
    """

    address: str = "local"
    name: str = "outrider"
    target_model: str | None = field(default=None, metadata={"argument": "MODEL"})
    draft_model: str | None = field(default=None, metadata={"option": "--draft"})
    drafter_placement: Literal["worker", "resident", "both"] | None = None
    resident_draft: str | None = None
    targets: int = 1
    drafts: int | None = None
    min_drafts: int = 0
    max_drafts: int | None = None
    drafts_per_session: int = 1
    coordinators: int = 1
    port: int = 50051
    http_port: int | None = None
    shared_port: int | None = None
    shared_http_port: int | None = None
    http_cors: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    tokenizer_path: Path | None = None
    chat_template: Path | None = None
    default_max_new_tokens: int = 128
    max_running_sessions: int | None = None
    max_queue: int | None = None
    live_page: bool = False
    vllm_grpc: bool = False
    metrics_port: int | None = None
    target_wait_s: float = 30.0
    allow_synthetic: bool = False
    target_port: int = 0
    draft_port: int = 0
    bind: Bind = Bind.LOOPBACK
    certs: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    tensor_parallel_size: int = 1
    target_gpus: float | None = None
    draft_gpus: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    quantization: Quantization | None = None
    kv_cache_memory_fraction: float = 0.9
    target_kv_bytes: int | None = None
    draft_kv_bytes: int | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    enable_prefix_caching: bool = True
    max_prefill_tokens: int | None = None
    prefill_slowdown: float = 0.3
    enforce_eager: bool = False
    deterministic: bool = False
    source: DraftSource | None = None
    ngram_capacity: int = 10_000_000
    ngram_max_trie_depth: int = 18
    ngram_min_breadth: int = 1
    ngram_max_breadth: int = 10
    ngram_draft_tokens: int = 12
    ngram_match_type: MatchType = "prob"
    ngram_corpus: tuple[Path, ...] = ()
    coordinator_resources: tuple[str, ...] = ()
    target_resources: tuple[str, ...] = ()
    draft_resources: tuple[str, ...] = ()
    drafts_beside_target: int = 0
    autoscale_draft_cost: float = 0.05
    autoscale_up_s: float = 2.0
    autoscale_down_s: float = 30.0
    autoscale_probe_s: float = 120.0
    target_threads: int | None = None
    draft_threads: int = 1
    start_timeout_s: float = 300.0
    ping_interval_s: float = 1.0
    hang_timeout_s: float = 10.0
    node_timeout_s: float = 4.0
    owner_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0
    object_store_bytes: int = 200_000_000
    standby: bool | None = None
    keep_cores_awake: int = 0
    role_logs: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None

    @property
    def first_http_port(self) -> int:
        """HTTP port of the first coordinator; 0 for a free port."""
        if self.http_port is not None:
            return self.http_port
        return _HTTP_PORT if self.port else 0

    @property
    def forks_workers(self) -> bool:
        """True if workers are forked of a stand-by that has imported what they need."""
        return self.bind is Bind.LOOPBACK if self.standby is None else self.standby

    @property
    def draft_source(self) -> DraftSource:
        """`source` with its default filled in."""
        has_model = self.draft_model is not None or self.target_model is None
        return self.source or ("model" if has_model else "ngram")

    @property
    def draft_workers(self) -> int:
        """`drafts` with its default filled in."""
        if self.drafts is not None:
            return self.drafts
        return 0 if self.drafter_placement == "resident" else 1

    @property
    def worker_options(self) -> dict[str, Any]:
        """Options that were given and that draft workers alone have."""
        given = {own.name: getattr(self, own.name) for own in fields(self) if getattr(self, own.name) != own.default}
        # No drafts are what a resident drafter has anyway.
        return {name: given[name] for name in _WORKER_OPTIONS if name in given and (name != "drafts" or self.drafts)}

    @property
    def resident_model(self) -> Path | None:
        """The draft model or the head inside each target worker; None without one."""
        if self.resident_draft is not None:
            return Path(self.resident_draft)
        if self.drafter_placement in (None, "worker"):
            return None
        return Path(self.draft_model or embedded_draft_path())

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name: {self.name!r} given, a name without '/' needed")
        self._check_counts()
        self._check_ports()
        check_at_least_one(self, "target_threads", "draft_threads")
        for name in ("coordinator_resources", "target_resources", "draft_resources"):
            try:
                amounts(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        self._check_security()
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_endpoint: {self.otlp_endpoint!r} given, http://HOST:PORT or https://HOST:PORT needed"
            )
        self._check_gpus()
        self._check_workers()
        check_not_negative(self, "target_wait_s")
        check_positive(self, "start_timeout_s", "ping_interval_s", "hang_timeout_s", "node_timeout_s")
        check_positive(self, "owner_timeout_s", "stop_timeout_s")

    def _check_ports(self) -> None:
        check_between(self, 0, 65535, "port", "target_port", "draft_port", "http_port")
        check_between(self, 1, 65000, "metrics_port")
        check_between(self, 1, 65535, "shared_port", "shared_http_port")
        if (shared := self.shared_http_port) is None:
            return
        # Their own ports leave `shared_port` out, and those for HTTP are as far from the first one as these are.
        doors = 1 if self.certs is None else 2
        skipped = None if self.shared_port is None else self.shared_port - self.port
        if shared - self.first_http_port in {*range(self.coordinators * doors)} - {skipped}:
            raise ValueError(
                f"shared_http_port: {shared} given, which one of them has as its own http_port: another needed"
            )

    def _check_workers(self) -> None:
        # On whatever device they will be: that a worker finds out when it starts.
        EngineConfig(
            model_path="",
            device="cuda",
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            quantization=self.quantization,
            kv_cache_memory_fraction=self.kv_cache_memory_fraction,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        # Files of texts are on the nodes, not here.
        DraftWorkerConfig(**{name: getattr(self, name) for name in NGRAM_FIELDS if name != "ngram_corpus"})
        TargetWorkerConfig(
            device="cuda",
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            enforce_eager=self.enforce_eager,
        )
        check_at_least_one(self, "max_prefill_tokens", "target_kv_bytes", "draft_kv_bytes", "default_max_new_tokens")
        check_at_least_one(self, "max_running_sessions")
        check_not_negative(self, "keep_cores_awake", "max_queue", "prefill_slowdown")

    def _check_counts(self) -> None:
        check_at_least_one(self, "targets", "coordinators", "drafts_per_session")
        check_not_negative(self, "drafts", "min_drafts", "drafts_beside_target")
        if self.max_drafts is None and self.min_drafts:
            raise ValueError(f"min_drafts: {self.min_drafts} given, with max_drafts needed")
        self._check_placement()
        drafts = self.draft_workers
        if self.max_drafts is not None and not self.min_drafts <= drafts <= self.max_drafts:
            raise ValueError(
                f"max_drafts: {self.max_drafts} given, with drafts {drafts} between min_drafts {self.min_drafts} "
                "and max_drafts needed"
            )
        check_not_negative(self, "autoscale_draft_cost")
        check_positive(self, "autoscale_up_s", "autoscale_down_s", "autoscale_probe_s")

    def _check_placement(self) -> None:
        placement = self.drafter_placement
        if placement not in (None, "worker") and self.target_model is not None and self.draft_model is None:
            raise ValueError(f"drafter_placement: {placement} given, with draft_model needed")
        if self.resident_draft is not None and placement in ("resident", "both"):
            raise ValueError(
                f"drafter_placement: {placement} given, worker needed beside resident_draft, which is inside the target"
            )
        if placement == "resident":
            for name, value in self.worker_options.items():
                raise ValueError(f"{name}: {value} given, where the drafter is resident: drafter_placement both")

    def _check_security(self) -> None:
        missing = [name for name in ("certs", "token_file") if getattr(self, name) is None]
        if self.bind is Bind.NODE and missing and not self.insecure:
            raise ValueError(
                f"bind: {self.bind} given, which other machines may reach: give {' and '.join(missing)} as well, or "
                "insecure, which serves whoever comes, unencrypted"
            )

    def _check_gpus(self) -> None:
        check_not_negative(self, "target_gpus", "draft_gpus")
        check_at_least_one(self, "tensor_parallel_size")
        if self.tensor_parallel_size > 1 and self.target_gpus not in (None, 0, self.tensor_parallel_size):
            raise ValueError(
                f"target_gpus: {self.target_gpus} given, with tensor_parallel_size {self.tensor_parallel_size} "
                "as many (or 0, for CPUs) needed"
            )


_HTTP_PORT = 8000
_WORKER_OPTIONS = (
    "drafts",
    "max_drafts",
    "source",
    "draft_gpus",
    "draft_kv_bytes",
    "draft_resources",
    "drafts_beside_target",
    "draft_port",
    "draft_threads",
)


NGRAM_FIELDS = tuple(own.name for own in fields(DeployConfig) if own.name.startswith("ngram_"))
"""Fields that draft workers take over unchanged."""


def amounts(resources: Sequence[str]) -> dict[str, float]:
    """Return `{"big_gpu": 1.0}` of `["big_gpu=1"]`; ValueError for what is not NAME=AMOUNT with an amount above 0."""
    found = {}
    for entry in resources:
        name, _, amount = entry.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise ValueError(f"{entry!r} given, NAME=AMOUNT needed") from None
        if not name or not 0 < found[name] < math.inf:
            raise ValueError(f"{entry!r} given, NAME=AMOUNT with an amount above 0 needed")
    return found
