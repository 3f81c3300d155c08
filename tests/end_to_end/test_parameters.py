"""Every parameter gives what the plain loop gives, also where an end falls inside an accepted path."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.sampling import SamplingSpec

NEW_TOKENS = 32

RULES = {
    "penalties, greedy": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "penalties, sampled": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.5,
        "temperature": 0.8,
        "seed": 5,
    },
    "filters": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    "top-p alone": {"temperature": 0.7, "top_p": 0.6, "seed": 7},
    "bias and allowed": {"logit_bias": {300: 4.0, 10: -50.0}, "allowed_token_ids": tuple(range(2, 900))},
    "large seed": {"temperature": 1.0, "seed": 2**64 - 1},
}


def options_of(rule: dict) -> dict:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in rule.items()}


def together(check: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Checks all of them, several at a time: one by one, rounds of one session take most of the time."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, items))


@pytest.mark.parametrize("speculation", ["off", "sync", "async"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rules(client, reference, prompts, differs, *, rule, speculation):
    spec = SamplingSpec(max_new_tokens=NEW_TOKENS, stop_token_ids=(reference.eos,), **rule)
    asked = prompts[:3]

    def check(pair: tuple[Sequence[int], Any]) -> None:
        prompt, wanted = pair
        output = client.generate(
            prompt, max_new_tokens=NEW_TOKENS, logprobs=2, speculation=speculation, **options_of(rule)
        )
        assert differs(output.token_ids, wanted) is None
        if list(output.token_ids) == list(wanted.token_ids):
            logprobs = output.choices[0].logprobs
            assert logprobs is not None
            assert list(logprobs.token_logprobs) == pytest.approx(wanted.logprobs, abs=2e-3)
            assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in logprobs.top)

    together(check, zip(asked, reference.generate_each(asked, spec), strict=True))


@pytest.mark.parametrize("speculation", ["sync", "async"])
def test_every_length_limit_cuts_the_same_text(client, prompts, speculation):
    """Some of these limits fall inside an accepted path, whatever its length."""
    prompt = prompts[0]
    whole = client.generate(prompt, max_new_tokens=20, speculation="off", ignore_eos=True)

    def check(limit: int) -> None:
        output = client.generate(prompt, max_new_tokens=limit, speculation=speculation, ignore_eos=True)
        assert list(output.token_ids) == list(whole.token_ids[:limit])
        assert output.finish_reason == "length"
        assert output.usage.completion_tokens == limit
        assert whole.text.startswith(output.text.rstrip("\ufffd"))

    together(check, range(1, 21))


@pytest.mark.parametrize("speculation", ["off", "sync", "async"])
def test_stop_tokens_inside_an_accepted_path(client, prompts, speculation):
    prompt = prompts[1]
    whole = list(client.generate(prompt, max_new_tokens=24, speculation="off", ignore_eos=True).token_ids)

    def check(stop: int) -> None:
        output = client.generate(
            prompt, max_new_tokens=24, speculation=speculation, ignore_eos=True, stop_token_ids=[stop]
        )
        end = whole.index(stop) + 1
        assert list(output.token_ids) == whole[:end]
        assert output.finish_reason == "stop"
        assert output.choices[0].stop_reason == stop
        assert output.usage.completion_tokens == end

    together(check, dict.fromkeys(whole))


@pytest.mark.parametrize("speculation", ["off", "sync", "async"])
def test_stop_strings_cut_text_and_tokens_alike(client, reference, prompts, speculation):
    prompt = prompts[2]
    plain = client.generate(prompt, max_new_tokens=24, speculation="off", ignore_eos=True)
    pieces = {plain.text[start : start + 3] for start in range(0, len(plain.text) - 3, 4)}

    def check(stop: str) -> None:
        output = client.generate(prompt, max_new_tokens=24, speculation=speculation, ignore_eos=True, stop=[stop])
        assert output.text == plain.text[: plain.text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.choices[0].stop_reason == stop
        kept = next(count for count in range(1, 25) if stop in reference.tokenizer.decode(plain.token_ids[:count]))
        assert list(output.token_ids) == list(plain.token_ids[:kept])
        assert output.usage.completion_tokens == kept

    together(check, sorted(pieces))


@pytest.mark.parametrize("speculation", ["off", "sync", "async"])
def test_min_new_tokens_forbids_the_stop_until_then(client, reference, prompts, differs, speculation):
    prompt = prompts[3]
    plain = client.generate(prompt, max_new_tokens=20, speculation="off", ignore_eos=True)
    stop = plain.token_ids[2]
    spec = SamplingSpec(max_new_tokens=20, min_new_tokens=8, stop_token_ids=(reference.eos, stop))
    wanted = reference.generate(prompt, spec)
    output = client.generate(
        prompt, max_new_tokens=20, min_new_tokens=8, stop_token_ids=[stop], speculation=speculation
    )
    assert differs(output.token_ids, wanted) is None
    assert stop not in output.token_ids[:8]
    assert output.finish_reason == wanted.finish_reason


def test_choices_of_one_request_are_different_samples_and_reproducible(client, reference, prompts, differs):
    prompt = prompts[4]
    settings = {"max_new_tokens": 16, "temperature": 1.0, "seed": 3, "n": 3}
    output = client.generate(prompt, **settings)
    texts = [tuple(choice.token_ids) for choice in output.choices]
    assert len(set(texts)) == 3
    for choice in output.choices:
        spec = SamplingSpec(
            max_new_tokens=16, temperature=1.0, seed=3, choice_index=choice.index, stop_token_ids=(reference.eos,)
        )
        assert differs(choice.token_ids, reference.generate(prompt, spec)) is None
    assert [tuple(choice.token_ids) for choice in client.generate(prompt, **settings).choices] == texts


def test_a_drawn_seed_is_announced_and_serves_again(client, prompts):
    first = client.generate(prompts[5], max_new_tokens=16, temperature=1.0)
    again = client.generate(prompts[5], max_new_tokens=16, temperature=1.0, seed=first.seed)
    other = client.generate(prompts[5], max_new_tokens=16, temperature=1.0)
    assert list(first.token_ids) == list(again.token_ids)
    assert first.seed != other.seed


def test_deltas_are_contiguous_and_make_up_the_result(client, prompts):
    with client.stream(prompts[6], max_new_tokens=40) as stream:
        deltas = list(stream)
    tokens = list(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
    assert tokens == list(stream.result.token_ids)
    assert "".join(delta.text for delta in deltas) == stream.result.text
    for delta, after in itertools.pairwise(deltas):
        assert delta.offset + len(delta.token_ids) == after.offset
        assert delta.text_offset + len(delta.text.encode()) == after.text_offset


def test_tokens_of_the_prompt_cache_are_reported(client, prompts):
    """A prompt that was there before is not computed again, nor is one that goes on from an answer."""
    prompt = [901, 902, *reversed(prompts[7]), *prompts[8]]
    first = client.generate(prompt, max_new_tokens=6, ignore_eos=True)
    again = client.generate(prompt, max_new_tokens=6, ignore_eos=True)
    longer = client.generate([*prompt, *first.token_ids, 903], max_new_tokens=1, ignore_eos=True)
    assert list(again.token_ids) == list(first.token_ids)
    assert first.usage.cached_tokens < 2
    assert (again.usage.prompt_tokens, again.usage.cached_tokens) == (len(prompt), len(prompt) - 1)
    assert longer.usage.cached_tokens >= len(prompt) + 5
    # Choices of one prompt share it among themselves, but somebody computed it.
    choices = client.generate([904, *prompt], max_new_tokens=2, n=3, temperature=1.0, ignore_eos=True)
    assert (choices.usage.cached_tokens, choices.usage.completion_tokens) == (0, 6)
