"""Speculation changes nothing: every mode, any number of drafts, any batch gives the tokens of the plain loop.

Fifty prompts sixteen at a time, twelve of them one by one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.client import AsyncClient
from outrider.sampling import SamplingSpec

NEW_TOKENS = 18
ONE_BY_ONE = 12
SAMPLED = {"temperature": 1.0, "seed": 2**63 + 11}


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """For greedy and sampled: the plain loop's output of every prompt."""

    def outputs(spec: SamplingSpec) -> list:
        specs = [replace(spec, seed=(spec.seed + number) % 2**64) for number in range(len(prompts))]
        return reference.generate_all(prompts, specs)

    stop = (reference.eos,)
    return {
        "greedy": outputs(SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=stop)),
        "sampled": outputs(SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=stop, **SAMPLED)),
    }


async def generate_all(endpoint: str, prompts: Sequence[Sequence[int]], *, batch: int, speculation, **options) -> list:
    gate = asyncio.Semaphore(batch)

    async with AsyncClient(endpoint) as client:

        async def one(number: int, prompt: Sequence[int]):
            settings = dict(options)
            if "seed" in settings:
                settings["seed"] = (settings["seed"] + number) % 2**64
            async with gate:
                return await client.generate(prompt, max_new_tokens=NEW_TOKENS, speculation=speculation, **settings)

        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def accepted_in(outputs: list) -> int:
    return sum(output.speculation.accepted_tokens for output in outputs)


# Without drafts, and in sync mode one by one, it is the same to have two of them.
SETTINGS = [(1, batch, mode) for batch in (1, 16) for mode in ("off", "sync", "async")]
SETTINGS += [(2, 16, "sync"), (2, 1, "async"), (2, 16, "async")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("drafts", "batch", "speculation"), SETTINGS)
@pytest.mark.parametrize("rule", ["greedy", "sampled"])
async def test_prompts(request, prompts, expected, differs, *, speculation, batch, drafts, rule):
    service = request.getfixturevalue("one_draft" if drafts == 1 else "two_drafts")
    options = SAMPLED if rule == "sampled" else {}
    # One by one they take five times as long each.
    asked = prompts if batch > 1 else prompts[:ONE_BY_ONE]
    outputs = await generate_all(service.endpoint, asked, batch=batch, speculation=speculation, **options)
    for number, (output, wanted) in enumerate(zip(outputs, expected[rule][: len(asked)], strict=True)):
        place = differs(output.token_ids, wanted)
        assert place is None, f"prompt {number} parts at token {place}"
        if list(output.token_ids) == list(wanted.token_ids):
            assert output.finish_reason == wanted.finish_reason
            assert output.usage.completion_tokens == len(wanted.token_ids)
    if speculation == "off":
        assert all(output.speculation.drafted_tokens == 0 for output in outputs)
    elif speculation == "sync":
        assert accepted_in(outputs) > 2 * len(asked)
    else:
        # Rounds do not wait for a draft that gets no core; sooner or later it gets one.
        while not accepted_in(outputs):
            outputs = await generate_all(service.endpoint, asked, batch=batch, speculation=speculation, **options)
