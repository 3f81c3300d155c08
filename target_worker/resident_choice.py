"""Candidates of a resident draft: the best children of its nodes, and how likely the target accepts them.

Children are ranked as draft workers rank them: under the noise that the target chooses by, after the same processors,
each with its own path. Estimates come from the same calibration (`outrider.acceptance_calibration`), whose tables lie
on the device here: nothing of a level has to come to the host before the next one can begin. Sessions with penalties,
a grammar or early stop tokens are the exception; their paths are needed on the host.

Shapes: S sessions, b rows of each, R = S b rows, V vocabulary, k children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.acceptance_calibration import BINS, AcceptanceCalibration
from outrider.engine.path_processors import processors_of
from outrider.engine.step_trees import RECORD
from outrider.kernels.coupled_sampling import coupled_topk_scored
from outrider.kernels.filtered_probs import filtered_probs
from outrider.kernels.grammar_mask import apply_grammar_masks
from outrider.kernels.processors import apply_processors
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import Session

Paths = list[list[list[int]]]
"""[S, b] the tokens from below the root to each row's node."""
# A child's value has to lie below its parent's, so that of the best nodes a parent is always one.
_MOST_ACCEPTANCE = 0.9999
_LEAST_SCORE = -1e30


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Children of R nodes, [R, k] each, best first.

    Attributes:
        tokens: int64; -1 past the last that may be chosen.
        acceptance: float32 estimates given the parent, 0 where there is no token.
        buckets: int64, where the calibration files them.
    """

    tokens: torch.Tensor
    acceptance: torch.Tensor
    buckets: torch.Tensor


class RankedSessions:
    """What S sessions rank by.

    Args:
        columns: [S] each, on the device, as of `ranking_columns`.
        sessions: the first of them, whose trees grow; none where no paths are needed.
        any_independent: whether any has coins of its own (target_only).
        ranks_all: whether tokens that the head has no rows for are ranked, too, behind all others.
    """

    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        *,
        sessions: Sequence[Session] = (),
        any_independent: bool = False,
        ranks_all: bool = False,
    ) -> None:
        self._columns, self.sessions, self.any_independent = columns, sessions, any_independent
        self.needs_paths = any(reads_path(session.sampling) for session in sessions)
        # What is changed before the choice is told of the whole vocabulary.
        self.ranks_all = ranks_all or self.needs_paths

    @classmethod
    def of(cls, sessions: Sequence[Session], device: torch.device) -> RankedSessions:
        """Those of sessions."""
        columns = {
            name: torch.from_numpy(values).to(device, non_blocking=True)
            for name, values in ranking_columns(sessions).items()
        }
        independent = any(session.sampling.rule is VerificationRule.TARGET_ONLY for session in sessions)
        return cls(columns, sessions=sessions, any_independent=independent)

    @property
    def count(self) -> int:
        """S."""
        return self._columns["seeds"].shape[0]

    def rows(self, depth: int, repeats: int) -> dict[str, torch.Tensor]:
        """The columns of all rows at a depth; `positions` are those of the tokens that the rows choose."""
        rows = {name: values.repeat_interleave(repeats) for name, values in self._columns.items()}
        rows["positions"] += depth
        return rows


def ranking_columns(sessions: Sequence[Session]) -> dict[str, np.ndarray]:
    """[S] each: sampling parameters, and `positions` of the next tokens, `independent` coins, `fixed` estimates."""
    record = np.frombuffer(b"".join([session.sampling.record for session in sessions]), dtype=RECORD)
    columns = {name: record[name].copy() for name in RECORD.names or ()}
    columns["positions"] = np.array([len(session.tokens) for session in sessions], dtype=np.int32)
    independent = [session.sampling.rule is VerificationRule.TARGET_ONLY for session in sessions]
    columns["independent"] = np.array(independent, dtype=np.int32)
    fixed = [session.draft is not None and session.draft.is_fixed for session in sessions]
    columns["fixed"] = np.array(fixed, dtype=np.int32)
    return columns


class CandidateRanker:
    """Ranks children and estimates their acceptance.

    Args:
        calibration: what is learned of acceptance, on the host.
        top_k: k.
        vocab_size: V.
        device: of the logits.
    """

    def __init__(
        self, calibration: AcceptanceCalibration, *, top_k: int, vocab_size: int, device: torch.device
    ) -> None:
        self._calibration, self._top_k = calibration, top_k
        # The best child's estimate needs the second's score, whether or not that becomes a node.
        self._scored = min(max(top_k, 2), vocab_size)
        self._edges = torch.from_numpy(calibration.edges).to(device)
        self._tables = torch.from_numpy(np.stack([calibration.learned, calibration.prior])).to(device)
        self._version = calibration.version
        self._ranks = torch.arange(top_k, device=device) * BINS

    @property
    def top_k(self) -> int:
        """k."""
        return self._top_k

    def rank(
        self, sessions: RankedSessions, logits: torch.Tensor, *, depth: int, paths: Paths | None = None
    ) -> Candidates:
        """The children of R nodes of one depth.

        Args:
            sessions: whose nodes these are.
            logits: [R, V], a session's rows one after the other; not changed.
            depth: of the nodes, 0 for roots.
            paths: of the nodes of `sessions.sessions`; needed where `sessions.needs_paths`.
        """
        rows = sessions.rows(depth, logits.shape[0] // sessions.count)
        logits = logits.float()
        if sessions.needs_paths:
            assert paths is not None
            logits = _processed(sessions.sessions, logits, paths)
        sampling = [rows[name] for name in ("seeds", "positions", "temperature", "top_k", "top_p", "min_p")]
        found = coupled_topk_scored(logits, *sampling, choice_index=rows["choice_index"], k=self._scored)
        tokens, log_q, scores = found
        if sessions.any_independent:
            probs = filtered_probs(logits, *sampling[2:]).topk(self._scored)
            independent = rows["independent"][:, None] > 0
            tokens = torch.where(independent, torch.where(probs.values > 0, probs.indices, -1), tokens)
            log_q = torch.where(independent, probs.values.log(), log_q)
        buckets = self._buckets(log_q, scores, rows)[:, : self._top_k]
        tokens = tokens[:, : self._top_k]
        estimates = self._tables[rows["fixed"].long()[:, None], buckets].masked_fill(tokens < 0, 0)
        acceptance = estimates / estimates.sum(dim=1, keepdim=True).clamp(min=1)
        return Candidates(tokens=tokens, acceptance=acceptance.clamp(max=_MOST_ACCEPTANCE), buckets=buckets)

    def _buckets(self, log_q: torch.Tensor, scores: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `AcceptanceCalibration.buckets` and `independent_buckets` have them, [R, scored]."""
        scores = scores.clamp(min=_LEAST_SCORE)
        gaps = scores[:, :1] - scores
        if gaps.shape[1] > 1:
            gaps[:, 0] = gaps[:, 1]
        temperature, independent = rows["temperature"][:, None], rows["independent"][:, None] > 0
        by_surprise = torch.bucketize(-log_q, self._edges[0])
        by_gap = torch.bucketize(gaps * temperature, self._edges[1])
        rule = torch.where(independent, 2, (temperature > 0).long())
        bins = torch.where(rule == 1, by_gap, by_surprise)[:, : self._top_k]
        return bins + self._ranks[: bins.shape[1]] + rule * (self._top_k * BINS)

    def refresh(self) -> None:
        """Takes what the calibration has learned since the last call."""
        if self._version != self._calibration.version:
            self._version = self._calibration.version
            self._tables[0].copy_(torch.from_numpy(self._calibration.learned), non_blocking=True)


class _PathRows:
    """One session's rows, as `outrider.engine.path_processors` asks for them."""

    def __init__(self, session: Session, paths: Sequence[Sequence[int]]) -> None:
        self.session, self._paths = session, paths
        self.sampling, self.stop_token_ids, self.counts = session.sampling, session.stop_token_ids, session.counts

    @property
    def count(self) -> int:
        return len(self._paths)

    def paths(self) -> Sequence[Sequence[int]]:
        return self._paths

    def bans_stop(self) -> np.ndarray:
        session = self.session
        out_before = len(session.tokens) - session.prompt_len + np.array([len(path) for path in self._paths])
        return out_before < session.sampling.min_new_tokens


def reads_path(spec: SamplingSpec) -> bool:
    """Whether a row's logits are changed before the choice."""
    changed = spec.has_penalties or spec.logit_bias or spec.allowed_token_ids or spec.grammar
    return bool(changed or (spec.min_new_tokens > 0 and spec.stop_token_ids))


def _processed(sessions: Sequence[Session], logits: torch.Tensor, paths: Paths) -> torch.Tensor:
    """The logits after every session's processors, a copy; rows past these sessions' stay as they are."""
    parts = [_PathRows(session, of_session) for session, of_session in zip(sessions, paths, strict=True)]
    copied = logits.clone()
    logits = copied[: sum(part.count for part in parts)]
    apply_processors(logits, processors_of(parts, logits.device))
    places: list[int] = []
    masks: list[np.ndarray] = []
    place = 0
    for part in parts:
        grammar = part.session.grammar
        followed = grammar is not None and grammar.follow(part.session.output)
        for path in part.paths():
            if grammar is not None:
                mask = grammar.mask_after(path) if followed else None
                if mask is None:
                    # Nothing follows, or it cannot be told: nothing grows here.
                    logits[place] = -torch.inf
                else:
                    places.append(place)
                    masks.append(mask)
            place += 1
    if places:
        rows = torch.tensor(places, dtype=torch.int32, device=logits.device)
        apply_grammar_masks(logits, rows, torch.from_numpy(np.stack(masks)).to(logits.device))
    return copied
