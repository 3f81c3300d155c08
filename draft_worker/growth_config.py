"""How trees are grown (free of numba, so that command lines may build it)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """How trees are grown.

    Attributes:
        branching: children of a node.
        max_step_nodes: most nodes expanded in one step, over all sessions.
        max_session_nodes: of these, most of one session: with more a step takes longer, and fewer of them are deeper.
        min_session_nodes: nodes a step leaves to each session that can grow before the best of all are taken.
        max_step_tokens: most prefill tokens of one step.
        max_step_rows: rows of one step that levels of sync sessions fill it up to, each of which comes whole.
        max_live_nodes: most nodes of a session, whatever its credit.
        max_model_len: most tokens of a session.
        min_path_value: nodes less likely to be reached are not expanded: a commit would wait for that step.
        min_acceptance: children less likely to be accepted are not grown.
        graph_cuts: the layers that CUDA graphs of a step end with, but for its last: see `StepGraphs`.
        sync_step_nodes: sync mode: nodes of one session expanded in one step.
        prior_strength: trials that the calibration's prior is worth.
        calibration_decay: what one trial leaves of its bucket's earlier ones.
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
    min_session_nodes: int = 1
    max_step_tokens: int = 256
    max_step_rows: int = 512
    max_live_nodes: int = 64
    max_model_len: int = 2048
    min_path_value: float = 0.03
    min_acceptance: float = 0.02
    graph_cuts: tuple[int, ...] = (2, 8)
    sync_step_nodes: int = 8
    prior_strength: float = 20.0
    calibration_decay: float = 0.999
    rejection_top_k: int = 64
    rejection_acceptance: float = 0.7

    def __post_init__(self) -> None:
        for name in (
            "branching", "max_step_nodes", "max_session_nodes", "min_session_nodes", "max_step_tokens", "max_step_rows",
            "max_live_nodes", "max_model_len", "sync_step_nodes", "rejection_top_k",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} given, at least 1 needed")
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
