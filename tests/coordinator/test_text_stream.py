"""Text as it streams: equal to the tokenizer's own decoding, cut at stop strings, however tokens are grouped."""

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.byte_tokenizer import ALPHABET, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from outrider.coordinator.sessions.text_stream import TextStream
from outrider.coordinator.sessions.tokenizer import TextTokenizer


def byte_level() -> TextTokenizer:
    """Every byte a token, some merges, one special and one plain added token."""
    # "Ġ" is a space; "ð" and "Ł" are the first two bytes of many emoji.
    merges = [("a", "b"), ("Ġ", "a"), ("ab", "c"), ("ð", "Ł"), ("c", "ð"), ("Ċ", "Ġ")]
    vocab = ALPHABET | {left + right: 256 + rank for rank, (left, right) in enumerate(merges)}
    tokenizer = byte_tokenizer("<end>", vocab=vocab, merges=merges)
    tokenizer.add_tokens([AddedToken("the tool→", special=False)])
    return TextTokenizer(tokenizer)


def metaspace() -> TextTokenizer:
    """As in Llama 2: metaspaces, byte fallback, one leading space dropped."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", "lo", "▁", "▁▁", "!", "é"]
    vocab = {word: rank for rank, word in enumerate(words)} | {f"<0x{byte:02X}>": 9 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    return TextTokenizer(tokenizer)


BYTE_LEVEL = byte_level()
METASPACE = metaspace()
END = BYTE_LEVEL.encode("<end>")[0]
SOME_STOPS = ["ab", "abc", "b", "ca", " a", "é", "🙂", "🙂a", "aab", "tool", "\n "]
# A few ids often, so that stop strings occur; any id (two past the vocabulary included) now and then.
_LIKELY = [token_id for text in ("a", "b", "c", " ", "ab", "🙂", "é", "\n") for token_id in BYTE_LEVEL.encode(text)]
token_ids_of_any_kind = st.lists(
    st.sampled_from(_LIKELY) | st.integers(0, BYTE_LEVEL.vocab_size + 1), min_size=0, max_size=40
)


def run(stream: TextStream, groups: list[list[int]]) -> tuple[str, int, str | None]:
    text, consumed = "", 0
    for group in groups:
        streamed = stream.push(group)
        text += streamed.text
        consumed += streamed.consumed
        assert stream.text_bytes == len(text.encode())
        if streamed.stop_string is not None:
            assert stream.push([1]).consumed == 0
            return text + stream.flush(), consumed, streamed.stop_string
    return text + stream.flush(), consumed, None


def grouped(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    groups, rest = [], token_ids
    for cut in cuts:
        groups.append(rest[:cut])
        rest = rest[cut:]
    return [*groups, rest]


@given(prompt=token_ids_of_any_kind, output=token_ids_of_any_kind)
@settings(max_examples=300, deadline=None)
def test_text_is_what_the_tokenizer_decodes(prompt: list[int], output: list[int]) -> None:
    text, consumed, _ = run(TextStream(BYTE_LEVEL, prompt_token_ids=prompt), [[token_id] for token_id in output])
    assert consumed == len(output)
    whole, before = BYTE_LEVEL.decode(prompt + output), BYTE_LEVEL.decode(prompt)
    # Where the prompt ends inside a character, the output completes it: the text then holds the whole character.
    assert whole == before + text or (before.endswith("\ufffd") and whole.endswith(text))


@given(
    output=token_ids_of_any_kind,
    stop=st.lists(st.sampled_from(SOME_STOPS), max_size=3),
    cuts=st.lists(st.integers(0, 6), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_grouping_of_tokens_changes_nothing(output: list[int], stop: list[str], cuts: list[int]) -> None:
    one_by_one = run(TextStream(BYTE_LEVEL, stop=stop), [[token_id] for token_id in output])
    assert run(TextStream(BYTE_LEVEL, stop=stop), grouped(output, cuts)) == one_by_one
    assert run(TextStream(BYTE_LEVEL, stop=stop), [output]) == one_by_one


@given(output=token_ids_of_any_kind, stop=st.lists(st.sampled_from(SOME_STOPS), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_stop_strings_agree_with_a_search_of_the_whole_text(output: list[int], stop: list[str]) -> None:
    text, consumed, found = run(TextStream(BYTE_LEVEL, stop=stop), [[token_id] for token_id in output])
    whole = BYTE_LEVEL.decode(output)
    ends = [(whole.find(string) + len(string), whole.find(string), string) for string in stop if string in whole]
    if not ends:
        assert (text, consumed, found) == (whole, len(output), None)
        return
    end, start, string = min(ends)
    assert (text, found) == (whole[:start], string)
    # The last kept token is the one that completes the stop string.
    assert BYTE_LEVEL.decode(output[:consumed]).startswith(whole[:end])
    assert string not in BYTE_LEVEL.decode(output[: consumed - 1])


@given(whole=st.text("abc 🙂é\n", max_size=30), stop=st.lists(st.sampled_from(SOME_STOPS), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_exactly_what_may_begin_a_stop_string_is_held_back(whole: str, stop: list[str]) -> None:
    stream, text, output = TextStream(BYTE_LEVEL, stop=stop), "", BYTE_LEVEL.encode(whole)
    for count, token_id in enumerate(output, 1):
        streamed = stream.push([token_id])
        text += streamed.text
        if streamed.stop_string is not None:
            return
        known = BYTE_LEVEL.decode(output[:count]).rstrip("\ufffd")
        beginnings = [known[start:] for start in range(len(known)) if any(s.startswith(known[start:]) for s in stop)]
        assert text + (beginnings[0] if beginnings else "") == known


def test_unfinished_character_waits() -> None:
    smile = BYTE_LEVEL.encode("🙂")
    stream = TextStream(BYTE_LEVEL)
    assert [stream.push([token_id]).text for token_id in smile] == [""] * (len(smile) - 1) + ["🙂"]
    assert stream.push(smile[:-1]).text == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_first_complete_stop_string_wins_and_the_longest_of_those() -> None:
    assert run(TextStream(BYTE_LEVEL, stop=["c", "ab", "zab"]), [BYTE_LEVEL.encode("zabc")])[::2] == ("", "zab")
    assert run(TextStream(BYTE_LEVEL, stop=["abc", "b"]), [BYTE_LEVEL.encode("abc")])[::2] == ("a", "b")


def test_special_tokens_and_ids_without_a_token_have_no_text() -> None:
    ids = [*BYTE_LEVEL.encode("ab"), END, BYTE_LEVEL.vocab_size + 7, *BYTE_LEVEL.encode("the tool→c")]
    assert run(TextStream(BYTE_LEVEL), [ids])[0] == "abthe tool→c"


def test_prompt_that_ends_inside_a_character_is_completed() -> None:
    smile = BYTE_LEVEL.encode("🙂")
    assert TextStream(BYTE_LEVEL, prompt_token_ids=smile[:-1]).push(smile[-1:]).text == "🙂"


@given(output=st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9 + 0x20, 9 + 0x41, 1]), max_size=20))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("prompt", [[], [1], [1, 2], [1, 5]])
def test_metaspace_text_is_what_the_tokenizer_decodes(prompt: list[int], output: list[int]) -> None:
    text, _, _ = run(TextStream(METASPACE, prompt_token_ids=prompt), [[token_id] for token_id in output])
    expected = METASPACE.decode(prompt + output)
    before = METASPACE.decode(prompt)
    assert before + text == expected


def test_metaspace_keeps_spaces_and_joins_fallback_bytes() -> None:
    smile = [9 + byte for byte in "🙂".encode()]
    stream = TextStream(METASPACE, prompt_token_ids=[1, 2])
    assert [stream.push([token_id]).text for token_id in [3, *smile, 2]] == [" world", "", "", "", "🙂", " Hello"]


def test_without_tokenizer_every_token_is_kept_and_has_no_text() -> None:
    stream = TextStream(None, prompt_token_ids=[1])
    assert stream.push([1, 2]).consumed == 2
    assert stream.flush() == ""
    with pytest.raises(ValueError, match="tokenizer"):
        TextStream(None, stop=["x"])


class CountingTokenizer:
    """Tells how many token ids it was asked about."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer, self.asked = tokenizer, 0

    def piece(self, token_id: int) -> bytes:
        self.asked += 1
        return self._tokenizer.piece(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.asked += len(token_ids)
        return self._tokenizer.decode(token_ids)

    def leading_space_dropped(self, token_id: int) -> bool:
        return self._tokenizer.leading_space_dropped(token_id)


def test_cost_of_a_token_does_not_grow_with_the_text() -> None:
    # Bytes that never become a character are the worst case of schemes that decode again from the last whole one.
    broken = BYTE_LEVEL.encode("🙂")[:1] * 2_000
    tokenizer = CountingTokenizer(BYTE_LEVEL)
    stream = TextStream(cast("TextTokenizer", tokenizer), stop=["never comes"])
    for token_id in broken:
        stream.push([token_id])
    assert tokenizer.asked == len(broken)
