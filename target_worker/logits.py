"""What happens to a step's logits beside the choice: processors with each node's own path, log probabilities.

Shapes: T rows of all sessions (root and nodes, session after session), S sessions, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.engine.path_processors import processors_of
from outrider.kernels.grammar_mask import apply_grammar_masks
from outrider.kernels.processors import apply_processors
from outrider.sampling import SamplingSpec
from outrider.target_worker.node_rows import NodeRows
from outrider.target_worker.sessions import TokenLogprobs


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
