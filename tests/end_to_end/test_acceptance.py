"""Gain of speculation on held-out prompts."""

import pytest

from outrider.client import Client


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
