"""Where drafts come from changes nothing: every source and mixture gives the tokens of the plain loop."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from outrider.client import AsyncClient
from outrider.local import LocalService
from outrider.models import embedded_eagle_path
from outrider.sampling import SamplingSpec

from .conftest import PATIENT

NEW_TOKENS, REQUESTS = 20, 6
SAMPLED = {"temperature": 1.0, "seed": 2**63 + 11}
MIXTURES = ("ngram", "model+ngram", "eagle", "ngram+eagle", "model+ngram+eagle")


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with LocalService(
        drafts=1,
        draft_args=("--source", "model+ngram"),
        target_args=("--draft-model", str(embedded_eagle_path())),
        coordinator_args=PATIENT,
    ) as service:
        yield service


@pytest.fixture(scope="module")
def expected(reference, prompts) -> dict[str, list]:
    def outputs(spec: SamplingSpec) -> list:
        specs = [replace(spec, seed=(spec.seed + number) % 2**64) for number in range(REQUESTS)]
        return reference.generate_all(prompts[:REQUESTS], specs)

    stop = (reference.eos,)
    return {
        "greedy": outputs(SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=stop)),
        "sampled": outputs(SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=stop, **SAMPLED)),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["greedy", "sampled"])
@pytest.mark.parametrize("mixture", MIXTURES)
async def test_every_source_and_mixture_gives_the_same_tokens(service, prompts, expected, differs, *, mixture, rule):
    options: dict[str, Any] = dict(SAMPLED) if rule == "sampled" else {}
    words = mixture.split("+")
    async with AsyncClient(service.endpoint) as client:

        async def one(number: int, mode: Any) -> Any:
            own = options | ({"seed": (options["seed"] + number) % 2**64} if options else {})
            return await client.generate(
                prompts[number], max_new_tokens=NEW_TOKENS, speculation=mode, sources=words, **own
            )

        # The second time, a trie knows the output.
        outputs = [
            result
            for mode in ("async", "sync")
            for result in await asyncio.gather(*(one(number, mode) for number in range(REQUESTS)))
        ]
    for place, output in enumerate(outputs):
        wanted = expected[rule][place % REQUESTS]
        parted = differs(output.token_ids, wanted)
        assert parted is None, f"prompt {place % REQUESTS} parts at token {parted}"
        # Nobody drafts who was not asked.
        assert set(output.speculation.sources) <= set(words)
    if (words, rule) == (["eagle"], "greedy"):
        # It grows where the target runs, and does so before anybody knows whether that pays on this machine; but no
        # trees of a fixed shape.
        grown = [output.speculation.sources.get("eagle") for output in outputs[:REQUESTS]]
        assert sum(each.accepted_tokens for each in grown if each is not None) > REQUESTS


@pytest.mark.timeout(120)
async def test_a_trie_knows_what_was_said_before(service, prompts):
    """In turns, so that it does not hang on time whether its tree is there; inserts take place beside everything."""
    async with AsyncClient(service.endpoint) as client:
        deadline = time.monotonic() + 60
        while True:
            result = await client.generate(
                prompts[REQUESTS], max_new_tokens=NEW_TOKENS, speculation="sync", sources=cast("Any", ["ngram"])
            )
            found = result.speculation.sources.get("ngram")
            if found is not None and found.accepted_tokens >= NEW_TOKENS // 2:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
