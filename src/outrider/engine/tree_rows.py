"""Nodes of many sessions' trees as a growth step takes them, for whoever chooses them without the model at hand."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Nodes of the trees of P sessions, one session after the other: T rows, all of whose children are ranked.

    Attributes:
        sessions: [4, P] rows of the slot table, key index of bit 0 of the masks, keys and query rows of each.
        rows: [4, T] tokens, positions, key index of each one's own key and value, and of the first that is in a mask.
        masks: [T, W] int64 words, the node's own bit included.
        records: [T, 8] int32 words of each one's `SamplingSpec.record`.
        most_keys: of a session.
        most_queries: of a session.
    """

    sessions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    masks: npt.NDArray[np.int64]
    records: npt.NDArray[np.int32]
    most_keys: int
    most_queries: int
