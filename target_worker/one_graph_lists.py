"""What changes the logits of a one-graph round, as lists of tokens: what the host knows of it once a session.

The counts are those of the session's own tokens; what a node's path adds to them is the device's to know. Padded to the
sizes of the round's bucket they are the arrays of `outrider.kernels.processors`.

Shapes: S sessions, n rows of each, T = S n.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.one_graph_buckets import RoundNeeds
from outrider.engine.one_graph_shape import RoundShape
from outrider.sampling import VerificationRule
from outrider.target_worker.sessions import Session

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionNeeds:
    """What one session asks for beside a choice.

    Attributes:
        entries: tokens that penalties count.
        biased, allowed, banned: entries of its other lists, `banned` those of all its rows.
        alternatives: -1 where it wants no log probabilities.
    """

    entries: int = 0
    biased: int = 0
    allowed: int = 0
    banned: int = 0
    alternatives: int = -1

    def joined(self, other: "SessionNeeds") -> "SessionNeeds":
        """What both ask for together."""
        return SessionNeeds(
            entries=self.entries + other.entries,
            biased=self.biased + other.biased,
            allowed=self.allowed + other.allowed,
            banned=self.banned + other.banned,
            alternatives=max(self.alternatives, other.alternatives),
        )

    @property
    def of_round(self) -> RoundNeeds:
        """As a round's bucket is chosen by."""
        return RoundNeeds(
            entries=self.entries,
            short_entries=max(self.biased, self.allowed, self.banned),
            alternatives=self.alternatives,
        )


NO_NEEDS = SessionNeeds()


def needs_of(session: Session, shape: RoundShape) -> SessionNeeds | None:
    """What the session asks for; None where it is something that no round can do."""
    if session.only_chooses:
        return NO_NEEDS
    spec = session.sampling
    if spec.grammar or spec.is_synthetic or spec.rule is not VerificationRule.COUPLED:
        return None
    return SessionNeeds(
        entries=len(session.counts()[0]) if spec.has_penalties else 0,
        biased=len(spec.logit_bias),
        allowed=len(set(spec.allowed_token_ids)),
        banned=int(_banned_rows(session, shape).sum()) * len(session.stop_token_ids),
        alternatives=-1 if spec.logprobs is None else spec.logprobs,
    )


def lists_of(sessions: Sequence[Session], shape: RoundShape, needs: RoundNeeds) -> Arrays:
    """The lists of a round's sessions; none where no session changes its logits."""
    if not (needs.entries or needs.short_entries):
        return {}
    counted, biased, allowed, banned = [], [], [], []
    for session in sessions:
        spec = session.sampling
        counted.append(session.counts() if spec.has_penalties else None)
        biased.append(sorted(spec.logit_bias.items()))
        allowed.append(sorted(set(spec.allowed_token_ids)))
        stop_ids = sorted(session.stop_token_ids) if spec.min_new_tokens else []
        banned.extend(stop_ids if bans else [] for bans in _banned_rows(session, shape).tolist())
    none = np.empty(0, dtype=np.int64)
    columns = [(none, none) if each is None else each for each in counted]
    specs = [session.sampling for session in sessions]
    return {
        "repetition_penalty": np.array([spec.repetition_penalty for spec in specs], dtype=np.float32),
        "presence_penalty": np.array([spec.presence_penalty for spec in specs], dtype=np.float32),
        "frequency_penalty": np.array([spec.frequency_penalty for spec in specs], dtype=np.float32),
        "count_start": _starts([len(tokens) for tokens, _ in columns]),
        "count_tokens": np.concatenate([tokens for tokens, _ in columns]),
        "count_output": np.concatenate([output for _, output in columns]),
        "bias_start": _starts([len(entries) for entries in biased]),
        "bias_tokens": np.array([token for entries in biased for token, _ in entries], dtype=np.int32),
        "bias_values": np.array([value for entries in biased for _, value in entries], dtype=np.float32),
        "allowed_start": _starts([len(entries) for entries in allowed]),
        "allowed_tokens": np.array([token for entries in allowed for token in entries], dtype=np.int32),
        "banned_start": _starts([len(entries) for entries in banned]),
        "banned_tokens": np.array([token for entries in banned for token in entries], dtype=np.int32),
    }


def _banned_rows(session: Session, shape: RoundShape) -> np.ndarray:
    """[n] bool: the row chooses a token before which fewer than min_new_tokens are out."""
    return len(session.tokens) - session.prompt_len + shape.depths < session.sampling.min_new_tokens


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
