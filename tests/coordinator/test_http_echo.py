"""Prompts that are sent back with their log probabilities, and requests that ask for nothing but these."""

from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from tests.coordinator.http_door import TOKENIZER, A, B, serving
from tests.coordinator.scripted_scheduler import delta, result

from outrider.coordinator.sessions.messages import GenerationEvent, GenerationRequest, TokenLogprobs
from outrider.errors import Overloaded
from outrider.sampling import SamplingSpec


def _scored(token_ids: Sequence[int]) -> TokenLogprobs:
    """A log probability that tells the token, and two best ones."""
    return TokenLogprobs(
        token_logprobs=[-token_id / 8 for token_id in token_ids],
        top_token_ids=[[A, token_id] for token_id in token_ids],
        top_logprobs=[[-0.125, -token_id / 8] for token_id in token_ids],
    )


def play_scores(request: GenerationRequest) -> Sequence[GenerationEvent]:
    """A known output in two pieces, or else b by each choice."""
    forced = request.sampling.forced_token_ids
    parts = [(0, part) for part in (forced[:1], forced[1:]) if part] or [(index, (B,)) for index in range(request.n)]
    deltas = [delta(*part, text="b", index=index, logprobs=_scored(part)) for index, part in parts]
    return [*deltas, result(*[len(forced) or 1] * request.n)]


async def test_echo_with_log_probabilities_has_those_of_the_prompt() -> None:
    prompt, prompts = TOKENIZER.encode("hi, you"), cast(Any, ["hi, you", [B]])
    texts, values = [TOKENIZER.token_text(token_id) for token_id in [*prompt, B]], [-each / 8 for each in prompt[1:]]
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    async with serving(play_scores) as door, door.client() as client:
        options: Any = {"model": "tiny", "echo": True, "logprobs": 2, "max_tokens": 5, "n": 2, "top_p": 0.5}
        completion = await client.completions.create(prompt=prompts, **options)
        assert [choice.text for choice in completion.choices] == ["hi, youb"] * 2 + ["bb"] * 2
        for choice in completion.choices[:2]:
            found = choice.logprobs
            assert found is not None
            assert (found.tokens, found.text_offset) == (texts, offsets)
            assert found.token_logprobs == [None, *values, -B / 8]
            assert found.top_logprobs is not None
            assert found.top_logprobs[0] is None
            assert found.top_logprobs[1] == {"a": -0.125, texts[1]: values[0]}
        assert completion.choices[2].logprobs is not None
        assert completion.choices[2].logprobs.token_logprobs == [None, -B / 8]
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(prompt) + 1, 4)
        score, *others = sorted(door.scheduler.requests, key=lambda request: len(request.sampling.forced_token_ids))[
            ::-1
        ]
        assert score.prompt_token_ids == (prompt[0],)
        assert score.sampling == SamplingSpec(
            forced_token_ids=tuple(prompt[1:]), max_new_tokens=len(prompt) - 1, logprobs=2, seed=score.sampling.seed
        )
        assert [request.sampling.top_p for request in others] == [0.5, 0.5]

        streamed = dict[int, list[Any]]()
        async for chunk in await client.completions.create(prompt=prompts, stream=True, **options):
            streamed.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
        for choice in completion.choices:
            pieces = [piece.logprobs for piece in streamed[choice.index] if piece.logprobs is not None]
            assert choice.logprobs is not None
            assert "".join(piece.text for piece in streamed[choice.index]) == choice.text
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                told = [entry for piece in pieces for entry in getattr(piece, name)]
                assert told == getattr(choice.logprobs, name)


async def test_without_an_output_the_prompt_alone_is_sent_back() -> None:
    prompt = TOKENIZER.encode("hi")
    async with serving(play_scores) as door, door.client() as client:
        options: Any = {"model": "tiny", "prompt": "hi", "echo": True, "max_tokens": 0}
        scored = (await client.completions.create(logprobs=0, **options)).choices[0]
        assert (scored.text, scored.finish_reason) == ("hi", "length")
        assert scored.logprobs is not None
        assert scored.logprobs.token_logprobs == [None, *(-each / 8 for each in prompt[1:])]
        assert [request.sampling.forced_token_ids for request in door.scheduler.requests] == [tuple(prompt[1:])]
        plain = await client.completions.create(n=2, **options)
        assert [(choice.text, choice.logprobs) for choice in plain.choices] == [("hi", None)] * 2
        assert plain.usage is not None
        assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (len(prompt), 0)
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **options)]
        assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks] == [
            ("hi", None),
            ("", "length"),
        ]
        assert len(door.scheduler.requests) == 1


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_what_is_wrong_with_a_request_is_said_before_its_prompt_is_scored(max_tokens: int) -> None:
    async with serving(play_scores) as door, door.client() as client:
        options: Any = {"model": "tiny", "prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(top_p=7, stream=True, **options)
        assert caught.value.param == "top_p"
        door.scheduler.error = Overloaded("full", retry_after_s=1.0)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(stream=True, **options)
        assert not door.scheduler.requests
