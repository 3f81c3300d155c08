"""The official OpenAI client against real processes: what it asks for it gets, and the same tokens as by gRPC."""

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import torch

from outrider.client import Client
from outrider.local import LocalService

from .conftest import Reference

PROMPT = "def fibonacci(n):\n"


@pytest.fixture
def client(one_draft: LocalService) -> Iterator[openai.OpenAI]:
    transport = httpx2.Client(verify=False)
    with openai.OpenAI(
        base_url=f"{one_draft.http_url}/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        yield client


@pytest.fixture
def grpc_client(one_draft: LocalService) -> Iterator[Client]:
    with one_draft.client() as client:
        yield client


def token_ids(choice: Any) -> list[int]:
    return choice.model_extra["token_ids"]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "seed": 11, "top_p": 0.9}])
def test_same_tokens_by_both_doors(client: openai.OpenAI, grpc_client: Client, options: dict[str, Any]) -> None:
    wanted = grpc_client.generate(PROMPT, max_new_tokens=24, n=2, logprobs=2, **options)
    asking: Any = {"return_token_ids": True}
    completion = client.completions.create(
        model="target", prompt=PROMPT, max_tokens=24, n=2, logprobs=2, extra_body=asking, **options
    )
    for mine, theirs in zip(completion.choices, wanted.choices, strict=True):
        assert token_ids(mine) == list(theirs.token_ids)
        assert mine.text == theirs.text
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert mine.logprobs.token_logprobs == pytest.approx(list(theirs.logprobs.token_logprobs), abs=1e-4)
    # A chat whose template gives the same text, streamed, without speculation: the same again.
    streamed: dict[int, list[int]] = {0: [], 1: []}
    chunks: Any = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, n=2, stream=True,
        extra_body=asking | {"speculation": "off"}, **options,
    )  # fmt: skip
    for chunk in chunks:
        streamed[chunk.choices[0].index] += (chunk.choices[0].model_extra or {}).get("token_ids") or []
    assert list(streamed.values()) == [list(choice.token_ids) for choice in wanted.choices]


def test_stop_seed_and_usage(client: openai.OpenAI) -> None:
    def complete(**options: Any) -> Any:
        return client.completions.create(model="target", prompt=PROMPT, max_tokens=24, **options)

    whole = complete(temperature=0).choices[0].text
    stop = whole[3:5]
    stopped = complete(temperature=0, stop=[stop, "never there"]).choices[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", stop)
    seeded = [complete(seed=seed).choices[0].text for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] != seeded[2]
    asking: Any = {"per_request_spec_decode_metrics": "summary"}
    told = complete(temperature=0, extra_body=asking)
    assert told.usage.completion_tokens == 24
    metrics = told.model_extra["metrics"]["speculative_decoding"]
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    # The first token comes with the prompt; each verification then emits one more than it accepts.
    assert metrics["num_accepted_draft_tokens"] <= 24


@torch.inference_mode()
def test_scores_of_prompts_are_the_models(
    client: openai.OpenAI, grpc_client: Client, reference: Reference, prompts: list[list[int]]
) -> None:
    """As lm-eval asks for them: prompts as token ids, one token behind them."""
    chosen = [*(prompt[:90] for prompt in prompts[:3]), prompts[3][:1]]
    completion = client.completions.create(
        model="target", prompt=chosen, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for prompt, choice in zip(chosen, completion.choices, strict=True):
        ids = torch.tensor(prompt)
        rows = reference.model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = rows.gather(1, ids[1:, None])[:, 0].tolist()
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-3)
        assert choice.logprobs.top_logprobs is not None
        best = [max(top.values()) for top in choice.logprobs.top_logprobs[1:-1]]
        assert best == pytest.approx(rows.max(-1).values.tolist(), abs=1e-3)
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
        if len(prompt) > 1:
            result = grpc_client.generate(prompt[:1], forced_token_ids=prompt[1:], logprobs=0)
            scored = result.choices[0]
            # Several tokens a round, and none of them by a draft.
            assert result.speculation.verify_steps < len(prompt) / 8
            assert (result.speculation.drafted_tokens, result.speculation.accepted_tokens) == (0, 0)
            assert list(scored.token_ids) == prompt[1:]
            assert scored.logprobs is not None
            assert list(scored.logprobs.token_logprobs) == pytest.approx(expected, abs=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_that_are_required_are_made_with_and_without_drafts(client: openai.OpenAI, choice: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
    }
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "max_tokens": 99}
    told = [
        client.chat.completions.create(
            model="target", messages=messages, extra_body={"speculation": mode}, **options
        ).choices[0].message.tool_calls or []
        for mode in ("async", "off")
    ]  # fmt: skip
    functions: list[Any] = [[call.model_dump()["function"] for call in calls] for calls in told]
    assert functions[0] == functions[1]
    (function,) = functions[0]
    assert function["name"] == "get_weather"
    arguments = json.loads(function["arguments"])
    assert arguments["city"] in {"Bern", "Oslo"}
    assert arguments["days"] in {1, 2}


def test_a_response_is_the_chat_of_the_same_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0
    )
    response = client.responses.create(model="target", input=PROMPT, max_output_tokens=24, temperature=0)
    assert response.output_text == chat.choices[0].message.content
