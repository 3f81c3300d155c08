"""The logits processors of a step's rows: the same that the target applies, with each node's own path counted."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.session import DraftSession
from outrider.kernels.processors import ProcessorBatch
from outrider.sampling import SamplingSpec

T = TypeVar("T")
Rows = Sequence[tuple[DraftSession, DraftNode]]


def has_processors(spec: SamplingSpec) -> bool:
    """Whether logits are changed before tokens are chosen."""
    return (
        spec.has_penalties
        or bool(spec.logit_bias)
        or bool(spec.allowed_token_ids)
        or (spec.min_new_tokens > 0 and bool(spec.stop_token_ids))
    )


def processor_batch(rows: Rows, device: torch.device) -> ProcessorBatch:
    """What applies to which of R rows.

    Args:
        rows: [R] the nodes whose children are chosen, each with its session.
        device: where the logits are.
    """
    sessions: dict[int, DraftSession] = {id(session): session for session, _ in rows}
    number = {key: index for index, key in enumerate(sessions)}
    held = list(sessions.values())
    specs = [session.sampling for session in held]
    columns: dict[str, np.ndarray] = {
        "row_session": np.array([number[id(session)] for session, _ in rows], dtype=np.int64)
    }
    if any(spec.has_penalties for spec in specs):
        columns |= _penalties(rows, held)
    if any(spec.logit_bias for spec in specs):
        biases = [dict(sorted(spec.logit_bias.items())) for spec in specs]
        columns["bias_start"], columns["bias_tokens"] = _compressed(biases, list)
        columns["bias_values"] = np.array([value for bias in biases for value in bias.values()], dtype=np.float32)
    if any(spec.allowed_token_ids for spec in specs):
        columns["allowed_start"], columns["allowed_tokens"] = _compressed(
            specs, lambda spec: sorted(set(spec.allowed_token_ids))
        )
    if any(_bans_stops(session, node) for session, node in rows):
        columns["banned_start"], columns["banned_tokens"] = _compressed(
            rows, lambda row: sorted(set(row[0].sampling.stop_token_ids)) if _bans_stops(*row) else []
        )
    return ProcessorBatch(**{name: torch.from_numpy(column).to(device) for name, column in columns.items()})


def grammar_masks(rows: Rows) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows of sessions whose output has to match a grammar, and which tokens may follow there.

    Rows after which nothing follows (the end, a path that breaks the grammar, a node that is gone) are left out, and so
    are those of a grammar that cannot be followed here: what grows there are guesses, and the target knows.

    Returns:
        [M] int32 and [M, W] int32; None where there are none.
    """
    followed: dict[int, bool] = {}
    places: list[int] = []
    masks: list[np.ndarray] = []
    for place, (session, node) in enumerate(rows):
        grammar = session.grammar
        if grammar is None or node.is_dead:
            continue
        if id(session) not in followed:
            followed[id(session)] = grammar.follow(session.tokens[session.prompt_len :])
        if followed[id(session)] and (mask := grammar.mask_after(_path_tokens(node)[::-1])) is not None:
            places.append(place)
            masks.append(mask)
    return np.array(places, dtype=np.int32), np.stack(masks) if masks else None


def _penalties(rows: Rows, sessions: list[DraftSession]) -> dict[str, np.ndarray]:
    counts = [session.token_counts() if session.sampling.has_penalties else _NO_COUNTS for session in sessions]
    count_start, count_tokens = _compressed(counts, lambda pair: pair[0])
    path_start, path_tokens = _compressed(
        rows, lambda row: _path_tokens(row[1]) if row[0].sampling.has_penalties else []
    )
    penalties = {
        name: np.array([getattr(session.sampling, name) for session in sessions], dtype=np.float32)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    return {
        **penalties,
        "count_start": count_start,
        "count_tokens": count_tokens,
        "count_output": np.concatenate([pair[1] for pair in counts]),
        "path_start": path_start,
        "path_tokens": path_tokens,
    }


_NO_COUNTS = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _bans_stops(session: DraftSession, node: DraftNode) -> bool:
    """Whether the token after `node` must not end the session."""
    return node.position + 1 - session.prompt_len < session.sampling.min_new_tokens


def _path_tokens(node: DraftNode) -> list[int]:
    """The tokens from below the root to the node; order does not matter to counts."""
    tokens = []
    while node.parent is not None:
        tokens.append(node.token)
        node = node.parent
    return tokens


def _compressed(items: Sequence[T], part: Callable[[T], Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Lists one after the other: where each starts [n + 1], and all entries."""
    parts = [np.asarray(part(item), dtype=np.int64) for item in items]
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(entries) for entries in parts], out=starts[1:])
    return starts, np.concatenate(parts)
