"""The token tree of one request's first choice, recorded while it runs: for a door that streams, or shows it."""

from collections.abc import Callable

from outrider.coordinator.generations import RunningGeneration
from outrider.coordinator.live.tap import watch
from outrider.coordinator.live.watcher import Watcher
from outrider.coordinator.session import Generation
from outrider.coordinator.tokenizer import TextTokenizer

# A door that sends lines along with its events is behind by one round at most.
_MOST_LINES = 65_536


def pieces(tokenizer: TextTokenizer | None) -> Callable[[int], bytes]:
    """What tokens stand for, by a tokenizer; without one, nothing."""
    return tokenizer.piece if tokenizer is not None else lambda token: b""


def record(generation: RunningGeneration, tokenizer: TextTokenizer | None) -> Watcher | None:
    """Watches a request that has just been submitted from its beginning; None where it has ended at once."""
    assert isinstance(generation, Generation)
    session = generation.sessions[0]
    if session.is_finished:
        return None
    return watch(session, pieces(tokenizer), max_lines=_MOST_LINES)
