"""The target's choice at every node: processors with the node's own path, then coupled sampling.

Shapes: T rows of all sessions (root and nodes, session after session), S sessions, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.kernels.coupled_sampling import coupled_choice
from outrider.kernels.processors import ProcessorBatch, apply_processors
from outrider.target_worker.sessions import Session, TokenLogprobs
from outrider.tree import node_depths


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeRows:
    """The root and n nodes of one session's tree, as rows of a forward's logits.

    Attributes:
        session: whose; its last token is the root.
        tokens: [n] of nodes 1 to n.
        parents: [n] node numbers, 0 the root.
        depths: [n + 1], the root's 0 first.
    """

    session: Session
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: np.ndarray

    @classmethod
    def of(cls, session: Session, tokens: Sequence[int], parents: Sequence[int]) -> NodeRows:
        """The rows, depths computed."""
        return cls(session=session, tokens=tokens, parents=parents, depths=node_depths(parents))

    @property
    def count(self) -> int:
        """Rows: n + 1."""
        return len(self.tokens) + 1

    def paths(self) -> list[list[int]]:
        """[n + 1] the tokens from below the root to each row's own."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    def bans_stop(self) -> np.ndarray:
        """[n + 1] bool: the row chooses a token before which fewer than min_new_tokens are out."""
        session = self.session
        out_before = len(session.tokens) - session.prompt_len + self.depths
        return out_before < session.sampling.min_new_tokens


@torch.inference_mode()
def choose(logits: torch.Tensor, rows: Sequence[NodeRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """The token chosen at every row.

    Args:
        logits: [T, V] float32, changed in place by processors.
        rows: of the sessions, in the order of the logits.

    Returns:
        The raw logits [T, V], kept where a session asks for log probabilities, and the choices [T] int64.
    """
    processors = _processors(rows, logits.device)
    wants_raw = any(part.session.sampling.logprobs is not None for part in rows)
    raw = logits.clone() if wants_raw and not processors.is_empty else logits
    apply_processors(logits, processors)
    columns = _columns(rows, logits.device)
    return raw, coupled_choice(logits, **columns)


@torch.inference_mode()
def token_logprobs(raw: torch.Tensor, token_ids: Sequence[int], count: int) -> TokenLogprobs:
    """Log probabilities of chosen tokens under the raw softmax.

    Args:
        raw: [m, V] logits before any processor, of the rows where the tokens were chosen.
        token_ids: [m]
        count: alternatives of each, at most V are given.
    """
    logprobs = raw.float().log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=raw.device)
    best, ids = logprobs.topk(min(count, raw.shape[1]), dim=-1)
    return TokenLogprobs(
        token_logprobs=logprobs.gather(1, chosen[:, None]).squeeze(1).cpu().numpy(),
        top_token_ids=ids.cpu().numpy(),
        top_logprobs=best.cpu().numpy(),
    )


def _columns(rows: Sequence[NodeRows], device: torch.device) -> dict[str, torch.Tensor]:
    """The arguments [T] of `coupled_choice`."""
    counts = [part.count for part in rows]
    specs = [part.session.sampling for part in rows]

    def column(values: list[float], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    seeds = np.array([spec.seed & (1 << 64) - 1 for spec in specs], dtype=np.uint64).view(np.int64)
    positions = np.concatenate([part.session.root_index + 1 + part.depths for part in rows])
    return {
        "seeds": torch.from_numpy(np.repeat(seeds, counts)).to(device),
        "positions": torch.from_numpy(positions.astype(np.int64)).to(device),
        "temperature": column([spec.temperature for spec in specs], np.float32),
        "top_k": column([spec.top_k for spec in specs], np.int64),
        "top_p": column([spec.top_p for spec in specs], np.float32),
        "min_p": column([spec.min_p for spec in specs], np.float32),
        "choice_index": column([spec.choice_index for spec in specs], np.int64),
    }


def _processors(rows: Sequence[NodeRows], device: torch.device) -> ProcessorBatch:
    """What applies to which row; groups that no session uses are left out."""
    specs = [part.session.sampling for part in rows]
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
            stop_ids = sorted(part.session.stop_token_ids)
            banned.extend(stop_ids if bans else () for bans in part.bans_stop().tolist())
        if any(banned):
            groups |= _lists("banned", banned)
    return ProcessorBatch(**{name: torch.from_numpy(values).to(device) for name, values in groups.items()})


def _penalties(rows: Sequence[NodeRows]) -> dict[str, np.ndarray]:
    def column(value: Callable[[NodeRows], float]) -> np.ndarray:
        return np.array([value(part) for part in rows], dtype=np.float32)

    counts = [part.session.counts() if part.session.sampling.has_penalties else _NO_COUNTS for part in rows]
    paths: list[Sequence[int]] = []
    for part in rows:
        paths.extend(part.paths() if part.session.sampling.has_penalties else [()] * part.count)
    return {
        "repetition_penalty": column(lambda part: part.session.sampling.repetition_penalty),
        "presence_penalty": column(lambda part: part.session.sampling.presence_penalty),
        "frequency_penalty": column(lambda part: part.session.sampling.frequency_penalty),
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
