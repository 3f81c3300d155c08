"""What happens to a step's logits beside the choice: processors with each node's own path, log probabilities.

Shapes: T rows of all sessions (root and nodes, session after session), S sessions, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from outrider.kernels.grammar_mask import apply_grammar_masks
from outrider.kernels.processors import ProcessorBatch, apply_processors
from outrider.sampling import SamplingSpec
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.sessions import Session, TokenLogprobs


def only_bans(spec: SamplingSpec) -> bool:
    """Whether stop tokens that come too early are all that a session's logits are changed for."""
    return not replace(spec, min_new_tokens=0).reads_logits


def needs_logits(rows: Sequence[NodeRows]) -> bool:
    """Whether anything but the coupled rule's choice reads or changes the logits of these rows."""
    for part in rows:
        spec = part.session.sampling
        if spec.reads_logits and (not only_bans(spec) or bool(part.bans_stop().any())):
            return True
    return False


@torch.inference_mode()
def process(logits: torch.Tensor, rows: Sequence[NodeRows]) -> torch.Tensor:
    """Applies every session's processors.

    Args:
        logits: [T, V] float32, changed in place.
        rows: of the sessions, in the order of the logits.

    Returns:
        The raw logits [T, V], kept where a session asks for log probabilities.
    """
    # Made while the forward runs, where it runs on a device of its own.
    processors = processors_of(rows, logits.device)
    masked_rows, masks = _grammar_masks(rows)
    wants_raw = any(part.session.sampling.logprobs is not None for part in rows)
    raw = logits.clone() if wants_raw and not (processors.is_empty and masks is None) else logits
    apply_processors(logits, processors)
    if masks is not None:
        apply_grammar_masks(logits, *(torch.from_numpy(each).to(logits.device) for each in (masked_rows, masks)))
    return raw


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


def _grammar_masks(rows: Sequence[NodeRows]) -> tuple[np.ndarray, np.ndarray | None]:
    """[M] the rows of sessions whose output has to match a grammar, and [M, W] which tokens may follow there."""
    found: list[np.ndarray] = []
    places: list[np.ndarray] = []
    first = 0
    for part in rows:
        grammar = part.session.grammar
        # A fault is told when the session's walk is to be committed.
        if grammar is not None and grammar.follow(part.session.output):
            found.append(grammar.masks(part.tokens, part.parents))
            places.append(np.arange(first, first + part.count, dtype=np.int32))
        first += part.count
    return (np.concatenate(places), np.concatenate(found)) if found else (np.empty(0, dtype=np.int32), None)


class PathRows(Protocol):
    """Rows of one session, each at the end of a path below its last token."""

    @property
    def session(self) -> Session:
        """Whose."""
        ...

    @property
    def count(self) -> int:
        """Rows."""
        ...

    def paths(self) -> Sequence[Sequence[int]]:
        """Each row's tokens, from below the session's last one to its own."""
        ...

    def bans_stop(self) -> np.ndarray:
        """[count] bool: the row chooses a token before which fewer than min_new_tokens are out."""
        ...


def processors_of(rows: Sequence[PathRows], device: torch.device) -> ProcessorBatch:
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


def _penalties(rows: Sequence[PathRows]) -> dict[str, np.ndarray]:
    def column(value: Callable[[PathRows], float]) -> np.ndarray:
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
