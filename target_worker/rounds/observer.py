"""Hooks for programs that measure rounds."""

from collections.abc import Sequence

from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import Level, SessionResult


class RoundObserver:
    """Hooks that a `RoundLoop` calls as it works; these do nothing."""

    def reported(
        self,
        report: RoundReport,
        results: Sequence[SessionResult],
        *,
        prefill_rows: int,
        plain_ns: int,
        drafted_ns: int,
    ) -> None:
        """Take a round's report that has been read.

        Args:
            report: the round.
            results: of its sessions.
            prefill_rows: rows of prompts that it was launched with.
            plain_ns: what it would have taken without nodes.
            drafted_ns: what growth steps of a resident drafter took before it.
        """

    def planning(self) -> None:
        """Note that the loop begins to hand out slots and rows."""

    def launching(self) -> None:
        """Note that the loop begins to launch a round; on a CPU, to run it."""

    def composed(self, level: Level, *, sessions: int, prefill_rows: int) -> None:
        """Take the size of the round that is launched next.

        Args:
            level: of its sessions.
            sessions: that are running.
            prefill_rows: rows of prompts.
        """

    def launched(self) -> None:
        """Note that the loop has launched a round; on a CPU it has ended."""
