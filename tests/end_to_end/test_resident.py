"""A draft model inside the target worker: no draft worker, the tokens of the plain loop, in fewer steps."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.local import LocalService
from outrider.models import embedded_draft_path
from outrider.sampling import SamplingSpec

from .conftest import PATIENT, generate_all

NEW_TOKENS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 2**63 + 11},
    "processors": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "top_k": 40, "logit_bias": {11: 2.0}},
}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    target_args = ["--draft-model", str(embedded_draft_path())]
    with LocalService(drafts=0, target_args=target_args, coordinator_args=PATIENT) as service:
        yield service


async def check_until_accepted(service: LocalService, prompts: list[list[int]], expected, differs, **options) -> None:
    """Tokens are those of the plain loop; steps pay sooner or later, however busy the machine is."""
    while True:
        outputs = await generate_all(service.endpoint, prompts, max_new_tokens=NEW_TOKENS, **options)
        for output, wanted in zip(outputs, expected, strict=True):
            assert differs(output.token_ids, wanted) is None
        if sum(output.speculation.accepted_tokens for output in outputs):
            break
    accepted = {source for output in outputs for source in output.speculation.sources}
    assert accepted == {"model"}
    for own in (output.speculation.sources["model"] for output in outputs if output.speculation.sources):
        assert own.drafted_tokens >= own.submitted_tokens >= own.accepted_tokens
    assert sum(output.speculation.verify_steps for output in outputs) < sum(
        output.usage.completion_tokens for output in outputs
    )


@pytest.mark.parametrize("name", SETTINGS)
async def test_the_same_tokens_without_a_draft_worker(service, reference, prompts, differs, name: str):
    asked, options = prompts[:8], SETTINGS[name]
    spec = SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=(reference.eos,), **options)
    expected = reference.generate_numbered(asked, spec)
    await check_until_accepted(service, asked, expected, differs, **options)


@pytest.mark.parametrize("speculation", ["off", "sync"])
async def test_other_modes_draft_never_or_before_every_step(service, reference, prompts, differs, speculation: str):
    asked = prompts[:4]
    spec = SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=(reference.eos,))
    outputs = await generate_all(service.endpoint, asked, max_new_tokens=NEW_TOKENS, speculation=speculation)
    for output, wanted in zip(outputs, reference.generate_each(asked, spec), strict=True):
        assert differs(output.token_ids, wanted) is None
        assert (output.speculation.acceptance_length > 1.5) is (speculation == "sync")
        assert (output.speculation.drafted_tokens > 0) is (speculation == "sync")


async def test_a_draft_worker_feeds_the_same_trees(service, reference, prompts, differs):
    service.start_worker("draft-0")
    service.wait_for_workers()
    asked = prompts[8:16]
    spec = SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=(reference.eos,))
    await check_until_accepted(service, asked, reference.generate_each(asked, spec), differs)
