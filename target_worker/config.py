"""Configuration of a target worker (torch-free, so that command lines may build it)."""

from dataclasses import dataclass
from pathlib import Path

from outrider.config_checks import check_at_least_one, check_between, check_not_negative
from outrider.engine.config import KvCacheDtype
from outrider.models import embedded_target_path
from outrider.roles.worker_config import WorkerConfig
from outrider.target_worker.rounds.config import RoundConfig
from outrider.target_worker.rounds.draft_steps import MOST_STEPS

_CPU_PREFILL_PART, _GPU_PREFILL_TOKENS = 4, 2048


@dataclass(frozen=True, kw_only=True)
class TargetWorkerConfig(WorkerConfig):
    """One target worker process; what it has in common with a draft worker is in `WorkerConfig`.

    Attributes:
        model_path: checkpoint folder; default the embedded target.
        draft_model: checkpoint folder of a draft model, or of an EAGLE head or block drafter of this target, that grows
            trees inside this worker, on its device and with a share of its memory for KV: for a machine with one GPU.
            Default: none.
        draft_branching: children of a node that it grows; 1 grows chains, to compare trees with.
        max_draft_steps: most growth steps before a round, 1 to 8; 1 as above, to compare with drafting one token
            a round.
        max_tree_nodes: most rows of one session in a round: its root and the best of its nodes.
        max_step_tokens: most verified rows of a round: roots and nodes of all sessions.
        max_prefill_tokens: most rows of prompts beside them; default a quarter of max_step_tokens on a CPU, 2048 on a
            GPU.
        prefill_slowdown: how much longer than its verification alone a round may take for the sake of prefill beside
            it: 0.4 is 40 %. At least some rows of prefill always go along.
        kv_cache_dtype: of KV: auto is dtype, fp8_e4m3 takes a byte a number (on a GPU).
        enable_prefix_caching: keep the KV of tokens that no session holds any more, for those that begin alike.
        deterministic: on a GPU, the bits of a token's logits do not depend on what else is in its step; neither with
            attention_backend flashinfer nor with enforce_eager.
        tensor_parallel_size: GPUs that share the model.

    Raises:
        ValueError: a value out of range, with the value.
    """

    draft_model: Path | None = None
    draft_branching: int = 4
    max_draft_steps: int = MOST_STEPS
    max_tree_nodes: int = 64
    max_step_tokens: int = 512
    max_prefill_tokens: int | None = None
    prefill_slowdown: float = 0.3
    kv_cache_dtype: KvCacheDtype = "auto"
    enable_prefix_caching: bool = True
    deterministic: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "max_step_tokens", "max_tree_nodes", "draft_branching", "max_prefill_tokens")
        check_between(self, 1, MOST_STEPS, "max_draft_steps")
        check_not_negative(self, "prefill_slowdown")
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} given, at least max_num_seqs ({self.max_num_seqs}) needed, "
                "so that every session can take a plain step"
            )

    @property
    def prefill_tokens(self) -> int:
        """`max_prefill_tokens` with its default filled in."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return -(-self.max_step_tokens // _CPU_PREFILL_PART) if self.device == "cpu" else _GPU_PREFILL_TOKENS

    @property
    def model_folder(self) -> Path:
        """See `WorkerConfig`."""
        return Path(self.model_path or embedded_target_path())

    def rounds(self, *, max_model_len: int) -> RoundConfig:
        """Return the sizes of the rounds; the length is the loaded model's."""
        return RoundConfig(
            max_sessions=self.max_num_seqs,
            max_model_len=max_model_len,
            max_step_rows=self.max_step_tokens,
            max_session_rows=min(self.max_tree_nodes, self.max_step_tokens),
            max_prefill_tokens=self.prefill_tokens,
            prefill_slowdown=self.prefill_slowdown,
        )
