"""Sizes of rounds."""

from dataclasses import dataclass

from outrider.wire import MOST_NODES


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """Sizes of a target's rounds.

    Attributes:
        max_sessions: S, sessions at a time.
        max_model_len: most tokens of a session.
        max_step_rows: most verified rows of a round: roots and nodes.
        max_session_rows: M, most of one session: its root and its nodes.
        max_prefill_tokens: most rows of prompts beside them.
        prefill_slowdown: how much longer than its verification alone a round may take for the sake of prefill.
        capacity: C, candidates of a session; a power of two.
        places: D, draft workers of a session; a power of two.
        logprobs: K, most alternatives with log probabilities.
    """

    max_sessions: int
    max_model_len: int
    max_step_rows: int = 512
    max_session_rows: int = 64
    max_prefill_tokens: int = 2048
    prefill_slowdown: float = 0.3
    capacity: int = MOST_NODES
    places: int = 4
    logprobs: int = 20
