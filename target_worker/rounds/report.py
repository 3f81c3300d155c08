"""A round's report, as the host reads it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.kernels.pool.re_root import TreeEnd
from outrider.kernels.verification.report import ReportColumn, RoundCounts, RoundTime
from outrider.kernels.verification.walk import COUNTED_BITS, COUNTED_KINDS, DRAFTERS_SHIFT, MOST_COUNTED, Finish
from outrider.target_worker.sessions.requests import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class ReportShape:
    """Sizes of a report.

    Attributes:
        sessions: N of the largest step, chunks included.
        most: M, most rows of a session.
        logprobs: K, most alternatives with log probabilities.
    """

    sessions: int
    most: int
    logprobs: int


class RoundReport:
    """A round's report.

    Args:
        words: as `report_round` wrote them.
        shape: its sizes.

    Attributes:
        sessions: with verified rows.
        chunks: of prompts; their columns stand behind those of the sessions.
        verified_rows: rows of these.
        runnable: sessions that the next round can verify.
        times_ns: moments of the round by `RoundTime`, on the device's clock.
        columns: [columns, N] int32 by `ReportColumn`.
    """

    def __init__(self, words: npt.NDArray[np.int64], shape: ReportShape) -> None:
        self._shape = shape
        self.times_ns: list[int] = words[: len(RoundTime)].tolist()
        self.sessions, self.chunks = int(words[RoundCounts.SESSIONS]), int(words[RoundCounts.CHUNKS])
        self.verified_rows, self.runnable = int(words[RoundCounts.ROWS]), int(words[RoundCounts.RUNNABLE])
        columns = words[max(RoundCounts) + 1 :].view(np.int32)
        narrow, wide = len(ReportColumn) * shape.sessions, shape.sessions * shape.most
        self.columns: Any = columns[:narrow].reshape(len(ReportColumn), shape.sessions)
        # Plain lists: the sessions are gone through one by one, and numpy's numbers cost several times as much.
        self._listed: list[list[int]] = self.columns[:, : self.sessions + self.chunks].tolist()
        self._tokens: list[list[int]] = self._rows(columns[narrow : narrow + wide], ReportColumn.TOKENS).tolist()
        accepted = self._rows(columns[narrow + wide : narrow + 2 * wide], ReportColumn.ACCEPTED)
        self._offsets = (accepted & (1 << DRAFTERS_SHIFT) - 1).tolist()
        self._drafters = (accepted >> DRAFTERS_SHIFT & 0xFF).tolist()

    def _rows(self, words: npt.NDArray[np.int32], counted_by: ReportColumn) -> npt.NDArray[np.int32]:
        """The rows of the sessions, as far as one is in use."""
        longest = max(self._listed[counted_by][: self.sessions], default=0)
        return words.reshape(-1, self._shape.most)[: self.sessions, :longest]

    def value(self, column: ReportColumn, number: int) -> int:
        """Return what a column says of a session."""
        return self._listed[column][number]

    def opening(self, number: int) -> tuple[int, int]:
        """Return the row of a column, and which opening of it."""
        return self._listed[ReportColumn.POOL_ROW][number], self._listed[ReportColumn.GENERATION][number] % 2**32

    def walk(self, number: int) -> tuple[list[int], list[int], list[int]]:
        """Return a session's committed tokens, its accepted rows (1 is the first behind the root), and for each of
        these the bit set of the kinds of drafter that had proposed it.
        """
        tokens, accepted = self._listed[ReportColumn.TOKENS][number], self._listed[ReportColumn.ACCEPTED][number]
        return self._tokens[number][:tokens], self._offsets[number][:accepted], self._drafters[number][:accepted]

    def selected_by_kind(self, number: int) -> list[int]:
        """Return how many of a session's nodes drafters of kind 1, 2 and 3 had proposed."""
        counts = self._listed[ReportColumn.SELECTED][number]
        return [counts >> COUNTED_BITS * kind & MOST_COUNTED for kind in range(COUNTED_KINDS)]

    def tree_end(self, number: int) -> TreeEnd:
        """Return where the round has left a session's tree."""
        return TreeEnd(self._listed[ReportColumn.TREE_END][number])

    def finish(self, number: int) -> Finish:
        """Return why a session has ended."""
        return Finish(self._listed[ReportColumn.FINISH][number])

    def logprobs(
        self, number: int, tokens: int, wanted: int | None, words: npt.NDArray[np.int32]
    ) -> TokenLogprobs | None:
        """Return log probabilities of a session's tokens.

        Args:
            number: of the session in the round.
            tokens: how many.
            wanted: alternatives of each; None if the session does not ask.
            words: [N, M, 1 + 2 K] int32 as `report_logprobs` wrote them.
        """
        if wanted is None:
            return None
        # A copy: the next round but one writes there again.
        own, most = words[number, :tokens].copy(), self._shape.logprobs
        count = min(wanted, most)
        return TokenLogprobs(
            token_logprobs=own[:, 0].view(np.float32),
            top_token_ids=own[:, 1 : 1 + count].astype(np.int64),
            top_logprobs=own[:, 1 + most : 1 + most + count].view(np.float32),
        )
