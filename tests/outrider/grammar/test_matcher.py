"""Masks of trees against a plain enumeration of a small language."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.byte_tokenizer import ALPHABET, byte_tokenizer

from outrider.grammar import library
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.matcher import SessionGrammar

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

TEXTS = [*"abcdx", "ab", "bc", "cd", "abc", "dx"]


MERGES = [("a", "b"), ("b", "c"), ("c", "d"), ("ab", "c"), ("d", "x")]
TOKENIZER = byte_tokenizer(
    "<end>",
    vocab=ALPHABET | {text: 256 + rank for rank, text in enumerate(text for text in TEXTS if len(text) > 1)},
    merges=MERGES,
)
VOCAB: dict[str, int] = TOKENIZER.get_vocab()
END = VOCAB["<end>"]
IDS = {text: VOCAB[text] for text in TEXTS}
PIECES = {token: piece for piece, token in VOCAB.items()}
COMPILER = GrammarCompiler(TOKENIZER.to_str)
# (ab|cd){1,2}x? as its words.
WORDS = [
    "".join(parts) + tail
    for count in (1, 2)
    for parts in itertools.product(["ab", "cd"], repeat=count)
    for tail in ("", "x")
]
GRAMMAR = '{"grammars":[{"lark_grammar":"start: /(ab|cd){1,2}x?/"}]}'


def session(grammar: str = GRAMMAR) -> SessionGrammar:
    return SessionGrammar(COMPILER.start(grammar, (END,)), (END,))


def text_of(tokens: Sequence[int]) -> str | None:
    """None after the end."""
    return None if END in tokens else "".join(PIECES[token] for token in tokens)


def allowed_after(text: str) -> set[int]:
    found = {IDS[piece] for piece in TEXTS if any(word.startswith(text + piece) for word in WORDS)}
    return found | ({END} if text in WORDS else set())


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("output", [[], ["a"], ["ab"], ["a", "bc"], ["ab", "cd"], ["ab", "ab"]])
def test_every_node_of_random_trees(output: list[str]) -> None:
    committed, rng = [IDS[piece] for piece in output], random.Random(3)
    grammar = session()
    assert grammar.follow(committed)
    for _ in range(30):
        tokens, parents, paths = [], [], [committed]
        for _ in range(rng.randint(0, 14)):
            parent = rng.randint(0, len(tokens))
            follows = text_of(paths[parent])
            # Mostly what the grammar allows, so that trees become deep; sometimes the end, sometimes anything.
            good = sorted(allowed_after(follows)) if follows is not None else []
            token = rng.choice(good) if good and rng.random() < 0.8 else rng.choice([*IDS.values(), END])
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
        masks = grammar.masks(tokens, parents)
        assert masks.shape == (len(tokens) + 1, (len(VOCAB) + 31) // 32)
        for mask, path in zip(masks, paths, strict=True):
            text = text_of(path)
            if text is not None and any(word.startswith(text) for word in WORDS):
                assert tokens_of(mask) == allowed_after(text), path
            else:
                assert (mask == -1).all(), path
        if paths[-1] is not committed:
            below = paths[-1][len(committed) :]
            alone = grammar.mask_after(below)
            assert (masks[-1] == -1).all() if alone is None else (alone == masks[-1]).all()
    assert not grammar.unfollowed
    assert grammar.fault is None


def test_a_committed_output_may_grow_shrink_and_change() -> None:
    grammar = session()
    for pieces in (["ab"], ["ab", "cd"], ["a"], ["a", "b"], ["cd", "a"], [], ["cd", "cd", "x"]):
        assert grammar.follow([IDS[piece] for piece in pieces])
        assert tokens_of(grammar.masks()[0]) == allowed_after("".join(pieces))


def test_nothing_follows_the_end_until_it_is_taken_back() -> None:
    grammar = session()
    assert grammar.follow([IDS["ab"], END])
    assert (grammar.masks([IDS["a"]], [0]) == -1).all()
    assert grammar.mask_after([]) is None
    assert grammar.follow([IDS["ab"]])
    assert tokens_of(grammar.masks()[0]) == allowed_after("ab")


def test_an_output_that_breaks_the_grammar_is_a_fault() -> None:
    grammar = session()
    assert not grammar.follow([IDS["ab"], IDS["bc"]])
    assert grammar.fault == f"output token 1 ({IDS['bc']}) does not match the grammar"
    assert grammar.mask_after([]) is None
    assert not grammar.follow([IDS["ab"]])


# After an a there are more ways to go on than the matcher may hold.
_WAYS = 60
COSTLY = 'start: X | X start | A wide\nX: "x"\nA: "a"\nwide: ' + " | ".join(f"r{way}" for way in range(_WAYS)) + "\n"
COSTLY += "".join(f"r{way}: B r{way} | B\n" for way in range(_WAYS)) + 'B: "b"\n'


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._LIMITS, "max_items_in_row", 40)


@pytest.mark.usefixtures("few_items")
def test_a_branch_that_is_too_costly_leaves_the_others_alone() -> None:
    grammar = session(COSTLY)
    assert grammar.follow([IDS["x"]])
    # Visited depth first: 1, then 2, which fails with all that comes after it but for what is below 1.
    tokens = [IDS["x"], IDS["a"], IDS["b"], IDS["x"], IDS["x"]]
    parents = [0, 0, 2, 0, 1]
    masks = grammar.masks(tokens, parents)
    assert grammar.unfollowed == {2, 3, 4}
    assert (masks[[2, 3, 4]] == -1).all()
    first = {IDS["x"], IDS["a"], IDS["ab"], END}
    assert [tokens_of(masks[place]) for place in (0, 1, 5)] == [first] * 3
    # The matcher is another one, and as good as before.
    assert grammar.follow([IDS["x"]] * 2)
    assert (grammar.masks([IDS["x"]], [0]) == masks[[0, 0]]).all()
    assert not grammar.unfollowed
    assert grammar.mask_after([IDS["x"], IDS["a"]]) is None
    assert grammar.mask_after([IDS["x"]]) is not None
    assert grammar.fault is None


@pytest.mark.usefixtures("few_items")
def test_a_committed_output_that_is_too_costly_is_a_fault() -> None:
    grammar = session(COSTLY)
    followed = grammar.follow([IDS["a"]])
    if followed:
        assert (grammar.masks() == -1).all()
    assert grammar.fault is not None
    assert grammar.fault.startswith("the grammar has become too costly to follow: ")
    assert "r17" not in grammar.fault
    assert not grammar.follow([])
