"""Responses of /v1/completions and /v1/chat/completions, whole and streamed.

A chunk is put together from text that is the same for all of a response and the few pieces that are new, since one is
sent for every verification of every choice. Log probabilities become JSON as they come in either way: of a whole
response, all at once would be seconds in which nobody else is served.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from outrider import __version__
from outrider.coordinator.api.http.parameters import Asked
from outrider.coordinator.api.http.tool_calls import CallParser, CallPiece, call_id
from outrider.coordinator.sessions.messages import ChoiceResult, FinishReason, TokenDelta, TokenLogprobs
from outrider.coordinator.sessions.tokenizer import TextTokenizer

FINGERPRINT = f"outrider-{__version__}"
DONE = "data: [DONE]\n\n"
# JSON has no infinity.
_LEAST_LOGPROB = -9999.0


Scores = Sequence[Sequence[str]]
"""Log probabilities piece by piece, each as the JSON of a format's lists."""


class WholeChoice:
    """One choice as it is collected."""

    def __init__(self, prompt_token_ids: Sequence[int], echo: str, scores: list[Sequence[str]]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.texts = [echo]
        self.token_ids: list[int] = []
        self.logprobs = scores
        self.result: ChoiceResult | None = None

    def take(self, delta: TokenDelta, logprobs: Sequence[str]) -> None:
        """Add new tokens, with what the format makes of their log probabilities."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if any(logprobs):
            self.logprobs.append(logprobs)


class ChoicesFormat:
    """Base of completions and chats: the same head in front of every chunk, the same end."""

    _lists: Sequence[str]
    """Names of the lists of log probabilities; `_null` names the fields that are null beside them."""
    _null: Sequence[str]

    def __init__(self, asked: Asked, *, kind: str, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._about = {
            "id": asked.request_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = f"data: {compact(self._about)[:-1]}," + '"choices":['
        self._tail = ',"usage":null}\n\n' if asked.include_usage else "}\n\n"

    def end(self, usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The end of a stream."""
        told = f"{self._head}],{compact({'usage': usage} | metrics)[1:]}\n\n" if self._asked.include_usage else ""
        return told + DONE

    def failed(self, error: dict[str, Any]) -> str:
        """The end of a stream that an error has ended."""
        return f"data: {json.dumps(error)}\n\n{DONE}"

    def _piece(
        self,
        index: int,
        body: str,
        *,
        logprobs: str = "null",
        reason: str = "null",
        rest: str = "",
        about: str = "",
        usage: str = "",
    ) -> str:
        """One chunk of one choice: `rest` is more of the choice, `about` of the chunk."""
        choice = f'{{"index":{index},{body},"logprobs":{logprobs},"finish_reason":{reason}{rest}}}'
        end = f',"usage":{usage}}}\n\n' if usage else self._tail
        return f"{self._head}{choice}]{about}{end}"

    def _told_logprobs(self, delta: TokenDelta, index: int) -> str:
        return "null" if delta.logprobs is None else self._named(self.logprobs(delta, index))

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Return the log probabilities of new tokens."""
        raise NotImplementedError

    def _ids(self, delta: TokenDelta) -> str:
        return f',"token_ids":[{",".join(map(str, delta.token_ids))}]' if self._asked.return_token_ids else ""

    def _prompt_ids(self, prompt_token_ids: Sequence[int]) -> str:
        return f',"prompt_token_ids":{compact(list(prompt_token_ids))}' if self._asked.return_token_ids else ""

    def _whole(self, choices: Sequence[str], rest: dict[str, Any]) -> str:
        return f'{compact(self._about)[:-1]},"choices":[{",".join(choices)}],{compact(rest)[1:]}'

    def _whole_choice(self, content: dict[str, Any], logprobs: Scores) -> str:
        told = "null" if self._asked.logprobs is None else self._joined(logprobs)
        return f'{compact(content)[:-1]},"logprobs":{told}}}'

    def _joined(self, logprobs: Scores) -> str:
        return self._named([",".join(each) for each in zip(*logprobs, strict=True)] or [""] * len(self._lists))

    def _named(self, lists: Sequence[str]) -> str:
        """The lists of log probabilities, under their names."""
        named = [f'"{name}":[{each}]' for name, each in zip(self._lists, lists, strict=True)]
        return "{" + ",".join([*named, *(f'"{name}":null' for name in self._null)]) + "}"

    def _stop_reason(self, choice: ChoiceResult) -> int | str | None:
        """The stop token or string that the request has named; null where the model has ended its text by itself."""
        asked = self._asked.requests[0].sampling_params.stop_token_ids
        return choice.stop_token_id if choice.stop_token_id in asked else choice.stop_string

    def _token(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.piece(token_id))


class CompletionFormat(ChoicesFormat):
    """The format of /v1/completions."""

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        super().__init__(asked, kind="text_completion", model=model, created=created, tokenizer=tokenizer)
        top = ("top_logprobs",)
        self._lists = ("tokens", "token_logprobs", "text_offset", *(top if asked.logprobs else ()))
        self._null = () if asked.logprobs else top
        # Of each choice: characters of its tokens so far, where log probabilities are sent.
        self._offsets: dict[int, int] = {}

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str, scores: Scores) -> str:
        """The chunk before a choice's first tokens, or nothing."""
        ids, logprobs = self._prompt_ids(prompt_token_ids), self._joined(scores) if scores else "null"
        return self._text(index, echo, logprobs=logprobs, rest=ids) if echo or ids else ""

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens of choice `index` of the response."""
        logprobs = self._told_logprobs(delta, index)
        return self._text(index, delta.text, logprobs=logprobs, rest=self._ids(delta), usage=usage)

    def _text(self, index: int, text: str, *, logprobs: str = "null", rest: str = "", usage: str = "") -> str:
        body = f'"text":{quoted(text)}'
        return self._piece(index, body, logprobs=logprobs, rest=f',"stop_reason":null{rest}', usage=usage)

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Return the chunk with a choice's finish reason."""
        rest = f',"stop_reason":{json.dumps(self._stop_reason(choice))}'
        return self._piece(index, '"text":""', reason=f'"{choice.finish_reason}"', rest=rest, usage=usage)

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        return self._whole([self._choice(*each) for each in enumerate(choices)], {"usage": usage} | metrics)

    def _choice(self, index: int, choice: WholeChoice) -> str:
        assert choice.result is not None
        content: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.texts),
            "finish_reason": str(choice.result.finish_reason),
            "stop_reason": self._stop_reason(choice.result),
        }
        if self._asked.return_token_ids:
            content |= {"prompt_token_ids": list(choice.prompt_token_ids), "token_ids": choice.token_ids}
        return self._whole_choice(content, choice.logprobs)

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Return the log probabilities of new tokens, or of a prompt, whose first token has none."""
        logprobs = delta.logprobs
        if logprobs is None:
            return ()
        tokens, values, best, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for place, token_id in enumerate(delta.token_ids, len(logprobs.token_logprobs) - len(delta.token_ids)):
            text = self._token(token_id)
            tokens.append(text)
            values.append(None if place < 0 else _finite(logprobs.token_logprobs[place]))
            best.append(None if place < 0 else self._best(logprobs, place, token_id))
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        lists = (tokens, values, offsets, best) if self._asked.logprobs else (tokens, values, offsets)
        return [compact(each)[1:-1] for each in lists]

    def _best(self, logprobs: TokenLogprobs, place: int, chosen: int) -> dict[str, float]:
        """The best ones by their text, and the chosen one beside them where it is not among them."""
        named = dict[str, float]()
        if logprobs.top_token_ids:
            for token_id, value in zip(logprobs.top_token_ids[place], logprobs.top_logprobs[place], strict=True):
                # Of tokens that read alike the likelier one stays.
                named.setdefault(self._token(token_id), _finite(value))
        named.setdefault(self._token(chosen), _finite(logprobs.token_logprobs[place]))
        return named


class ChatFormat(ChoicesFormat):
    """Format of /v1/chat/completions; arguments as of `CompletionFormat`."""

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        super().__init__(asked, kind=kind, model=model, created=created, tokenizer=tokenizer)
        self._lists, self._null = ("content",), ("refusal",)
        # Of each choice whose model may call functions.
        self._parsers: dict[int, CallParser] = {}

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str, scores: Scores) -> str:
        """The chunk before a choice's first tokens, or nothing."""
        del echo, scores
        body = '"delta":{"role":"assistant","content":""}'
        return self._piece(index, body, about=self._prompt_ids(prompt_token_ids))

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens of choice `index` of the response; nothing where they are not told yet."""
        told = f'{{"content":{quoted(delta.text)}}}'
        if self._asked.tools is not None:
            parser = self._parsers.setdefault(index, CallParser(self._asked.tools))
            pieces = parser.push(delta.text)
            if not pieces and delta.logprobs is None and not usage and not self._asked.return_token_ids:
                return ""
            told = _delta(pieces)
        logprobs = self._told_logprobs(delta, index)
        return self._piece(index, f'"delta":{told}', logprobs=logprobs, rest=self._ids(delta), usage=usage)

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Return the chunk with a choice's finish reason."""
        parser, before = self._parsers.get(index), ""
        if parser is not None and (pieces := parser.push("", is_last=True)):
            before = self._piece(index, f'"delta":{_delta(pieces)}')
        reason, rest = self._reason(choice, parser), f',"stop_reason":{json.dumps(self._stop_reason(choice))}'
        return before + self._piece(index, '"delta":{}', reason=f'"{reason}"', rest=rest, usage=usage)

    def _reason(self, choice: ChoiceResult, parser: CallParser | None) -> str:
        is_call = parser is not None and parser.calls > 0 and parser.is_free
        return "tool_calls" if is_call and choice.finish_reason is FinishReason.STOP else choice.finish_reason

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        rest: dict[str, Any] = {"usage": usage}
        if self._asked.return_token_ids:
            rest["prompt_token_ids"] = list(choices[0].prompt_token_ids)
        return self._whole([self._choice(*each) for each in enumerate(choices)], rest | metrics)

    def _choice(self, index: int, choice: WholeChoice) -> str:
        assert choice.result is not None
        text, parser = "".join(choice.texts), None
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._asked.tools is not None:
            parser = CallParser(self._asked.tools)
            content, calls = parser.whole(text)
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
        content = {
            "index": index,
            "message": message,
            "finish_reason": self._reason(choice.result, parser),
            "stop_reason": self._stop_reason(choice.result),
        }
        if self._asked.return_token_ids:
            content["token_ids"] = choice.token_ids
        return self._whole_choice(content, choice.logprobs)

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Return the log probabilities of new tokens; there are no refusals."""
        logprobs, content = delta.logprobs, []
        if logprobs is None:
            return ()
        for place, token_id in enumerate(delta.token_ids):
            entry = self._entry(token_id, logprobs.token_logprobs[place])
            best: list[dict[str, Any]] = []
            if self._asked.logprobs and logprobs.top_token_ids:
                pairs = zip(logprobs.top_token_ids[place], logprobs.top_logprobs[place], strict=True)
                best = [self._entry(other, value) for other, value in pairs]
            content.append(entry | {"top_logprobs": best})
        return [compact(content)[1:-1]]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token_id), "logprob": _finite(logprob), "bytes": self._bytes(token_id)}


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)


def _delta(pieces: Sequence[CallPiece]) -> str:
    """A message's delta: the text that is new, and what is new of calls."""
    content, calls = "".join(piece.content for piece in pieces), dict[int, dict[str, Any]]()
    for piece in pieces:
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            calls[piece.call] = {"index": piece.call, "id": call_id(), "type": "function", "function": function}
        if piece.arguments:
            call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.arguments
    return compact(({"content": content} if content else {}) | ({"tool_calls": list(calls.values())} if calls else {}))


def compact(value: Any) -> str:
    """JSON without white space."""
    return json.dumps(value, separators=(",", ":"))
