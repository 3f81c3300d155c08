"""Targets of each operator on an H200, of the candidate pool's on an H100: the one place where they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GREEDY = "temperature 0"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A limit of time: the largest of those given.

    Attributes:
        times_floor: the floor times this.
        part_of_flashinfer: FlashInfer's time divided by this.
        times_beside: the time of the comparison with this heading, times this.
        microseconds: a time by itself.
    """

    times_floor: float | None = None
    part_of_flashinfer: float | None = None
    times_beside: tuple[str, float] | None = None
    microseconds: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.times_floor is not None:
            parts.append(f"{self.times_floor:g} x floor")
        if self.part_of_flashinfer is not None:
            divisor = f" / {self.part_of_flashinfer:g}" if self.part_of_flashinfer != 1 else ""
            parts.append(f"FlashInfer{divisor}")
        if self.times_beside is not None:
            parts.append(f"{self.times_beside[1]:g} x {self.times_beside[0]}")
        if self.microseconds is not None:
            parts.append(f"{self.microseconds:g} us")
        return " or ".join(parts)

    def is_met(
        self, ours_us: float, *, floor_us: float, flashinfer_us: float | None, beside_us: Mapping[str, float]
    ) -> bool | None:
        """Return True if `ours_us` is within the limit; None if that depends on something that was not measured."""
        limits: list[float | None] = [self.microseconds] if self.microseconds is not None else []
        if self.times_floor is not None:
            limits.append(self.times_floor * floor_us)
        if self.part_of_flashinfer is not None:
            limits.append(None if flashinfer_us is None else flashinfer_us / self.part_of_flashinfer)
        if self.times_beside is not None:
            heading, factor = self.times_beside
            limits.append(factor * beside_us[heading] if heading in beside_us else None)
        if any(limit is not None and ours_us <= limit for limit in limits):
            return True
        return None if None in limits else False


TARGETS: dict[str, Target] = {
    "tree_attention, below 16k tokens": Target(times_floor=1.35, part_of_flashinfer=1.5),
    "tree_attention, below 16k tokens, 64 nodes": Target(times_floor=1.9, part_of_flashinfer=1.5),
    "tree_attention": Target(times_floor=1.35, part_of_flashinfer=2.5),
    "tree_attention, 64 nodes": Target(times_floor=1.9, part_of_flashinfer=2.5),
    "coupled_choice": Target(times_beside=(GREEDY, 1.5)),
    "coupled_choice, top-k and top-p": Target(times_beside=(GREEDY, 3.0)),
    "tree_speculative_sampling_target_only, batch 1": Target(microseconds=20),
    "tree_speculative_sampling_target_only, batch 64": Target(microseconds=60),
    "chain_speculative_sampling": Target(part_of_flashinfer=1),
    "graft": Target(microseconds=12),
    "graft, one row": Target(microseconds=25),
    "select": Target(microseconds=20),
    "pack": Target(microseconds=6),
    "re_root": Target(microseconds=8),
    "pool, one session": Target(microseconds=20),
}


def tree_attention_target(*, batch: int, context: int, nodes: int) -> str:
    """The key of the target for this shape: trees of 64 nodes are bound by the matrix units, short work by launches."""
    short = ", below 16k tokens" if batch * context < 16384 else ""
    return "tree_attention" + short + (", 64 nodes" if nodes >= 64 else "")
