"""Workloads: equal for equal seeds, wherever they are made, and errors that say what is wrong with a file."""

import json
import random
import re

import pytest

from outrider.coordinator.loadtest.workload_files import read_jsonl, read_sharegpt, read_trace
from outrider.coordinator.loadtest.workloads import FromFile, PythonPrompts, RandomLengths, Turn
from outrider.errors import InvalidRequest
from outrider.models import held_out_prompts


def random_lengths(**changes) -> RandomLengths:
    settings = {"input_len": 40, "output_len": 20, "range_ratio": 0.5, "vocab_size": 1000, "seed": 1}
    return RandomLengths(**settings | changes)


def test_python_prompts_come_in_turn_from_a_place_that_the_seed_says():
    prompts = held_out_prompts()
    asked = [PythonPrompts(max_new_tokens=8, seed=3).conversation(number).turns[0].prompt for number in range(3)]
    first = prompts.index(str(asked[0]))
    assert asked == [prompts[(first + number) % len(prompts)] for number in range(3)]
    others = {str(PythonPrompts(max_new_tokens=8, seed=seed).conversation(0).turns[0].prompt) for seed in range(8)}
    assert len(others) > 1


def test_conversations_are_functions_of_seed_and_number():
    for workload in (random_lengths(), PythonPrompts(max_new_tokens=8, seed=1, turns_each=3)):
        assert workload.conversation(5) == workload.conversation(5)
        assert workload.conversation(5) != workload.conversation(6)
    assert random_lengths().conversation(5) != random_lengths(seed=2).conversation(5)


def test_random_lengths_lie_within_their_range():
    turns = [random_lengths().conversation(number).turns[0] for number in range(300)]
    inputs, outputs = {len(turn.prompt) for turn in turns}, {turn.max_new_tokens for turn in turns}
    assert (min(inputs), max(inputs)) == (20, 60)
    assert (min(outputs), max(outputs)) == (10, 30)
    assert all(isinstance(token, int) and 256 <= token < 1000 for turn in turns for token in turn.prompt)
    exact = random_lengths(range_ratio=0.0).conversation(0).turns[0]
    assert (len(exact.prompt), exact.max_new_tokens) == (40, 20)


def test_shared_prefixes_are_taken_in_turn():
    workload = random_lengths(prefix_len=10, prefixes=2)
    prompts = [workload.conversation(number).turns[0].prompt for number in range(4)]
    assert prompts[0][:10] == prompts[2][:10]
    assert prompts[1][:10] == prompts[3][:10]
    assert prompts[0][:10] != prompts[1][:10]
    assert len({prompt[10:] for prompt in prompts}) == 4


def test_several_turns_are_apart():
    conversation = PythonPrompts(max_new_tokens=8, seed=0, turns_each=2).conversation(0)
    assert len(conversation.turns) == 2
    assert str(conversation.turns[1].prompt).startswith("\n\n")


def test_a_file_begins_anew_at_its_end(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [5, 6]}\n{"turns": ["b", "c"]}\n', encoding="utf-8")
    workload = read_jsonl(path, max_new_tokens=9, seed=4)
    assert workload.turns_each == 2
    found = {workload.conversation(number).turns for number in range(3)}
    assert {tuple((turn.prompt, turn.max_new_tokens) for turn in turns) for turns in found} == {
        (("a", 3),),
        (((5, 6), 9),),
        (("b", 9), ("c", 9)),
    }
    assert workload.conversation(4).turns == workload.conversation(1).turns
    assert workload.conversation(4).seed != workload.conversation(1).seed


def test_the_order_of_a_large_file_is_not_drawn_for_every_conversation(monkeypatch):
    drawn = []

    class Noting(random.Random):
        def sample(self, population, k, **options):
            drawn.append(k)
            return super().sample(population, k, **options)

    monkeypatch.setattr(random, "Random", Noting)
    entries = [(Turn(prompt=str(number), max_new_tokens=1),) for number in range(2_000)]
    workload = FromFile(entries=entries, seed=1, shuffled=True)
    prompts = {workload.conversation(number).turns[0].prompt for number in range(500)}
    assert len(prompts) == 500
    assert drawn == [2_000]


def test_a_trace_keeps_its_times(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 12.5, "prompt": "late"}\n{"timestamp": 10, "prompt": "early", "max_tokens": 2}\n',
        encoding="utf-8",
    )
    workload = read_trace(path, max_new_tokens=9, vocab_size=1000, speed=2.0, seed=0)
    assert workload.arrivals_s == [0.0, 1.25]
    assert [workload.conversation(number).turns[0].prompt for number in range(2)] == ["early", "late"]


def test_a_trace_of_lengths_makes_up_its_prompts(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 30, "output_length": 4}\n' * 2, encoding="utf-8")
    first, second = read_trace(path, max_new_tokens=9, vocab_size=1000, speed=1.0, seed=0).entries
    assert len(first[0].prompt) == len(second[0].prompt) == 30
    assert first[0].prompt != second[0].prompt
    assert first[0].max_new_tokens == 4


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "is not JSON"),
        ("[1]", "an object needed"),
        ("{}", '"prompt" must be'),
        ('{"prompt": ""}', '"prompt" must be'),
        ('{"prompt": [1, "x"]}', '"prompt" must be'),
        ('{"prompt": [true]}', '"prompt" must be'),
        ('{"prompt": "a", "max_tokens": 0}', '"max_tokens" is 0'),
        ('{"turns": []}', '"turns" must be'),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, line, what):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match=re.escape(f"{path}:3") + ".*" + re.escape(what)):
        read_jsonl(path, max_new_tokens=9, seed=0)


def test_bad_times_and_empty_files_are_told(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": "noon", "prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match="\"timestamp\" is 'noon'"):
        read_trace(path, max_new_tokens=9, vocab_size=1000, speed=1.0, seed=0)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="it is empty"):
        read_jsonl(path, max_new_tokens=9, seed=0)
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_jsonl(path, max_new_tokens=9, seed=0)


def sharegpt(tmp_path, document, **changes) -> FromFile:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    settings = {"count_tokens": lambda text: len(text.split()), "output_len": None, "seed": 0}
    return read_sharegpt(path, **settings | changes)


def talk(*values: str) -> dict:
    return {"conversations": [{"from": "human", "value": value} for value in values]}


def test_sharegpt_asks_for_as_much_as_was_answered(tmp_path):
    document = [
        talk("one two three four", "a b c d e", "more"),
        talk("too short", "a b c d e"),
        talk("alone in here now"),
    ]
    ((turn,),) = sharegpt(tmp_path, document).entries
    assert (turn.prompt, turn.max_new_tokens) == ("one two three four", 5)
    ((turn,),) = sharegpt(tmp_path, document, output_len=77).entries
    assert turn.max_new_tokens == 77


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ({}, "an array of conversations needed"),
        ([{"id": 1}], "conversation 0.*conversations"),
        ([{"conversations": [{"from": "human"}]}], "conversation 0.*value"),
        ([talk("one two three four")], "no conversation has a prompt and an answer"),
    ],
)
def test_what_is_no_sharegpt_is_told(tmp_path, document, what):
    with pytest.raises(InvalidRequest, match=what):
        sharegpt(tmp_path, document)


@pytest.mark.parametrize("changes", [{"range_ratio": 1.0}, {"range_ratio": -0.1}, {"vocab_size": 1}])
def test_bad_values_are_named(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        random_lengths(**changes)
