"""Every verification rule through real services: alone, mixed in one batch, and resumed."""

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import grpc
import numpy as np
import pytest
import torch
from scipy import stats

from outrider.rpc import CHANNEL_OPTIONS
from outrider.sampling import SamplingSpec
from outrider.v1 import generation_pb2, generation_pb2_grpc

Coins = Literal["target_only", "rejection"]
COINS: tuple[Coins, ...] = ("target_only", "rejection")
# On a busy machine growth may come too late for all of a short output: then it is asked for again.
TRIES = {"async": 8, "sync": 1, "off": 1}


@pytest.fixture(scope="module")
def prompts(prompts) -> list[list[int]]:
    """Short ones: what differs here comes after them."""
    return [prompt[:16] for prompt in prompts]


@torch.inference_mode()
def logprobs_of(reference, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """[len(output), V] raw log probabilities where each token was chosen."""
    logits = reference.model(input_ids=torch.tensor([[*prompt, *output]])).logits[0].double()
    return logits[len(prompt) - 1 : -1].log_softmax(-1).numpy()


@pytest.mark.parametrize("rule", COINS)
def test_at_temperature_0_every_rule_gives_the_greedy_tokens(client, reference, prompts, differs, rule):
    spec = SamplingSpec(max_new_tokens=24, stop_token_ids=(reference.eos,))
    wanted = reference.generate(prompts[0], spec)
    for speculation in ("async", "sync", "off"):
        accepted = 0
        for _ in range(TRIES[speculation]):
            output = client.generate(prompts[0], max_new_tokens=24, verification=rule, speculation=speculation)
            assert differs(output.token_ids, wanted) is None
            if accepted := output.speculation.accepted_tokens:
                break
        assert (accepted > 0) == (speculation != "off")


@pytest.mark.parametrize("speculation", ["async", "sync", "off"])
@pytest.mark.parametrize("rule", COINS)
def test_sampled_output_is_drafted_and_accepted(client, reference, prompts, rule, speculation):
    accepted = drafted = 0
    for number, prompt in enumerate(prompts[:2] * TRIES[speculation]):
        if number >= 2 and accepted:
            break
        settings = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 1, "seed": number, "temperature": 0.8}
        output = client.generate(prompt, verification=rule, speculation=speculation, **settings)
        assert (len(output.token_ids), output.finish_reason) == (24, "length")
        wanted = logprobs_of(reference, prompt, output.token_ids)[np.arange(24), list(output.token_ids)]
        assert output.logprobs is not None
        assert list(output.logprobs.token_logprobs) == pytest.approx(list(wanted), abs=2e-3)
        accepted += output.speculation.accepted_tokens
        drafted += output.speculation.drafted_tokens
    assert (accepted > 0, drafted > 0) == (speculation != "off",) * 2


@pytest.mark.parametrize("rule", COINS)
def test_output_follows_the_law_of_the_plain_loop(client, reference, prompts, rule):
    """Three tokens out of two that may be chosen: eight outputs, their probabilities from transformers alone."""
    prompt, count = prompts[4], 128
    allowed = np.argsort(logprobs_of(reference, prompt, [0])[0])[[-1, -3]].tolist()
    law = {}
    for output in itertools.product(allowed, repeat=3):
        rows = logprobs_of(reference, prompt, output)[:, allowed] / 1.5
        rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
        law[output] = float(np.exp(sum(rows[place, allowed.index(token)] for place, token in enumerate(output))))
    settings = {"allowed_token_ids": allowed, "temperature": 1.5, "max_new_tokens": 3, "ignore_eos": True, "n": 16}
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(count // 16):
        # A sync round waits for its draft, so every choice is drafted for.
        output = client.generate(prompt, seed=seed, verification=rule, speculation="sync", **settings)
        seen.update(tuple(choice.token_ids) for choice in output.choices)
        accepted += output.speculation.accepted_tokens
    expected = np.array([law[output] * count for output in law])
    assert stats.chisquare([seen[output] for output in law], expected * count / expected.sum()).pvalue > 1e-3
    assert accepted > count / 4


def test_sessions_of_all_rules_share_batches(client, reference, prompts, differs):
    rules = [None, "coupled", *COINS] * 2

    def generate(number: int):
        rule, temperature = rules[number], 0.0 if number < 4 else 1.0
        return client.generate(
            prompts[number], max_new_tokens=16, ignore_eos=True, verification=rule, temperature=temperature, seed=number
        )

    with ThreadPoolExecutor(len(rules)) as pool:
        outputs = list(pool.map(generate, range(len(rules))))
    for number, (rule, output) in enumerate(zip(rules, outputs, strict=True)):
        assert len(output.token_ids) == 16
        if rule in COINS and number >= 4:
            continue
        spec = SamplingSpec(max_new_tokens=16, temperature=0.0 if number < 4 else 1.0, seed=number)
        assert differs(output.token_ids, reference.generate(prompts[number], spec)) is None


@pytest.mark.parametrize("rule", COINS)
def test_stops_and_least_lengths_hold(client, reference, prompts, rule):
    settings = {"temperature": 1.0, "seed": 3, "verification": rule, "max_new_tokens": 24}
    likely = np.argsort(logprobs_of(reference, prompts[5], [0])[0])[-40:].tolist()
    for seed in range(3):
        output = client.generate(prompts[5], **settings | {"seed": seed}, stop_token_ids=likely, min_new_tokens=6)
        assert not set(likely) & set(output.token_ids[:6])
        assert (output.finish_reason == "stop") == (output.token_ids[-1] in [*likely, reference.eos])
        assert not set(likely) & set(output.token_ids[:-1])


@pytest.mark.parametrize("rule", COINS)
def test_a_resumed_request_goes_on_where_it_stood(one_draft, client, prompts, rule):
    settings = {"max_new_tokens": 20, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole = client.generate(prompts[6], verification=rule, **settings)
    with client.stream(prompts[6], verification=rule, **settings) as stream:
        first = next(iter(stream))
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompts[6]),
        sampling_params=generation_pb2.SamplingParams(**settings),
        speculation=generation_pb2.SpeculationParams(verification=f"VERIFICATION_RULE_{rule.upper()}"),
        received=[generation_pb2.Received(token_ids=first.token_ids, text_bytes=len(first.text.encode()))],
    )
    tokens = list(first.token_ids)
    with grpc.insecure_channel(one_draft.endpoint, options=CHANNEL_OPTIONS) as channel:
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30):
            if response.HasField("delta"):
                assert response.delta.offset == len(tokens)
                tokens += response.delta.token_ids
    assert len(tokens) == len(whole.token_ids) == 20


def test_thresholds_let_more_of_the_draft_through(client, prompts):
    def accepted(**thresholds: float) -> int:
        settings = {"verification": "target_only", "speculation": "sync", "temperature": 1.0, "ignore_eos": True}
        outputs = [
            client.generate(prompt, max_new_tokens=24, seed=1, **settings, **thresholds) for prompt in prompts[:3]
        ]
        return sum(output.speculation.accepted_tokens for output in outputs)

    assert accepted(threshold_single=0.05, threshold_acc=0.2) > accepted()
