"""Settings of growth by a draft model (free of numba and torch, so that command lines may build them)."""

from dataclasses import dataclass
from typing import Any

from outrider.config_checks import check_at_least_one

# On a CPU every row costs time that the next step waits for; on a GPU some tens of rows cost no more than one.
_CPU_STEPS: dict[str, Any] = {"max_step_nodes": 8, "min_path_value": 0.03}
_GPU_STEPS: dict[str, Any] = {"max_step_nodes": 128, "min_path_value": 0.003}


def step_defaults(device: str) -> dict[str, Any]:
    """Return the settings of `GrowthConfig` that depend on the device: "cpu", "cuda" or "cuda:N"."""
    return _CPU_STEPS if device == "cpu" else _GPU_STEPS


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """Settings of growth by a draft model.

    Attributes:
        branching: children of a node.
        max_step_nodes: most nodes expanded in one step, over all sessions.
        max_session_nodes: of these, most of one session: with more a step takes longer, and fewer of them are deeper.
        max_step_tokens: most prompt tokens of one step.
        max_live_nodes: most nodes of a session, whatever its credit.
        max_model_len: most tokens of a session.
        min_path_value: nodes less likely to be reached are not expanded: a commit would wait for that step.
        min_acceptance: children less likely to be accepted are not grown.
        rejection_top_k: under rejection, a token is drawn from this many of the most likely.
        rejection_acceptance: under rejection, the estimate that a node is accepted: a constant, for what is submitted
            must depend neither on what was drawn nor on how earlier draws ended. The default is about what the embedded
            pair reaches (0.73 at temperature 1, 0.79 at 0.7; 40 held-out prompts, 48 tokens each, sync).

    Raises:
        ValueError: a value out of range.
    """

    branching: int = 4
    max_step_nodes: int = 8
    max_session_nodes: int = 16
    max_step_tokens: int = 256
    max_live_nodes: int = 64
    max_model_len: int = 2048
    min_path_value: float = 0.03
    min_acceptance: float = 0.02
    rejection_top_k: int = 64
    rejection_acceptance: float = 0.7

    def __post_init__(self) -> None:
        check_at_least_one(self, "branching", "max_step_nodes", "max_session_nodes", "max_step_tokens")
        check_at_least_one(self, "max_live_nodes", "max_model_len", "rejection_top_k")
        for name in ("min_path_value", "min_acceptance"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 0 and below 1 needed")
        if not 0 < self.rejection_acceptance <= 1:
            raise ValueError(f"rejection_acceptance: {self.rejection_acceptance} given, above 0 and at most 1 needed")
        if self.rejection_acceptance < self.min_acceptance:
            raise ValueError(
                f"rejection_acceptance: {self.rejection_acceptance} given, at least min_acceptance "
                f"({self.min_acceptance}) needed: no chain would grow"
            )

    @property
    def capacity(self) -> int:
        """Entries of a session in the pool: a power of two with room for `max_live_nodes`."""
        return 1 << max(self.max_live_nodes - 1, 15).bit_length()
