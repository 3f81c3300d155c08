"""Shapes of rounds."""

from dataclasses import dataclass

from outrider.target_worker.rounds.config import RoundConfig

# Verified rows and sessions of the buckets on a GPU: in between a round takes as long as in the next larger one.
_RUNGS, _SESSIONS = (8, 32, 64, 128, 256, 384, 512), (1, 16, 64, 128)
# Prefill rows by verified rows: long parts of prompts are for rounds that verify little.
_PREFILL = {64: (64, 128, 192, 256, 512, 1024), 128: (64, 128, 256), 256: (64, 128), 512: (64, 128)}
# Verified rows of a session, on average, beyond which a bucket for fewer sessions than all does not pay.
_MOST_ON_AVERAGE = 16
# Sessions whose prompts are computed in one round.
MAX_CHUNKS = 16


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Shape of a round.

    Attributes:
        rows: R, verified rows.
        sessions: with verified rows, and chunks of prompts.
        most: most rows of one of them.
        prefill: prefill rows; 0 for a round without.
    """

    rows: int
    sessions: int
    most: int
    prefill: int

    @property
    def selected(self) -> tuple[int, int, int, int]:
        """Bounds for `select`: rows, sessions, most rows of a session, most entries."""
        return self.rows, self.sessions, self.most, self.rows


def round_buckets(config: RoundConfig, *, on_gpu: bool) -> list[Bucket]:
    """Return the buckets, those without prefill first, smallest first.

    Args:
        config: sizes.
        on_gpu: whether rounds are captured in CUDA graphs.
    """
    sessions, most, widest = config.max_sessions, config.max_session_rows, config.max_step_rows
    if not on_gpu:
        # Without graphs no padding is computed: one bucket is the bound of all rounds.
        return [Bucket(rows=widest, sessions=sessions + MAX_CHUNKS, most=most, prefill=config.max_prefill_tokens)]
    rungs = [*(rung for rung in _RUNGS if rung < widest), widest]
    found: dict[Bucket, None] = {}
    for rung in rungs:
        for fitting in (*(count for count in _SESSIONS if count < sessions), sessions):
            # One session fills the rung that holds all its rows; all sessions any rung.
            one = next((other for other in rungs if other >= most), widest)
            bound = one if fitting == 1 else rung if fitting == sessions else _MOST_ON_AVERAGE * fitting
            if fitting <= rung <= bound:
                found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=0)] = None
    # The last one holds all rows that sessions can have.
    all_rows = next((rung for rung in rungs if rung >= most * sessions), widest)
    beside = sorted({all_rows} | {rung for rung in rungs if rung in _PREFILL and min(sessions, 64) <= rung <= all_rows})
    for rung in beside:
        sizes = (*_PREFILL[64], config.max_prefill_tokens) if rung == beside[0] else _PREFILL.get(rung, (64, 128))
        for size in sizes:
            fitting, prefill = min(sessions, rung) + MAX_CHUNKS, min(size, config.max_prefill_tokens)
            found[Bucket(rows=rung, sessions=fitting, most=min(most, rung), prefill=prefill)] = None
    return list(found)
