"""From a request of vLLM's engine service to ours; what cannot be had is refused by name, never dropped in silence.

Defaults are vLLM's: temperature 1 where none is given, and as many tokens as the model has room for. A number that
its messages cannot leave out (top_p, min_p, n and their like) is off, or its default, at 0. Names in errors are those
of the request as it came.
"""

from collections.abc import Iterator
from typing import Any

from outrider.errors import FieldViolation, InvalidRequest
from outrider.v1 import common_pb2, generation_pb2

# Of a GenerateRequest; each says something that this service does not do.
_REFUSED = {
    "kv_transfer_params": "prefill and decoding are not split here",
    "kv_transfer_params_json": "prefill and decoding are not split here",
    "mm_inputs": "only text models are served",
    "extra_mm_inputs": "only text models are served",
    "media_refs": "only text models are served",
}
# Of its SamplingParams.
_REFUSED_PARAMS = {
    "prompt_logprobs": "log probabilities are of the output alone",
    "truncate_prompt_tokens": "shorten the prompt before it is sent",
    "structural_tag": "use json_schema, regex, grammar or choice",
    "include_stop_str_in_output": "outputs end before a stop string",
}
_SAME = ("min_p", "frequency_penalty", "presence_penalty")
_NAMES = {
    "token_ids.ids": "tokenized.input_ids",
    "sampling_params.max_new_tokens": "sampling_params.max_tokens",
    "sampling_params.min_new_tokens": "sampling_params.min_tokens",
    "sampling_params.structured_outputs.json_object": "sampling_params.json_object",
    "sampling_params.structured_outputs.json": "sampling_params.json_schema",
    "sampling_params.structured_outputs.choice.values": "sampling_params.choice.choices",
    "sampling_params.structured_outputs": "sampling_params",
}


def generate_request(request: Any, *, prompt: list[int] | None, max_model_len: int) -> generation_pb2.GenerateRequest:
    """Our request.

    Args:
        prompt: the tokens of its text, where it gives a text.

    Raises:
        InvalidRequest: it asks for what this service does not do.
    """
    violations = list(_refusals(request))
    if violations:
        raise InvalidRequest(violations)
    ids = prompt if prompt is not None else list(request.tokenized.input_ids)
    ours = generation_pb2.GenerateRequest(
        request_id=request.request_id, token_ids=generation_pb2.TokenIds(ids=ids) if ids or prompt is not None else None
    )
    _put_sampling(request.sampling_params, ours.sampling_params)
    if not request.sampling_params.HasField("max_tokens"):
        ours.sampling_params.max_new_tokens = max(1, max_model_len - len(ids))
    return ours


def as_it_came(error: InvalidRequest) -> InvalidRequest:
    """The same violations under the names of the request as it came."""
    return InvalidRequest([FieldViolation(_their_name(each.field), each.description) for each in error.violations])


def _their_name(field: str) -> str:
    for ours, theirs in _NAMES.items():
        if field.startswith(ours):
            return theirs + field[len(ours) :]
    return field


def _refusals(request: Any) -> Iterator[FieldViolation]:
    params = request.sampling_params
    for prefix, message, refused in (("", request, _REFUSED), ("sampling_params.", params, _REFUSED_PARAMS)):
        given = {field.name for field, _ in message.ListFields()}
        for name in refused.keys() & given:
            yield FieldViolation(f"{prefix}{name}", f"not served: {refused[name]}; leave it out")
    if request.data_parallel_rank > 0:
        yield FieldViolation("data_parallel_rank", f"{request.data_parallel_rank} given, there is rank 0 alone")
    if params.HasField("logprobs") and params.logprobs < 0:
        yield FieldViolation("sampling_params.logprobs", f"{params.logprobs} given, 0 or more needed")
    for token_id in params.logit_bias:
        if token_id < 0:
            yield FieldViolation(f"sampling_params.logit_bias[{token_id}]", "a token id of 0 or more needed")


def _put_sampling(theirs: Any, ours: generation_pb2.SamplingParams) -> None:
    ours.temperature = theirs.temperature if theirs.HasField("temperature") else 1.0
    for name in _SAME:
        setattr(ours, name, getattr(theirs, name))
    # 0 stands for a number that was left out, and each of these has to be above it.
    for name in ("top_p", "repetition_penalty", "n"):
        if value := getattr(theirs, name):
            setattr(ours, name, value)
    ours.top_k = min(theirs.top_k, 2**31 - 1)
    if theirs.HasField("seed"):
        # Of 32 bits with a sign there, of 64 without one here.
        ours.seed = theirs.seed % 2**64
    if theirs.HasField("max_tokens"):
        ours.max_new_tokens = theirs.max_tokens
    if theirs.min_tokens:
        ours.min_new_tokens = theirs.min_tokens
    if theirs.HasField("logprobs"):
        ours.logprobs = theirs.logprobs
    ours.stop.extend(theirs.stop)
    ours.stop_token_ids.extend(theirs.stop_token_ids)
    ours.ignore_eos = theirs.ignore_eos
    for token_id, bias in theirs.logit_bias.items():
        ours.logit_bias[token_id] = bias
    _put_structure(theirs, ours)


def _put_structure(theirs: Any, ours: generation_pb2.SamplingParams) -> None:
    match theirs.WhichOneof("constraint"):
        case "json_schema":
            ours.structured_outputs.json = theirs.json_schema
        case "regex":
            ours.structured_outputs.regex = theirs.regex
        case "grammar":
            ours.structured_outputs.grammar = theirs.grammar
        case "json_object":
            # false asks for nothing.
            if theirs.json_object:
                ours.structured_outputs.json_object = True
        case "choice":
            ours.structured_outputs.choice.CopyFrom(common_pb2.ChoiceList(values=theirs.choice.choices))
