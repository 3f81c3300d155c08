"""The token tree of one request's first choice, recorded while it runs: for a door that streams, or shows it."""

import contextlib
from collections.abc import Callable, Iterator

from outrider.coordinator.api.access import Caller
from outrider.coordinator.api.generations import Generations
from outrider.coordinator.live.tap import watch
from outrider.coordinator.live.watcher import Watcher
from outrider.coordinator.sessions.messages import GenerationRequest
from outrider.coordinator.sessions.tokenizer import TextTokenizer

# A door that sends lines along with its events is behind by one round at most.
_MOST_LINES = 65_536


def pieces(tokenizer: TextTokenizer | None) -> Callable[[int], bytes]:
    """What tokens stand for, by a tokenizer; without one, nothing."""
    return tokenizer.piece if tokenizer is not None else lambda token: b""


def record(generations: Generations, checked: GenerationRequest, caller: Caller) -> Watcher | None:
    """Watches a request that has just been submitted from its beginning; None where it has ended at once."""
    session = generations.live[caller.name, checked.request_id].sessions[0]
    if session.is_finished:
        return None
    return watch(session, pieces(generations.tokenizer), max_lines=_MOST_LINES)


@contextlib.contextmanager
def recording(
    generations: Generations, checked: GenerationRequest, caller: Caller, *, is_wanted: bool
) -> Iterator[Callable[[], list[str]]]:
    """Records a request while the block runs; gives a function for the lines since it was last called."""
    watcher = record(generations, checked, caller) if is_wanted else None
    if watcher is None:
        yield list
        return
    try:
        yield watcher.take
    finally:
        watcher.close()
