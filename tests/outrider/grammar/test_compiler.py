"""Grammars are compiled once, off whatever thread asks, and not all of them are kept."""

import sys
import threading

import pytest

from outrider.errors import GrammarUnsupported
from outrider.grammar import compiler
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.library import GrammarError
from outrider.models import embedded_target_path


def grammar(number: int) -> str:
    return f'start: "{number}"'


@pytest.fixture
def library() -> None:
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")


@pytest.mark.usefixtures("library")
def test_what_was_asked_for_lately_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_KEPT", 2)
    grammars = GrammarCompiler.of_checkpoint(embedded_target_path())
    first, second = (grammars.start(grammar(number), (0,)) for number in (1, 2))
    assert grammars.start(grammar(1), (0,)) is first
    assert grammars.start(grammar(1), (5,)) is not first
    # The second was the oldest.
    assert grammars.start(grammar(1), (0,)) is first
    assert grammars.start(grammar(2), (0,)) is not second
    first.result()


@pytest.mark.usefixtures("library")
def test_large_grammars_are_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_KEPT_CHARS", 40)
    grammars = GrammarCompiler.of_checkpoint(embedded_target_path())
    first = grammars.start(grammar(1), (0,))
    last = grammars.start(grammar(2) + " " * 60, (0,))
    assert grammars.start(grammar(2) + " " * 60, (0,)) is last
    assert grammars.start(grammar(1), (0,)) is not first


@pytest.mark.usefixtures("library")
def test_whoever_waits_is_told() -> None:
    grammars, told = GrammarCompiler.of_checkpoint(embedded_target_path()), threading.Event()
    future = grammars.start(grammar(1), (0,), told.set)
    assert told.wait(60)
    assert future.done()
    again = threading.Event()
    grammars.start(grammar(1), (0,), again.set)
    assert again.is_set()


@pytest.mark.usefixtures("library")
def test_errors_are_kept_too() -> None:
    grammars = GrammarCompiler.of_checkpoint(embedded_target_path())
    for _ in range(2):
        with pytest.raises(GrammarError, match="unknown name"):
            grammars.compile("start: nothing", (0,))


@pytest.mark.usefixtures("library")
def test_a_tokenizer_that_is_none() -> None:
    with pytest.raises(GrammarUnsupported, match="cannot be used for structured output"):
        GrammarCompiler(lambda: "{}").compile(grammar(1), (0,))
    with pytest.raises(GrammarUnsupported, match=r"tokenizer\.json"):
        GrammarCompiler.of_checkpoint("/nowhere").compile(grammar(1), (0,))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarUnsupported, match=r"pip install 'outrider\[structured\]'"):
        GrammarCompiler.of_checkpoint(embedded_target_path()).compile(grammar(1), (0,))
