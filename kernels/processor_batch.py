"""What the logits processors of a step apply to which row: the arrays of `outrider.kernels.processors`.

Lists of different lengths are compressed rows: `x_start[i]:x_start[i + 1]` is the part of list i. Shapes: T rows, S
sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.backend import check_shape

# The groups that are given or left out together: column and its size, equal names for equal sizes.
_PENALTIES = {
    "repetition_penalty": "S",
    "presence_penalty": "S",
    "frequency_penalty": "S",
    "count_start": "S + 1",
    "count_tokens": "counts",
    "count_output": "counts",
    "path_start": "T + 1",
    "path_tokens": "path entries",
}
_GROUPS = (
    _PENALTIES,
    {"bias_start": "S + 1", "bias_tokens": "bias entries", "bias_values": "bias entries"},
    {"allowed_start": "S + 1", "allowed_tokens": "allowed entries"},
    {"banned_start": "T + 1", "banned_tokens": "banned entries"},
)
PENALTY_COLUMNS = tuple(_PENALTIES)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessorBatch:
    """What is applied to which row. A group left at None is off for every session, and costs nothing.

    Tokens of one list are unique and ascending, except in paths; tokens outside [0, V) are ignored. A row whose
    session lies outside [0, S) gets only its own banned tokens.

    Attributes:
        row_session: [T] int32 or int64, the session of each row.
        repetition_penalty: [S] float32, 1 is off; None when no session has a penalty of any kind.
        presence_penalty: [S] float32, 0 is off.
        frequency_penalty: [S] float32, 0 is off.
        count_start: [S + 1], count_tokens: the tokens of each session's prompt and committed output.
        count_output: how often each of them occurs in the output; 0 for a token of the prompt alone.
        path_start: [T + 1], path_tokens: the tokens of each row's path, from below the root to the row's own token;
            they count as output.
        bias_start: [S + 1], bias_tokens, bias_values (float32); None when no session has a bias.
        allowed_start: [S + 1], allowed_tokens; an empty list allows all. None when no session restricts.
        banned_start: [T + 1], banned_tokens, per row; None when no row bans.

    Raises:
        ValueError: a shape that does not fit or a group given in part, naming the argument.
    """

    row_session: torch.Tensor
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    count_start: torch.Tensor | None = None
    count_tokens: torch.Tensor | None = None
    count_output: torch.Tensor | None = None
    path_start: torch.Tensor | None = None
    path_tokens: torch.Tensor | None = None
    bias_start: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    allowed_start: torch.Tensor | None = None
    allowed_tokens: torch.Tensor | None = None
    banned_start: torch.Tensor | None = None
    banned_tokens: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_shape("row_session", self.row_session, ("T",))
        sizes = {"T + 1": self.row_session.shape[0] + 1}
        for group in _GROUPS:
            if all(getattr(self, name) is None for name in group):
                continue
            for name, size in group.items():
                self._check_column(name, size, sizes)

    def _check_column(self, name: str, size: str, sizes: dict[str, int]) -> None:
        """Check one column of a group in use; the first column of each named size sets it for the others."""
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"{name}: None given, a tensor needed as for the rest of its group")
        if column.device != self.row_session.device:
            raise ValueError(f"{name}: device {column.device} given, {self.row_session.device} needed")
        check_shape(name, column, (sizes.get(size, size),))
        sizes[size] = column.shape[0]
        if size == "S":
            sizes["S + 1"] = column.shape[0] + 1

    @property
    def is_empty(self) -> bool:
        """Whether no processor is on for any row."""
        return all(getattr(self, next(iter(group))) is None for group in _GROUPS)
