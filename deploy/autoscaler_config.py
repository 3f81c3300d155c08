"""How a deployment scales its drafts by itself."""

import math
from dataclasses import dataclass
from typing import Protocol, Self


class AutoscaleFields(Protocol):
    """The part of a deployment's configuration that is about this."""

    @property
    def min_drafts(self) -> int:
        """Fewest draft workers."""
        ...

    @property
    def max_drafts(self) -> int | None:
        """Most; None keeps the count."""
        ...

    @property
    def autoscale_draft_cost(self) -> float:
        """As `draft_cost` below."""
        ...

    @property
    def autoscale_up_s(self) -> float:
        """As `up_s`."""
        ...

    @property
    def autoscale_down_s(self) -> float:
        """As `down_s`."""
        ...

    @property
    def autoscale_probe_s(self) -> float:
        """As `probe_s`."""
        ...


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

    @classmethod
    def of(cls, config: AutoscaleFields) -> Self:
        """The part of a deployment's configuration; without `max_drafts` the count stands still."""
        return cls(
            min_drafts=config.min_drafts,
            max_drafts=config.min_drafts if config.max_drafts is None else config.max_drafts,
            draft_cost=config.autoscale_draft_cost,
            up_s=config.autoscale_up_s,
            down_s=config.autoscale_down_s,
            probe_s=config.autoscale_probe_s,
        )
