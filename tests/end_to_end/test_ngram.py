"""The n-gram source behind the whole service: the tokens of the plain loop, and better guesses the next time."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from outrider.client import AsyncClient
from outrider.local import LocalService
from outrider.sampling import SamplingSpec

NEW_TOKENS = 24
SAMPLED = {"temperature": 1.0, "seed": 17}
# As in conftest.py: what a loaded machine takes for a second is no fault of anybody here.
PATIENT = ("--lease-ms", "30000", "--step-timeout-s", "60", "--sync-wait-cap-ms", "60000", "--target-wait-s", "60")


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    """One draft worker of both sources; requests say which they want."""
    with LocalService(drafts=1, draft_args=("--source", "model+ngram"), coordinator_args=PATIENT) as service:
        yield service


async def generate_all(endpoint: str, prompts: Sequence[Sequence[int]], **options) -> list:
    async with AsyncClient(endpoint) as client:
        waiting = [client.generate(prompt, max_new_tokens=NEW_TOKENS, **options)
                   for prompt in prompts]  # fmt: skip
        return await asyncio.gather(*waiting)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["greedy", "sampled"])
@pytest.mark.parametrize("sources", [["ngram"], ["model", "ngram"]])
async def test_the_tokens_are_those_of_the_plain_loop(service, reference, prompts, differs, *, sources, rule):
    options = SAMPLED if rule == "sampled" else {}
    spec = SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=(reference.eos,))
    spec = replace(spec, **options)
    # The second time, much of what is guessed is right.
    for mode in ("async", "sync"):
        asked = {"speculation": mode, "sources": sources, **options}
        outputs = await generate_all(service.endpoint, prompts[:6], **asked)
        for number, (prompt, output) in enumerate(zip(prompts[:6], outputs, strict=True)):
            place = differs(output.token_ids, reference.generate(prompt, spec))
            assert place is None, f"prompt {number} parts at token {place} in mode {mode}"
    assert sum(output.speculation.accepted_tokens for output in outputs) > 0
    assert set(outputs[0].speculation.sources) <= set(sources)


@pytest.mark.timeout(300)
async def test_what_is_guessed_the_second_time_is_right(service, prompts):
    """How much of it is submitted depends on what a row costs on this machine; what it is worth does not."""
    options = {"speculation": "sync", "sources": ["ngram"], "max_depth": 8, "temperature": 0.9, "seed": 2**40 + 1}

    async def accepted_share() -> float:
        outputs = await generate_all(service.endpoint, prompts[10:16], **options)
        stats = [output.speculation for output in outputs]
        return sum(each.accepted_tokens for each in stats) / max(sum(each.drafted_tokens for each in stats), 1)

    await accepted_share()
    again = 0.0
    # What was said is inserted beside the work, so that it may be a little late.
    deadline = time.monotonic() + 120
    while again < 0.5 and time.monotonic() < deadline:
        again = await accepted_share()
    assert again >= 0.5
