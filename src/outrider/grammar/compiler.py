"""Grammars compiled once for a tokenizer, in a thread of their own, the latest kept.

Compiling takes from under a millisecond to some hundred of them, and a tokenizer of 128,000 tokens about a second,
once. Steps of a model do not wait for either: a session whose grammar is not ready waits, and the others go on.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.errors import GrammarUnsupported
from outrider.grammar.library import llguidance, new_matcher

_KEPT = 64
# Characters of all grammars that are kept.
_KEPT_CHARS = 4 << 20


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        read: gives the tokenizer, as the text of a tokenizer.json; called when the first grammar comes.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Future[Any]] = OrderedDict()
        self._chars = 0
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        # One thread: a second grammar of the same sender gains him nothing.
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_checkpoint(cls, folder: str | Path) -> "GrammarCompiler":
        """With the tokenizer.json of a folder."""
        return cls(lambda: (Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))

    def start(self, grammar: str, end_ids: tuple[int, ...], on_ready: Callable[[], None] | None = None) -> Future[Any]:
        """Begin to compile a grammar, unless that was done before.

        Args:
            on_ready: called when the result is there, on another thread or at once.

        Returns:
            The matcher at the beginning of an output, not to be changed; or a GrammarError or GrammarUnsupported.
        """
        with self._lock:
            future = self._compiled.get((grammar, end_ids))
            if future is not None:
                self._compiled.move_to_end((grammar, end_ids))
            else:
                future = self._submit(grammar, end_ids)
        if on_ready is not None:
            future.add_done_callback(lambda _done: on_ready())
        return future

    def compile(self, grammar: str, end_ids: tuple[int, ...]) -> Any:
        """Compile a grammar and wait for it; see `start`.

        Raises:
            GrammarError: the grammar is wrong or too large.
            GrammarUnsupported: the library is missing, or does not take the tokenizer.
        """
        return self.start(grammar, end_ids).result()

    def _submit(self, grammar: str, end_ids: tuple[int, ...]) -> Future[Any]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        future = self._compiled[grammar, end_ids] = self._threads.submit(self._compile, grammar, end_ids)
        self._chars += len(grammar)
        while len(self._compiled) > _KEPT or (self._chars > _KEPT_CHARS and len(self._compiled) > 1):
            (dropped, _), _ = self._compiled.popitem(last=False)
            self._chars -= len(dropped)
        return future

    def _compile(self, grammar: str, end_ids: tuple[int, ...]) -> Any:
        return new_matcher(self._tokenizer(end_ids), grammar)

    def _tokenizer(self, end_ids: tuple[int, ...]) -> Any:
        if end_ids not in self._tokenizers:
            library = llguidance()
            try:
                made = library.LLTokenizer(self._read(), eos_token=list(end_ids))
            except (OSError, ValueError) as error:
                raise GrammarUnsupported(f"the tokenizer cannot be used for structured output: {error}") from error
            self._tokenizers = {end_ids: made}
        return self._tokenizers[end_ids]
