"""How a deployment is set up: what runs, where, and with how much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from outrider.engine.config import EngineConfig, KvCacheDtype, Quantization


class Bind(StrEnum):
    """Where the servers listen.

    LOOPBACK: 127.0.0.1, every role on one node. NODE: each on its own node's address, spread by Ray. Traffic is not
    encrypted and callers are not authenticated: NODE is for a network that is closed by other means.
    """

    LOOPBACK = "loopback"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """One deployment: a coordinator, target workers and draft workers as Ray actors.

    Attributes:
        ray_address: "local" starts a Ray of its own; "auto" joins the cluster of this machine; "host:port" or
            "ray://host:port" joins the cluster there.
        name: of the deployment; its actors are called NAME/coordinator, NAME/target-0, NAME/draft-0.
        target_model: checkpoint folder, on every node that may hold a target; default the embedded target.
        draft_model: checkpoint folder, on every node that may hold a draft; default the embedded draft.
        targets: number of target workers.
        drafts: number of draft workers; 0 decodes without speculation.
        drafts_per_session: draft workers that grow one choice's tree, where there are so many.
        port: of the coordinator; 0 takes one that is free when the deployment starts, and keeps it over restarts.
        bind: where the servers listen.
        tensor_parallel_size: GPUs that share each target's model, all of one node.
        target_gpus: GPUs per target worker; default `tensor_parallel_size` where that is more than one, else what the
            cluster has, shared evenly, at most one each. 0 runs targets on CPUs.
        draft_gpus: GPUs per draft worker; likewise.
        max_model_len: most tokens of a session (prompt and output); default the checkpoints' own limits.
        max_num_seqs: sessions at a time, of each worker.
        quantization: fp8 rounds the targets' layers to 8 bits while they are loaded; by default they are not touched.
        kv_cache_memory_fraction: of the GPU memory that is free once a worker's weights are loaded, what its KV takes.
        kv_cache_dtype: of the targets' KV: auto is the model's, fp8_e4m3 takes a byte a number (on a GPU).
        enable_prefix_caching: targets keep the KV of tokens that no session holds any more, for those that begin alike.
        max_prefill_tokens: most rows of a target's step that only prefills; default 128 on a CPU, 4096 on a GPU.
        prefill_slowdown: how much longer than its verification alone a target's step may take for the sake of prefill.
        enforce_eager: targets run one operator after the other, without CUDA graphs: slow, for finding errors.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its target's step.
        coordinator_resources: custom Ray resources that the coordinator's machine must have, as NAME=AMOUNT.
        target_resources: custom Ray resources per target worker, as NAME=AMOUNT.
        draft_resources: custom Ray resources per draft worker, as NAME=AMOUNT.
        target_threads: CPU threads per target worker; default the cores that the drafts leave, shared evenly.
        draft_threads: CPU threads per draft worker.
        start_timeout_s: longest that a role may take to serve, loading its model included.
        ping_interval_s: time between two looks at an actor's health.
        hang_timeout_s: silence of a serving actor after which it is killed and started anew.
        stop_timeout_s: time that a role gets to finish its requests when the deployment stops.
        object_store_bytes: of a local Ray; the data path does not use it.
        role_logs: print what the roles log; otherwise it is only in Ray's session folder.

    Raises:
        ValueError: a value out of range, with the value.
    """

    ray_address: str = "local"
    name: str = "outrider"
    target_model: Path | None = None
    draft_model: Path | None = None
    targets: int = 1
    drafts: int = 1
    drafts_per_session: int = 1
    port: int = 50051
    bind: Bind = Bind.LOOPBACK
    tensor_parallel_size: int = 1
    target_gpus: float | None = None
    draft_gpus: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    quantization: Quantization | None = None
    kv_cache_memory_fraction: float = 0.9
    kv_cache_dtype: KvCacheDtype = "auto"
    enable_prefix_caching: bool = True
    max_prefill_tokens: int | None = None
    prefill_slowdown: float = 0.3
    enforce_eager: bool = False
    deterministic: bool = False
    coordinator_resources: tuple[str, ...] = ()
    target_resources: tuple[str, ...] = ()
    draft_resources: tuple[str, ...] = ()
    target_threads: int | None = None
    draft_threads: int = 1
    start_timeout_s: float = 300.0
    ping_interval_s: float = 1.0
    hang_timeout_s: float = 10.0
    stop_timeout_s: float = 10.0
    object_store_bytes: int = 200_000_000
    role_logs: bool = False

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name: {self.name!r} given, a name without '/' needed")
        if self.targets < 1:
            raise ValueError(f"targets: {self.targets} given, at least 1 needed")
        if self.drafts < 0:
            raise ValueError(f"drafts: {self.drafts} given, 0 or more needed")
        if self.drafts_per_session < 1:
            raise ValueError(f"drafts_per_session: {self.drafts_per_session} given, at least 1 needed")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} given, 0 to 65535 needed")
        for name in ("target_threads", "draft_threads"):
            if (threads := getattr(self, name)) is not None and threads < 1:
                raise ValueError(f"{name}: {threads} given, at least 1 needed")
        for name in ("coordinator_resources", "target_resources", "draft_resources"):
            try:
                amounts(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        self._check_gpus()
        self._check_workers()
        for name in ("start_timeout_s", "ping_interval_s", "hang_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} given, more than 0 needed")

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
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens: {self.max_prefill_tokens} given, at least 1 needed")
        if not 0 <= self.prefill_slowdown < math.inf:
            raise ValueError(f"prefill_slowdown: {self.prefill_slowdown} given, 0 or more needed")

    def _check_gpus(self) -> None:
        for name in ("target_gpus", "draft_gpus"):
            if (gpus := getattr(self, name)) is not None and not 0 <= gpus < math.inf:
                raise ValueError(f"{name}: {gpus} given, 0 or more needed")
        if self.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size: {self.tensor_parallel_size} given, at least 1 needed")
        if self.tensor_parallel_size > 1 and self.target_gpus not in (None, 0, self.tensor_parallel_size):
            raise ValueError(
                f"target_gpus: {self.target_gpus} given, with tensor_parallel_size {self.tensor_parallel_size} "
                "as many (or 0, for CPUs) needed"
            )


def asked_target_gpus(config: DeployConfig) -> float | None:
    """GPUs per target worker that the configuration settles; None where what the cluster has is shared."""
    if config.target_gpus is None and config.tensor_parallel_size > 1:
        return float(config.tensor_parallel_size)
    return config.target_gpus


def amounts(resources: Sequence[str]) -> dict[str, float]:
    """`{"big_gpu": 1.0}` of `["big_gpu=1"]`.

    Raises:
        ValueError: an entry is not NAME=AMOUNT with an amount above 0.
    """
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


def target_threads(config: DeployConfig, cores: int) -> int:
    """CPU threads of a target worker on a machine with so many cores.

    What was configured, else an even part of what the drafts leave; with roles on many machines, all cores but one.
    """
    if config.target_threads is not None:
        return config.target_threads
    if config.bind is Bind.NODE:
        return max(1, cores - 1)
    return max(1, (cores - config.drafts * config.draft_threads) // config.targets)


def shared_gpus(available: float, workers: int) -> float:
    """GPUs per worker when `workers` of them share `available`: a whole one where it suffices, else an even part.

    A part is rounded down so that as many as needed fit on one GPU: 2 GPUs for 3 workers give half a GPU each.
    """
    if workers == 0 or available < 1:
        return 0.0
    return 1.0 / math.ceil(workers / int(available))
