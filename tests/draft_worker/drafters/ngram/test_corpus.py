"""Texts from files: what a line may be, what is said of a bad one, and how all of them get into the trie."""

import json
import logging
from pathlib import Path

import pytest
from tests.draft_worker.settling import settle
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from outrider.draft_worker.drafters.ngram.corpus import CorpusLoader, check_corpora
from outrider.draft_worker.drafters.ngram.proposals import ProposalConfig, TextTails
from outrider.draft_worker.drafters.ngram.shared_trie import SharedTrie
from outrider.draft_worker.drafters.ngram.trie import NgramTrie
from outrider.errors import CheckpointError, CorpusError

# The last one is no model's.
WORDS = {"the": 0, "cat": 1, "sat": 2, "on": 3, "mat": 4, "extra": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="the"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, *lines: object, name: str = "texts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"text": "the mat extra"}, '"text": it has token 5'),
        ("[1]", 'either "text" or "token_ids"'),
        ({}, 'either "text" or "token_ids"'),
        ({"text": "the", "token_ids": [1]}, 'either "text" or "token_ids"'),
        ({"text": 3}, '"text": int given'),
        ({"token_ids": "1"}, "whole numbers"),
        ({"token_ids": [1, True]}, "whole numbers"),
        ({"token_ids": [5]}, "ids from 0 to 4"),
        ({"token_ids": [-1]}, "ids from 0 to 4"),
    ],
)
def test_a_bad_line_among_the_first_is_an_error_that_names_it(folder: Path, line: object, message: str):
    path = write(folder, {"text": "the cat"}, "", line)
    with pytest.raises(CorpusError, match=message) as caught:
        check_corpora([path], folder, 5)
    assert f"{path}:3: " in str(caught.value)


def test_good_lines_missing_files_and_folders_without_a_tokenizer(folder: Path):
    # Of the second line's text half a character is there.
    path = write(folder, {"text": "the cat", "id": 7}, {"text": "\ud83d cat"}, {"token_ids": []}, {"token_ids": [4, 0]})
    check_corpora([path, path], folder, 5)
    with pytest.raises(CorpusError, match="No such file"):
        check_corpora([folder / "none.jsonl"], folder, 5)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        check_corpora([path], folder / "elsewhere", 5)


def test_files_are_read_beside_the_work_and_bad_lines_further_down_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    good = [{"text": "the cat sat on the mat"}] * 150
    first = write(folder, *good, "{", {"token_ids": [9]})
    second = write(folder, {"token_ids": [4, 4, 4, 1]}, name="more.jsonl")
    trie = SharedTrie(NgramTrie(capacity=1000, max_trie_depth=5), ProposalConfig(), patience_s=60)
    trie.start()
    loader = CorpusLoader([first, second], folder, 5)
    loader.start(trie)
    try:
        assert loader.finished.wait(250)
    finally:
        loader.stop()
    assert settle(trie)
    found = trie.propose(TextTails.of([[1, 2], [4, 4]], trie.suffix_tokens))
    assert found is not None
    assert found.tokens[0, :3].tolist() == [3, 0, 4]
    assert {4, 1} <= set(found.tokens[1, : found.found[1, 0]].tolist())
    assert (loader.texts, trie.counts.corpus_tokens) == (151, 150 * 6 + 4)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert [message.partition(": ")[0] for message in errors] == [f"{first}:151", f"{first}:152"]
    assert f"n-gram corpus {first}: read, 150 texts, 900 tokens, 2 lines left out" in caplog.text
    trie.stop()
    assert trie.join(30)


def test_stopping_ends_it_wherever_it_is(folder: Path):
    path = write(folder, *[{"token_ids": [1, 2, 3, 4] * 500}] * 300)
    # Nobody inserts, so that it waits for room.
    trie = SharedTrie(NgramTrie(capacity=1000, max_trie_depth=5), ProposalConfig())
    loader = CorpusLoader([path], folder, 5)
    loader.start(trie)
    loader.stop()
    assert loader.texts < 300
