"""Whether what a client says it has received is what this request would have sent it."""

from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer
from outrider.v1 import generation_pb2


def received_fault(
    entry: generation_pb2.Received, tokenizer: TextTokenizer | None, generation: GenerationRequest
) -> tuple[str, str] | None:
    """What is wrong with the tokens and the length of the text of one choice: (field of the entry, what to change).

    The tokens are decoded once more as the request would have: they must not go on behind its end, and the text sent
    with them must have as many bytes.
    """
    token_ids, sampling = list(entry.token_ids), generation.sampling
    stop_ids = set(sampling.stop_token_ids)
    end = next((i for i, t in enumerate(token_ids) if t in stop_ids and i >= sampling.min_new_tokens), None)
    stream = TextStream(tokenizer, stop=generation.stop, prompt_token_ids=generation.prompt_token_ids)
    # A stop token has no text.
    kept = stream.push(token_ids if end is None else token_ids[:end]).consumed
    if end is not None and stream.stop_string is None:
        kept = end + 1
    if kept < len(token_ids):
        ended = f"the output ended after {kept} of these {len(token_ids)} tokens: send only what was received"
        return "token_ids", ended
    if stream.stop_string is None and (end is not None or len(token_ids) == sampling.max_new_tokens):
        stream.flush()
    if entry.text_bytes == stream.text_bytes:
        return None
    return "text_bytes", (
        f"{entry.text_bytes} given, the text sent with these {len(token_ids)} tokens has {stream.text_bytes}: "
        "send the bytes of all text received"
    )
