"""What measures rounds is told."""

from collections.abc import Sequence

from outrider.target_worker.rounds.report import RoundReport
from outrider.target_worker.rounds.session import SessionResult


class RoundObserver:
    """Told what a `RoundLoop` does, when it does it; does nothing itself."""

    def reported(self, report: RoundReport, results: Sequence[SessionResult], *, prefill_rows: int) -> None:
        """A round's report has been read.

        Args:
            report: the round.
            results: of its sessions.
            prefill_rows: rows of prompts that it was launched with.
        """

    def planning(self) -> None:
        """The loop begins to hand out slots and rows."""

    def launching(self) -> None:
        """The loop begins to launch a round; on a CPU, to run it."""

    def launched(self) -> None:
        """The loop has launched a round; on a CPU it has ended."""
