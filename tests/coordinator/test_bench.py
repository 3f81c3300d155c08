"""`outrider bench` without a service: its prompts, its figures, and what it says of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console
from tests.coordinator.http_door import TOKENIZER, A, B, C, serving

from outrider.coordinator.api.http.chat_template import NoChatTemplate
from outrider.coordinator.bench.comparing import ALL, document, findings, first_difference, gains, table
from outrider.coordinator.bench.door import TokenizedPrompt, tokenize
from outrider.coordinator.bench.measuring import Answer, Pair
from outrider.coordinator.bench.prompts import DEFAULT_FILE, BenchPrompt, embedded_prompts, read_prompts
from outrider.coordinator.loadtest.client_process import Access
from outrider.coordinator.loadtest.records import RequestRecord
from outrider.errors import InvalidRequest, LoadtestFailed


def answer(seconds: float, token_ids: Sequence[int] = (1, 2, 3, 4), *, accepted: int = 0, error: str = "") -> Answer:
    record = RequestRecord(
        index=0,
        chunk_s=[] if error else [seconds / 4, seconds],
        output_tokens=len(token_ids),
        verify_steps=2,
        accepted_tokens=accepted,
        error=error,
    )
    return Answer(record=record, token_ids=tuple(token_ids))


def pair(number: int, off: Answer, on: Answer, category: str = "code") -> Pair:
    prompt = BenchPrompt(id=f"{category}-{number}", category=category, max_new_tokens=4, text="x")
    return Pair(prompt=TokenizedPrompt(prompt=prompt, token_ids=(7,), max_new_tokens=4), off=off, on=on)


def test_the_prompts_that_ship_have_nine_categories_of_six():
    prompts = read_prompts(DEFAULT_FILE)
    counts = dict.fromkeys(dict.fromkeys(prompt.category for prompt in prompts), 0)
    for prompt in prompts:
        counts[prompt.category] += 1
    assert set(counts.values()) == {6}
    assert len(counts) == 9
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


def test_prompts_of_every_kind(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "def f("}\n\n'
        '{"prompt": [5, 6], "category": "ids", "id": "own", "max_new_tokens": 9}\n'
        '{"messages": [{"role": "user", "content": "hello"}]}\n'
    )
    text, ids, conversation = read_prompts(path)
    assert (text.id, text.category, text.text, text.max_new_tokens) == ("line-1", "prompts", "def f(", 128)
    assert (ids.id, ids.category, ids.token_ids, ids.max_new_tokens) == ("own", "ids", (5, 6), 9)
    assert conversation.messages == ({"role": "user", "content": "hello"},)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "prompts.jsonl:1: it is not JSON"),
        ("[]", "an object needed"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": ""}', "must be a text"),
        ('{"prompt": [1, -1]}', "list of token ids"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens"),
        ('{"prompt": "a", "category": 3}', "category"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "a", "id": "x"}', "two prompts have the id 'x'"),
        ("", "it is empty"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line: str, words: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl") as caught:
        read_prompts(path)
    assert words in str(caught.value)


CONVERSATION = BenchPrompt(
    id="chat",
    category="chat",
    max_new_tokens=20,
    messages=({"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}),
)


async def test_a_service_says_the_token_ids():
    """Its model takes 2,000 tokens."""
    lengths = {"fits": 1980, "shortened": 1990, "too-long": 1995}
    ids = [
        BenchPrompt(id=name, category="ids", max_new_tokens=20, token_ids=(A,) * length)
        for name, length in lengths.items()
    ]
    text = BenchPrompt(id="text", category="texts", max_new_tokens=20, text="ba")
    async with serving() as door:
        found = await tokenize(door.server.address, [*ids, text, CONVERSATION], Access())
    assert (found.model, found.left_out, found.has_template) == ("tiny", ["too-long"], True)
    assert [prompt.max_new_tokens for prompt in found.prompts] == [20, 10, 20, 20]
    assert [prompt.token_ids for prompt in found.prompts[2:]] == [(B, A), (A, B, C)]


async def test_without_a_template_a_conversation_is_its_texts():
    async with serving(template=NoChatTemplate("this model has no chat template")) as door:
        found = await tokenize(door.server.address, [CONVERSATION], Access())
    assert not found.has_template
    assert found.prompts[0].token_ids == (A, B, *TOKENIZER.encode("\n\n"), C)


async def test_a_conversation_that_is_none_is_refused():
    wrong = replace(CONVERSATION, messages=({"role": 3, "content": "a"},))
    async with serving() as door:
        with pytest.raises(LoadtestFailed, match="role"):
            await tokenize(door.server.address, [wrong], Access())


def test_the_embedded_pair_has_python_prompts():
    prompts = embedded_prompts()
    assert {prompt.category for prompt in prompts} == {"python"}
    assert all(prompt.text for prompt in prompts)


def test_a_gain_is_the_ratio_of_tokens_over_time():
    pairs = [pair(number, answer(4.0), answer(2.0, accepted=3)) for number in range(4)]
    gain = gains(pairs)["code"]
    assert (gain.off_tokens_per_s, gain.on_tokens_per_s) == (1.0, 2.0)
    assert gain.speedup == 2.0
    assert gain.interval == (2.0, 2.0)
    assert gain.acceptance_length == 2.5
    assert (gain.off_ttft_ms, gain.on_ttft_ms) == (1000.0, 500.0)
    assert (gain.verdict, gain.equal, gain.failed) == ("faster", 4, 0)


def test_prompts_that_disagree_say_nothing_for_certain():
    """Half of them are twice as fast, half are half as fast."""
    mixed = [pair(number, answer(2.0), answer(4.0 if number % 2 else 1.0, accepted=1)) for number in range(8)]
    gain = gains(mixed)[ALL]
    assert gain.interval is not None
    assert gain.interval[0] < 1 < gain.interval[1]
    assert gain.verdict == "not certain"
    assert findings(gains(mixed), mixed)[0].startswith("A gain is not certain: ")
    slow = [pair(number, answer(2.0), answer(4.0), "chat") for number in range(3)]
    assert gains(slow)["chat"].verdict == "slower"


def test_what_is_said_when_nothing_is_gained():
    fast = [pair(number, answer(4.0), answer(2.0, accepted=3)) for number in range(3)]
    slow = [pair(number, answer(2.0), answer(2.0), "chat") for number in range(3)]
    lines = findings(gains([*fast, *slow]), [*fast, *slow])
    assert "Nothing is gained in chat (1.00x, 1.00 to 1.00)." in lines
    assert "The tokens of all 6 outputs are equal with and without speculation." in lines
    idle = findings(gains(slow), slow)
    assert idle[0].startswith("Speculation gains nothing: 1.00 times the speed")
    assert "Does a draft worker run?" in idle[0]
    drafted = [pair(number, answer(2.0), answer(2.0, accepted=2)) for number in range(3)]
    assert "2.00 tokens a verification. Try another draft" in findings(gains(drafted), drafted)[0]


def test_two_prompts_are_too_few_to_tell():
    pairs = [pair(number, answer(4.0), answer(2.0)) for number in range(2)]
    gain = gains(pairs)[ALL]
    assert (gain.interval, gain.verdict) == (None, "too few prompts")
    assert "too few" in findings(gains(pairs), pairs)[0]


def test_outputs_that_differ_are_named_with_the_place():
    pairs = [
        pair(0, answer(2.0), answer(1.0)),
        pair(1, answer(2.0, [1, 2, 3]), answer(1.0, [1, 9, 3])),
        pair(2, answer(2.0, [1, 2, 3]), answer(1.0, [1, 2])),
    ]
    assert [first_difference(each) for each in pairs] == [None, 1, 2]
    said = findings(gains(pairs), pairs)[-1]
    assert "2 of 3 outputs differ (code-1 from token 1, code-2 from token 2)" in said


def test_a_prompt_that_one_mode_failed_counts_in_no_speed():
    pairs = [pair(number, answer(4.0), answer(2.0)) for number in range(3)]
    pairs.append(pair(3, answer(400.0), answer(0.0, [], error="TimeoutError: too slow")))
    found = gains(pairs)
    assert (found[ALL].prompts, found[ALL].failed, found[ALL].off_tokens_per_s) == (3, 1, 1.0)
    assert findings(found, pairs)[-1].endswith("TimeoutError: too slow")
    assert gains([pairs[-1]]) == {}


def test_the_table_fits_80_columns_and_the_figures_are_json():
    pairs = [pair(number, answer(1e-4), answer(1e-3, accepted=40), "a-long-category-name") for number in range(12)]
    found = gains(pairs)
    console = Console(width=80, record=True)
    with console.capture() as capture:
        console.print(table(found))
    printed = capture.get()
    assert "…" not in printed
    assert "0.10x" in printed
    assert "slower" in printed
    assert "12/12" in printed
    written = json.loads(json.dumps(document(found, pairs), allow_nan=False))
    assert written["categories"][ALL]["speedup"] == pytest.approx(0.1)
    assert written["categories"][ALL]["verdict"] == "slower"
    assert written["prompts"][0]["off"]["e2el_ms"] == pytest.approx(0.1)
    assert math.isfinite(written["prompts"][0]["on"]["ttft_ms"])
