"""Where drafts come from changes nothing: every source and mixture gives the tokens of the plain loop."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from outrider.client import AsyncClient
from outrider.local import LocalService
from outrider.models import embedded_eagle_path

from .conftest import PATIENT, RULES, generate_all

NEW_TOKENS, REQUESTS = 20, 6
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
def expected(reference, prompts):
    return reference.generate_by_rule(prompts[:REQUESTS], NEW_TOKENS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mixture", MIXTURES)
async def test_every_source_and_mixture_gives_the_same_tokens(service, prompts, expected, differs, *, mixture, rule):
    words = mixture.split("+")
    options = RULES[rule] | {"max_new_tokens": NEW_TOKENS, "sources": words}
    # The second time, a trie knows the output.
    outputs = [
        output
        for mode in ("async", "sync")
        for output in await generate_all(service.endpoint, prompts[:REQUESTS], speculation=mode, **options)
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
