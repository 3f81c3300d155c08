"""Plain decoding: a loop over transformers' own forward with the same choice rule."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.kernels.coupled_sampling import coupled_choice
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.session import SessionResult


@dataclass
class Plain:
    """Output of plain decoding: tokens, and the raw log probabilities [V] each was chosen at."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


def plain_decode(model: PreTrainedModel, prompt: Sequence[int], spec: SamplingSpec) -> Plain:
    out = Plain()
    while len(out.tokens) < spec.max_new_tokens:
        sequence = [*prompt, *out.tokens]
        with torch.inference_mode():
            raw = model(torch.tensor([sequence])).logits[0, -1]
        out.logprobs.append(raw.log_softmax(-1))
        logits = processed(raw.clone(), prompt, out.tokens, spec)
        out.tokens.append(choice(logits, len(sequence), spec))
        if out.tokens[-1] in spec.stop_token_ids:
            break
    return out


def processed(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], spec: SamplingSpec) -> torch.Tensor:
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = logits[token]
        logits[token] = value / spec.repetition_penalty if value > 0 else value * spec.repetition_penalty
        logits[token] -= spec.frequency_penalty * counts[token] + spec.presence_penalty * (counts[token] > 0)
    for token, bias in spec.logit_bias.items():
        logits[token] += bias
    if spec.allowed_token_ids:
        banned = [token for token in range(len(logits)) if token not in spec.allowed_token_ids]
        logits[banned] = -torch.inf
    if len(output) < spec.min_new_tokens:
        logits[list(spec.stop_token_ids)] = -torch.inf
    return logits


def choice(logits: torch.Tensor, position: int, spec: SamplingSpec) -> int:
    seed = np.array([spec.seed], dtype=np.uint64).view(np.int64)
    return int(
        coupled_choice(
            logits[None],
            torch.from_numpy(seed),
            torch.tensor([position]),
            torch.tensor([spec.temperature]),
            torch.tensor([spec.top_k]),
            torch.tensor([spec.top_p]),
            torch.tensor([spec.min_p]),
            choice_index=torch.tensor([spec.choice_index]),
        )
    )


def check_logprobs(results: Sequence[SessionResult], plain: Plain, count: int) -> None:
    """Hold the log probabilities of a session's tokens and of the `count` best ones to those of plain decoding."""
    found = [result.logprobs for result in results if result.logprobs is not None]
    expected = torch.stack(plain.logprobs)
    best = expected.topk(count)
    for name, values in (
        ("token_logprobs", expected.gather(1, torch.tensor(plain.tokens)[:, None]).squeeze(1)),
        ("top_logprobs", best.values),
    ):
        actual = np.concatenate([getattr(part, name) for part in found])
        np.testing.assert_allclose(actual, values.numpy(), rtol=1e-4, atol=1e-4)
    assert np.concatenate([part.top_token_ids for part in found]).tolist() == best.indices.tolist()
