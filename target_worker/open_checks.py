"""Checks of a session that is to be opened: everything that is wrong whatever the model will say."""

import numpy as np
import numpy.typing as npt

from outrider.engine.model_runner import ModelCard
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions import Code, OpenRequest, SessionFault

# The device counts indices in 32 bits.
_MOST_NEW_TOKENS = 1 << 30


def check_open(request: OpenRequest, ids: npt.NDArray[np.int64], *, model: ModelCard, num_slots: int) -> None:
    """Checks an open.

    Args:
        request: the open.
        ids: [n] prompt and output in one.
        model: the target.
        num_slots: tokens whose KV fits.

    Raises:
        SessionFault: INVALID_ARGUMENT, with what is wrong and what would do.
    """
    if not request.prompt:
        raise _invalid("prompt: empty, at least one token needed")
    if ids.max() >= model.vocab_size or ids.min() < 0:
        raise _invalid(f"prompt, output: token ids from 0 to {model.vocab_size - 1} needed")
    if len(ids) > model.max_model_len:
        raise _invalid(f"{len(ids)} tokens given, the model takes {model.max_model_len} (max_model_len)")
    if (fault := fit_fault(len(ids), num_slots)) is not None:
        raise fault
    _check_sampling(request.sampling, model.vocab_size)


def fit_fault(length: int, num_slots: int) -> SessionFault | None:
    """Return the fault of a session of more tokens than there is KV for; None if it fits."""
    if length <= num_slots:
        return None
    return _invalid(
        f"{length} tokens given, the KV cache holds {num_slots}: "
        "raise num_slots, kv_bytes or kv_cache_memory_fraction of the target worker"
    )


def check_bounds(sampling: SamplingSpec, *, logprobs: int, rates: int) -> None:
    """Check that a device has room for a session's parameters.

    Args:
        sampling: the parameters.
        logprobs: most alternatives with log probabilities.
        rates: most rates of the synthetic rule.

    Raises:
        SessionFault: INVALID_ARGUMENT, with what is given and what fits.
    """
    given = {
        "logprobs": (sampling.logprobs or 0, logprobs),
        "synthetic_rates": (len(sampling.synthetic_rates) * sampling.is_synthetic, rates),
        "min_new_tokens": (sampling.min_new_tokens, _MOST_NEW_TOKENS),
    }
    for name, (count, most) in given.items():
        if count > most:
            raise _invalid(f"sampling: {name}: {count} given, at most {most} needed")


def _check_sampling(sampling: SamplingSpec, vocab_size: int) -> None:
    if (fault := sampling.fault(vocab_size)) is not None:
        raise _invalid(f"sampling: {fault}")
    only_stops = set(sampling.allowed_token_ids) <= set(sampling.stop_token_ids)
    if sampling.min_new_tokens and sampling.allowed_token_ids and only_stops:
        raise _invalid("sampling: min_new_tokens leaves no allowed token")
    if sampling.is_synthetic and not all(0 <= rate <= 1 for rate in sampling.synthetic_rates or (-1,)):
        raise _invalid(f"synthetic_rates: {sampling.synthetic_rates} given, at least one needed, each 0 to 1")
    thresholds = (sampling.threshold_single, sampling.threshold_acc)
    if sampling.rule is VerificationRule.TARGET_ONLY and not all(0 < value <= 1 for value in thresholds):
        raise _invalid(f"thresholds: {thresholds} given, above 0 and at most 1 needed")


def _invalid(message: str) -> SessionFault:
    return SessionFault(Code.INVALID_ARGUMENT, message)
