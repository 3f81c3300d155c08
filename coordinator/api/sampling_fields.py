"""The sampling parameters of a request."""

import math

from outrider.coordinator.api.field_checks import FieldChecks
from outrider.sampling import SCORED_ALONE, SamplingSpec

MAX_LOGPROBS = 20
# Below this, probabilities other than the best one's underflow in float32: the choice is the greedy one.
_GREEDY_BELOW = 1e-30


def sampling_spec(fields: FieldChecks, *, max_new_tokens: int, seed: int) -> SamplingSpec:
    """Its sampling parameters, defaults filled in."""
    params = fields.params
    temperature = fields.number("temperature", 0.0, "a finite number, 0 (greedy) or more", lambda x: x >= 0)
    top_k = params.top_k if params.HasField("top_k") else 0
    if top_k < -1:
        fields.wrong("sampling_params.top_k", f"{top_k} given, 1 or more needed; 0 or -1 turns it off")
    stop_token_ids = fields.token_id_list("stop_token_ids")
    forced = params.forced_token_ids
    fields.check_token_ids("sampling_params.forced_token_ids", forced)
    eos = () if params.ignore_eos or forced else fields.model.eos_token_ids
    min_new_tokens = fields.whole("min_new_tokens", default=0, low=0)
    if min_new_tokens > max_new_tokens:
        fields.wrong(
            "sampling_params.min_new_tokens",
            f"{min_new_tokens} given, more than max_new_tokens ({max_new_tokens}): lower it or raise that",
        )
    spec = SamplingSpec(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, top_k),
        top_p=fields.number("top_p", 1.0, "more than 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
        min_p=fields.number("min_p", 0.0, "0 (off) to 1", lambda x: 0 <= x <= 1),
        repetition_penalty=fields.number(
            "repetition_penalty", 1.0, "more than 0 and at most 2 (1 is off)", lambda x: 0 < x <= 2
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, "-2 to 2 (0 is off)", lambda x: -2 <= x <= 2),
        logit_bias=_logit_bias(fields),
        allowed_token_ids=fields.token_id_list("allowed_token_ids"),
        seed=seed,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *eos))),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        logprobs=fields.whole("logprobs", default=None, low=0, high=MAX_LOGPROBS),
        forced_token_ids=tuple(forced),
    )
    if forced and (not spec.is_scored or params.stop or params.HasField("structured_outputs")):
        fields.wrong("sampling_params.forced_token_ids", SCORED_ALONE)
    if min_new_tokens and spec.allowed_token_ids and set(spec.allowed_token_ids) <= set(spec.stop_token_ids):
        fields.wrong(
            "sampling_params.allowed_token_ids",
            "only stop tokens, which min_new_tokens forbids at first: allow another token or drop min_new_tokens",
        )
    return spec


def _logit_bias(fields: FieldChecks) -> dict[int, float]:
    field, wrong = "sampling_params.logit_bias", []
    if fields.is_too_long(field, fields.params.logit_bias, "entries"):
        return {}
    bias, highest = dict(fields.params.logit_bias), fields.model.vocab_size - 1
    for token_id, value in sorted(bias.items()):
        if token_id > highest:
            wrong.append((f"{field}[{token_id}]", f"outside the vocabulary: give token ids from 0 to {highest}"))
        if not (math.isfinite(value) and -100 <= value <= 100):
            wrong.append((f"{field}[{token_id}]", f"{value:g} given, a finite number from -100 to 100 needed"))
    fields.wrong_entries(field, wrong, "wrong entries")
    return bias
