"""Tokens to text, one choice at a time: no broken UTF-8 goes out, and nothing of a stop string leaks.

    tokens ──> bytes ──> whole characters ──> stop strings ──> text that may go out
                          (unfinished ones      (what may begin one
                           wait)                 waits)

Everything is decided token by token, so it does not matter how tokens are grouped into pushes.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.coordinator.sessions.tokenizer import TextTokenizer

# An unfinished character has at most three bytes: more of the prompt cannot matter.
_CONTEXT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StreamedText:
    """Text released by one push.

    Attributes:
        text: may be sent now, after all that was sent before.
        consumed: tokens of the push that are kept: all, or those up to the one that completes a stop string.
        stop_string: the stop string that ended the text, if one did.
    """

    text: str
    consumed: int
    stop_string: str | None = None


class TextStream:
    """The text of one choice as its tokens arrive.

    The text of all pushes and of the final flush together is what the tokenizer's own decoder makes of prompt and
    kept tokens, less the prompt's; special tokens are left out, bytes that are no UTF-8 read as U+FFFD. With a stop
    string it ends before that. Of several the one that is complete first counts, of those complete at the same
    character the longest. Amortised O(1) a token.

    A resumed choice pushes the tokens that the client has already got first.

    Args:
        stop: stop strings, none of them empty.

    Attributes:
        stop_string: that ended the text, once one has.
        text_bytes: UTF-8 bytes of all text let out so far.

    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, *, stop: Sequence[str] = (), prompt_token_ids: Sequence[int] = ()
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._prefixes = {string[:length] for string in self._stop for length in range(1, len(string))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._at_start = not self._take_context(prompt_token_ids)
        self.stop_string: str | None = None
        self.text_bytes = 0

    def push(self, token_ids: Sequence[int]) -> StreamedText:
        """Take the next tokens. After a stop string nothing more is kept."""
        if self._tokenizer is None:
            return StreamedText(text="", consumed=len(token_ids))
        released: list[str] = []
        consumed = 0
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            consumed += 1
            new = self._utf8.decode(self._piece(self._tokenizer, token_id))
            if new:
                released.append(self._pass_stop_strings(new))
        return self._let_out("".join(released), consumed)

    def flush(self) -> str:
        """At the end without a stop string: all that was held back, an unfinished character as U+FFFD."""
        if self.stop_string is not None:
            return ""
        rest = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return self._let_out(rest, 0).text

    def _let_out(self, text: str, consumed: int) -> StreamedText:
        self.text_bytes += len(text.encode("utf-8"))
        return StreamedText(text=text, consumed=consumed, stop_string=self.stop_string)

    def _piece(self, tokenizer: TextTokenizer, token_id: int) -> bytes:
        piece = tokenizer.piece(token_id)
        if self._at_start and piece:
            self._at_start = False
            if tokenizer.leading_space_dropped(token_id):
                return piece[1:]
        return piece

    def _pass_stop_strings(self, new: str) -> str:
        """Take new characters; return those that may go out."""
        text = self._held + new
        if not self._stop:
            return text
        # A stop string cannot begin before the held text: whatever may begin one is held.
        ends = [(start + len(string), start, string) for string in self._stop if (start := text.find(string)) >= 0]
        if ends:
            _, start, self.stop_string = min(ends)
            self._held = ""
            return text[:start]
        keep = min(self._longest_prefix, len(text))
        while keep and text[-keep:] not in self._prefixes:
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _take_context(self, prompt_token_ids: Sequence[int]) -> bool:
        """Bring the decoder to the prompt's end; return whether the prompt has any text."""
        if self._tokenizer is None:
            return False
        context = b""
        for token_id in reversed(prompt_token_ids):
            context = self._tokenizer.piece(token_id) + context
            if len(context) >= _CONTEXT_BYTES:
                break
        self._utf8.decode(context)
        return bool(context)
