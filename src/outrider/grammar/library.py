"""The library that matches grammars, which is an extra: whether it is there, and within what bounds it works.

Everything is bounded by work, not by time, so that what is refused is refused everywhere. The bounds are the library's
own where these are low enough to keep the step of a model waiting for milliseconds at most.
"""

from typing import Any

from outrider.errors import GrammarUnsupported

HINT = "install the extra: pip install 'outrider[structured]'"

_LIMITS = {
    # Of building the first states: about 50,000 a millisecond.
    "initial_lexer_fuel": 1_000_000,
    # Of one mask: about 14,000 a millisecond.
    "step_lexer_fuel": 100_000,
    # Of one mask, too: about 20,000 a millisecond.
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    # A state takes 1 to 2 kB.
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    # Messages reach those who sent the grammar: no states of the parser in them.
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or has become too costly to follow; the text says why."""


def llguidance() -> Any:
    """Return the library; GrammarUnsupported where it is not installed."""
    try:
        import llguidance as library
    except ImportError as error:
        raise GrammarUnsupported(f"structured output needs llguidance, which is not here: {HINT}") from error
    return library


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """Return an `LLMatcher` at the beginning of an output; GrammarError for a grammar that is wrong, or too large."""
    library = llguidance()
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise GrammarError(reason(matcher))
    return matcher


def reason(matcher: Any) -> str:
    """Return why a matcher failed, in one line of bounded length."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return text if len(text) <= 300 else f"{text[:297]}..."
