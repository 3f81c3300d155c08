"""What speculation is worth on held-out prompts, and that drafting overlaps verification."""

from collections.abc import Sequence

import pytest

from outrider.client import Client


@pytest.fixture(scope="module")
def client(one_draft):
    with Client(one_draft.endpoint) as client:
        yield client


def acceptance_length(client: Client, prompts, **options) -> float:
    steps = accepted = 0
    for number, prompt in enumerate(prompts):
        output = client.generate(prompt, max_new_tokens=40, seed=number, **options)
        steps += output.speculation.verify_steps
        accepted += output.speculation.accepted_tokens
    return 1 + accepted / steps


@pytest.mark.parametrize(("temperature", "wanted"), [(0.0, 3.0), (1.0, 2.6)])
def test_sync_acceptance_length(client, prompts, temperature, wanted, record_property):
    length = acceptance_length(
        client, prompts[:6], temperature=temperature, speculation="sync", max_nodes=24, max_depth=8
    )
    record_property("acceptance_length", length)
    assert length > wanted


def test_growth_arrives_while_the_target_verifies(client, prompts):
    """How often depends on the machine; tests/coordinator/test_scheduler.py asks for more in virtual time."""

    def is_seen(prompt: Sequence[int]) -> bool:
        output = client.generate(prompt, max_new_tokens=256, trace=True, ignore_eos=True)
        # The first round has no verification before it.
        return any(arrival.during_verify for record in output.rounds[1:] for arrival in record.growth)

    # On a busy machine it may take more than one.
    assert any(is_seen(prompt) for prompt in prompts[:10])


def test_a_sync_round_never_overlaps(client, prompts):
    output = client.generate(prompts[0], max_new_tokens=32, trace=True, speculation="sync", ignore_eos=True)
    assert not any(arrival.during_verify for record in output.rounds[1:] for arrival in record.growth)
