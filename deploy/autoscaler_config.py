"""How a deployment scales its drafts by itself."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AutoscalerConfig:
    """The policy's numbers.

    Attributes:
        min_drafts: fewest draft workers; 0 lets speculation be given up while it does not pay.
        max_drafts: most.
        draft_cost: what a draft worker costs, as a share of a target worker: one more has to bring as much.
        up_s: how long more drafts have to look worth having before they are started, and the window looked at.
        down_s: how long fewer drafts have to suffice before one is ended.
        probe_s: without any draft: how often one is started to see whether it would pay.

    Raises:
        ValueError: a value out of range, with the value.
    """

    min_drafts: int = 0
    max_drafts: int = 1
    draft_cost: float = 0.05
    up_s: float = 2.0
    down_s: float = 30.0
    probe_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_drafts <= self.max_drafts:
            raise ValueError(f"min_drafts: {self.min_drafts} given, 0 to max_drafts ({self.max_drafts}) needed")
        if not 0 <= self.draft_cost < math.inf:
            raise ValueError(f"autoscale_draft_cost: {self.draft_cost} given, 0 or more needed")
        for name in ("up_s", "down_s", "probe_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"autoscale_{name}: {getattr(self, name)} given, more than 0 needed")
