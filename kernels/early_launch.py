"""Launches that begin under the end of the launch before them: programmatic dependent launch, Hopper and later.

A kernel launched with `early_options` takes its places while the kernel before it still runs. The kernels of a decoder
step form a chain of such launches, each of which keeps three rules:

1.  Before `gdc_wait` a program reads only what was complete before the chain began: weights, tables, and the arrays of
    the step (positions, slots, lengths, masks). It writes nothing.
2.  Some program of every launch calls `gdc_wait` and does not end before it returns. A launch waits for the one before
    it alone; that the one before waited too is what orders all of them.
3.  `gdc_launch_dependents` may stand anywhere, at best first: it says that the next launch may take its places, not
    that anything is written.

What fills the arrays of the step must therefore be followed, before or as the first of a chain, by a launch without
`gdc_launch_dependents`: any kernel of torch, or one of `outrider.kernels.attention.slot_updates`.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["early_options", "launches_early"]


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Return True if a launch may start before its predecessor ends: Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def early_options(device: torch.device) -> dict[str, bool]:
    """The launch option and the kernel's compile-time parameter EARLY, for a kernel that keeps the rules above."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}
