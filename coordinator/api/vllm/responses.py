"""From the events of a generation to the messages of vLLM's engine service."""

from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from outrider.coordinator.sessions.messages import (
    ChoiceResult,
    GenerationRequest,
    GenerationResult,
    TokenDelta,
    TokenLogprobs,
)


class Answer:
    """Responses to one request: chunks if it streams, and one GenerateComplete a choice.

    Args:
        stream: whether it asked for chunks.
        eos_token_ids: the model's; an output that ends with one has no matched_stop, as with vLLM.
    """

    def __init__(self, checked: GenerationRequest, *, stream: bool, eos_token_ids: Sequence[int]) -> None:
        self._prompt_tokens = len(checked.prompt_token_ids)
        self._stream, self._eos_token_ids = stream, frozenset(eos_token_ids)
        self._tokens: list[list[int]] = [[] for _ in range(checked.n)]
        self._logprobs = [vllm_engine_pb2.OutputLogProbs() for _ in range(checked.n)]
        self._has_logprobs = checked.sampling.logprobs is not None

    def delta(self, event: TokenDelta) -> Iterator[Any]:
        """The chunk of new tokens."""
        tokens = self._tokens[event.index]
        tokens.extend(event.token_ids)
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(tokens),
            index=event.index,
        )
        if event.logprobs is not None:
            found = _logprobs(event.token_ids, event.logprobs)
            self._logprobs[event.index].MergeFrom(found)
            chunk.output_logprobs.CopyFrom(found)
        # Text that comes without a token is nothing here.
        if self._stream and event.token_ids:
            yield vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def complete(self, result: GenerationResult) -> Iterator[Any]:
        """The last message of every choice; what was drafted is told with the first, for all of them."""
        for place, choice in enumerate(result.choices):
            complete = self._complete(choice)
            complete.cached_tokens = result.cached_tokens
            if place == 0:
                complete.spec_accepted_tokens = result.speculation.accepted_tokens
                complete.spec_draft_tokens = result.speculation.drafted_tokens
            yield vllm_engine_pb2.GenerateResponse(complete=complete)

    def _complete(self, choice: ChoiceResult) -> Any:
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._tokens[choice.index],
            finish_reason=choice.finish_reason.value,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=choice.completion_tokens,
            index=choice.index,
        )
        if choice.stop_string is not None:
            complete.matched_stop_str = choice.stop_string
        elif choice.stop_token_id is not None and choice.stop_token_id not in self._eos_token_ids:
            complete.matched_token_id = choice.stop_token_id
        if self._has_logprobs:
            complete.output_logprobs.CopyFrom(self._logprobs[choice.index])
        return complete


def _logprobs(token_ids: Sequence[int], logprobs: TokenLogprobs) -> Any:
    rows = zip(logprobs.top_logprobs, logprobs.top_token_ids, strict=True)
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=logprobs.token_logprobs,
        token_ids=token_ids,
        top_logprobs=[vllm_engine_pb2.TopLogProbs(values=values, token_ids=ids) for values, ids in rows],
    )
