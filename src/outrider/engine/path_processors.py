"""The logits processors of rows that end token paths, each with its own path counted.

Shapes: T rows of all sessions, session after session.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.kernels.processors import ProcessorBatch
from outrider.sampling import SamplingSpec


class PathRows(Protocol):
    """Rows of one session, each at the end of a path below its last committed token."""

    @property
    def sampling(self) -> SamplingSpec:
        """Parameters of the request."""
        ...

    @property
    def stop_token_ids(self) -> Collection[int]:
        """Tokens that end the output."""
        ...

    @property
    def count(self) -> int:
        """Rows."""
        ...

    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ascending distinct committed tokens, and how often each occurs in the output."""
        ...

    def paths(self) -> Sequence[Sequence[int]]:
        """Each row's tokens, from below the session's last one to its own."""
        ...

    def bans_stop(self) -> np.ndarray:
        """[count] bool: the row chooses a token before which fewer than min_new_tokens are out."""
        ...


def processors_of(rows: Sequence[PathRows], device: torch.device) -> ProcessorBatch:
    """Return what applies to which row; groups that no session uses are left out."""
    specs = [part.sampling for part in rows]
    groups: dict[str, np.ndarray] = {
        "row_session": np.repeat(np.arange(len(rows), dtype=np.int64), [part.count for part in rows])
    }
    if any(spec.has_penalties for spec in specs):
        groups |= _penalties(rows)
    if any(spec.logit_bias for spec in specs):
        biases = [sorted(spec.logit_bias.items()) for spec in specs]
        groups |= _lists("bias", [[token for token, _ in bias] for bias in biases])
        groups["bias_values"] = np.array([value for bias in biases for _, value in bias], dtype=np.float32)
    if any(spec.allowed_token_ids for spec in specs):
        groups |= _lists("allowed", [sorted(set(spec.allowed_token_ids)) for spec in specs])
    if any(spec.min_new_tokens for spec in specs):
        banned: list[Sequence[int]] = []
        for part in rows:
            stop_ids = sorted(part.stop_token_ids)
            banned.extend(stop_ids if bans else () for bans in part.bans_stop().tolist())
        if any(banned):
            groups |= _lists("banned", banned)
    return ProcessorBatch(**{name: torch.from_numpy(values).to(device) for name, values in groups.items()})


def _penalties(rows: Sequence[PathRows]) -> dict[str, np.ndarray]:
    def column(value: Callable[[PathRows], float]) -> np.ndarray:
        return np.array([value(part) for part in rows], dtype=np.float32)

    counts = [part.counts() if part.sampling.has_penalties else _NO_COUNTS for part in rows]
    paths: list[Sequence[int]] = []
    for part in rows:
        paths.extend(part.paths() if part.sampling.has_penalties else [()] * part.count)
    return {
        "repetition_penalty": column(lambda part: part.sampling.repetition_penalty),
        "presence_penalty": column(lambda part: part.sampling.presence_penalty),
        "frequency_penalty": column(lambda part: part.sampling.frequency_penalty),
        "count_start": _starts([len(tokens) for tokens, _ in counts]),
        "count_tokens": np.concatenate([tokens for tokens, _ in counts]),
        "count_output": np.concatenate([output for _, output in counts]),
        **_lists("path", paths),
    }


_NO_COUNTS = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def _lists(name: str, lists: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Lists of different lengths as compressed rows."""
    return {
        f"{name}_start": _starts([len(entries) for entries in lists]),
        f"{name}_tokens": np.array([entry for entries in lists for entry in entries], dtype=np.int64),
    }


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
