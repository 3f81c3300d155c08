"""Events of a generation as they travel."""

from outrider.coordinator.sessions.messages import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    GenerationResult,
    TokenDelta,
    TokenLogprobs,
)
from outrider.v1 import generation_pb2, target_pb2
from outrider.wire import floats_to_bytes

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def started(request: GenerationRequest) -> generation_pb2.GenerateResponse:
    """The first message of a stream."""
    return generation_pb2.GenerateResponse(
        started=generation_pb2.Started(
            request_id=request.request_id,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt_token_ids),
        )
    )


def response(event: GenerationEvent, request: GenerationRequest) -> generation_pb2.GenerateResponse:
    """An event as it travels."""
    match event:
        case TokenDelta():
            return generation_pb2.GenerateResponse(delta=_delta(event))
        case generation_pb2.Round():
            return generation_pb2.GenerateResponse(round=event)
        case GenerationResult():
            return generation_pb2.GenerateResponse(finished=_finished(event, request))


def _delta(event: TokenDelta) -> generation_pb2.Delta:
    delta = generation_pb2.Delta(
        index=event.index,
        token_ids=event.token_ids,
        text=event.text,
        offset=event.offset,
        text_offset=event.text_offset,
        weights=event.weights,
    )
    if event.logprobs is not None:
        delta.logprobs.CopyFrom(_logprobs(event.logprobs))
    return delta


def _logprobs(logprobs: TokenLogprobs) -> target_pb2.Logprobs:
    top_token_ids = [token_id for row in logprobs.top_token_ids for token_id in row]
    return target_pb2.Logprobs(
        token_logprobs=floats_to_bytes(logprobs.token_logprobs),
        top_count=len(logprobs.top_token_ids[0]) if logprobs.top_token_ids else 0,
        top_token_ids=top_token_ids,
        top_logprobs=floats_to_bytes([value for row in logprobs.top_logprobs for value in row]),
    )


def _finished(result: GenerationResult, request: GenerationRequest) -> generation_pb2.Finished:
    choices = []
    for choice in result.choices:
        message = generation_pb2.Choice(
            index=choice.index,
            finish_reason=_FINISH_REASONS[choice.finish_reason],
            completion_tokens=choice.completion_tokens,
        )
        if choice.stop_token_id is not None:
            message.stop_token_id = choice.stop_token_id
        elif choice.stop_string is not None:
            message.stop_string = choice.stop_string
        choices.append(message)
    return generation_pb2.Finished(
        choices=choices,
        usage=generation_pb2.Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=sum(choice.completion_tokens for choice in result.choices),
            cached_tokens=result.cached_tokens,
        ),
        speculation=result.speculation.message(),
        timings=_timings(result, request),
        weights=result.weights,
    )


def _timings(result: GenerationResult, request: GenerationRequest) -> generation_pb2.Timings:
    # Choices run side by side, so the longest one sets the time; what a resumed client had already got took none.
    longest = max(
        (choice.completion_tokens - len(request.received.get(choice.index, ())) for choice in result.choices), default=0
    )
    tpot_s = (result.total_s - result.ttft_s) / (longest - 1) if longest > 1 else 0.0
    return generation_pb2.Timings(
        queue_ms=result.queue_s * 1e3,
        ttft_ms=result.ttft_s * 1e3,
        tpot_ms=tpot_s * 1e3,
        total_ms=result.total_s * 1e3,
    )
