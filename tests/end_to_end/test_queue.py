"""The queue as it is by default, before real processes: more come at once than can run, and nobody is sent away."""

import asyncio

import httpx2

from outrider.local import LocalService

PATH = "/v1/completions"
PROMPTS = [f"def function_{number}(" for number in range(128)]


def body(prompt: str | list[str]) -> dict[str, object]:
    return {"model": "target", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def test_a_request_of_many_prompts_is_served_as_each_of_them_would_be(one_draft: LocalService) -> None:
    with httpx2.Client(base_url=one_draft.http_url, timeout=300) as client:
        together = client.post(PATH, json=body(PROMPTS))
        assert together.status_code == 200, together.text
        choices = together.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(PROMPTS)))
        alone = client.post(PATH, json=body(PROMPTS[77])).json()["choices"][0]
        assert choices[77]["text"] == alone["text"] != ""


async def test_two_hundred_connections_with_one_request_each_are_all_served(one_draft: LocalService) -> None:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=one_draft.http_url, timeout=300, limits=limits) as client:
        sent = [client.post(PATH, json=body(PROMPTS[number % len(PROMPTS)])) for number in range(200)]
        answers = await asyncio.gather(*sent)
    refused = [answer.text for answer in answers if answer.status_code != 200]
    assert refused == []
    assert all(answer.json()["usage"]["completion_tokens"] == 2 for answer in answers)
