"""Prefill of the verifier: in chunks, beside trees, and from what the cache remembers."""

import random
from pathlib import Path

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.verifying import NO_TREE, PROMPT, make_verifier, open_request, tree_request
from transformers import PreTrainedModel

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import Code, Outcome, SessionFault
from outrider.target_worker.verifier import Verifier


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return make_verifier(checkpoint)


def test_first_token_shares_the_forward_of_the_last_prefill_chunk(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=4)
    verifier.open(open_request(1, SamplingSpec()))
    outcomes = [verifier.step([tree_request(1, 7)]) for _ in range(2)]
    # 6 tokens before the root: 4, then 2 and the root.
    assert [step.results[0].outcome for step in outcomes] == [Outcome.DEFERRED, Outcome.ACCEPTED]
    assert [step.tokens for step in outcomes] == [4, 3]


def test_prefill_goes_on_without_a_batch(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_step_tokens=16)
    verifier.open(open_request(1, SamplingSpec()))
    assert verifier.has_pending_prefill
    assert [verifier.prefill(), verifier.prefill(), verifier.prefill()] == [4, 2, 0]
    assert not verifier.has_pending_prefill
    assert verifier.step([tree_request(1, 7)]).tokens == 1


@pytest.mark.parametrize("chunk", [1, 3, 16, None])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_tokens_whatever_the_chunks_the_cache_and_preemption(
    chunk: int | None, caching: bool, checkpoint: Path, reference_model: PreTrainedModel
) -> None:
    """Sessions that begin alike, end and come again, in a KV cache that is too small for them all."""
    rng = random.Random(1)
    shared = [rng.randrange(61) for _ in range(20)]
    prompts = [[*shared[: rng.choice([8, 14, 20])], *(rng.randrange(61) for _ in range(4))] for _ in range(3)]
    prompts += [prompts[0], prompts[1]]
    specs = [SamplingSpec(temperature=1.0, seed=number, max_new_tokens=24) for number in range(5)]
    plain = [plain_decode(reference_model, prompt, spec).tokens for prompt, spec in zip(prompts, specs, strict=True)]
    verifier = make_verifier(
        checkpoint, num_slots=56, max_step_tokens=chunk or 64, max_prefill_tokens=chunk or 64,
        enable_prefix_caching=caching,
    )  # fmt: skip
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, live, cached = list(range(5)), [], 0
    while waiting or live:
        if waiting and rng.random() < 0.8:
            live.append(waiting.pop(0))
            verifier.open(open_request(live[-1], specs[live[-1]], prompt=prompts[live[-1]]))
        trees = [
            tree_request(
                number,
                len(prompts[number]) + len(outputs[number]),
                (plain[number][len(outputs[number]) :][:2], [0, 1]) if len(outputs[number]) < 22 else NO_TREE,
            )
            for number in live
        ]
        for number, result in zip(list(live), verifier.step(trees).results, strict=True):
            outputs[number] += result.token_ids
            cached += result.cached_tokens
            if len(outputs[number]) >= 24:
                verifier.close((7, number), 1)
                live.remove(number)
    assert outputs == plain
    assert (cached > 0) == caching
    assert verifier.slots_used == 0
    assert (verifier.slots_cached > 0) == caching
    # With few rows a step, one session ends before the next gets far.
    assert verifier.preemptions > 0 or chunk in (1, 3)


def test_kv_outlives_its_session_and_its_stream(verifier: Verifier) -> None:
    prompt = [*range(40, 60), 3]
    verifier.open(open_request(1, SamplingSpec(), prompt=prompt))
    first = verifier.step([tree_request(1, 21)]).results[0]
    again = verifier.step([tree_request(1, 22)]).results[0]
    verifier.close((7, 1), 1)
    assert (first.cached_tokens, verifier.slots_used) == (0, 0)
    # All of the prompt but its last token, and for a conversation that goes on the output as well.
    longer = [*prompt, *first.token_ids, *again.token_ids, 9]
    verifier.open(open_request(2, SamplingSpec(), prompt=prompt))
    verifier.open(open_request(3, SamplingSpec(), prompt=longer))
    step = verifier.step([tree_request(2, 21), tree_request(3, 24)])
    assert [result.cached_tokens for result in step.results] == [20, 22]
    assert step.tokens == 1 + 2
    assert list(step.results[0].token_ids) == list(first.token_ids)
    # What a session computed is its own when it comes again, and it finds what others have added.
    verifier.open(open_request(2, SamplingSpec(), epoch=2, prompt=prompt, output=[*first.token_ids, *again.token_ids]))
    reopened = verifier.step([tree_request(2, 23, epoch=2)])
    assert (reopened.results[0].cached_tokens, reopened.tokens) == (20, 1)
    for number in (2, 3):
        verifier.close((7, number), 2)
    assert verifier.slots_used == 0


def test_a_prompt_longer_than_the_cache_says_what_to_raise(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, num_slots=10)
    with pytest.raises(SessionFault, match=r"11 tokens given, the KV cache holds 10: raise num_slots, kv_bytes or"):
        verifier.open(open_request(1, SamplingSpec(), prompt=[1] * 11))
    verifier.open(open_request(1, SamplingSpec(), prompt=[1] * 10))
    assert len(verifier.step([tree_request(1, 10)]).results[0].token_ids) == 1
    fault = verifier.step([tree_request(1, 11)]).results[0].fault
    assert fault is not None
    assert (fault.code, "the KV cache holds 10" in fault.message) == (Code.INVALID_ARGUMENT, True)


def test_prefill_waits_for_those_who_were_just_verified(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint)
    assert verifier.prefill_due_s == 0.0
    verifier.open(open_request(1, SamplingSpec()))
    assert verifier.prefill_due_s == 0.0
    verifier.step([tree_request(1, 7)])
    verifier.open(open_request(2, SamplingSpec(), prompt=[60, *PROMPT]))
    assert 0.0 < verifier.prefill_due_s <= 0.1
    verifier.close((7, 1), 1)
    assert verifier.prefill_due_s == 0.0
