"""What is sent back, in the shapes of /v1/completions and of /v1/chat/completions: whole, and as chunks of a stream.

A chunk is put together from text that is the same for all of a response and the few pieces that are new, since one is
sent for every verification of every choice. Log probabilities become JSON as they come in either way: of a whole
response, all at once would be seconds in which nobody else is served.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

from outrider import __version__
from outrider.coordinator.api.http.parameters import Asked
from outrider.coordinator.sessions.messages import ChoiceResult, TokenDelta, TokenLogprobs
from outrider.coordinator.sessions.tokenizer import TextTokenizer

FINGERPRINT = f"outrider-{__version__}"
DONE = b"data: [DONE]\n\n"
# JSON has no infinity.
_LEAST_LOGPROB = -9999.0


class Format(Protocol):
    """One kind of response."""

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str) -> str:
        """The chunk before a choice's first tokens, or nothing."""
        ...

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens of choice `index` of the response."""
        ...

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Why a choice ended."""
        ...

    def usage(self, usage: str, metrics: str) -> str:
        """The chunk without choices at the end."""
        ...

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Of new tokens, as entries of the JSON lists that the format has of them; empty where there are none."""
        ...

    def whole(self, choices: Sequence["WholeChoice"], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        ...


class WholeChoice:
    """One choice as it is collected."""

    def __init__(self, prompt_token_ids: Sequence[int], echo: str) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.texts = [echo]
        self.token_ids: list[int] = []
        self.logprobs: list[Sequence[str]] = []
        self.result: ChoiceResult | None = None

    def take(self, delta: TokenDelta, logprobs: Sequence[str]) -> None:
        """Adds new tokens, with what the format makes of their log probabilities."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if any(logprobs):
            self.logprobs.append(logprobs)


class _Response:
    """What both formats have: the same head in front of every chunk, the same end."""

    _lists: Sequence[str]
    """What log probabilities are sent as, and what is null beside these lists."""
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
        self._head = f"data: {_compact(self._about)[:-1]}," + '"choices":['
        self._tail = ',"usage":null}\n\n' if asked.include_usage else "}\n\n"

    def _end(self, usage: str) -> str:
        return f',"usage":{usage}}}\n\n' if usage else self._tail

    def _ids(self, delta: TokenDelta) -> str:
        return f',"token_ids":[{",".join(map(str, delta.token_ids))}]' if self._asked.return_token_ids else ""

    def usage(self, usage: str, metrics: str) -> str:
        """The chunk without choices at the end."""
        return f'{self._head}],"usage":{usage}{metrics}}}\n\n'

    def _whole(self, choices: Sequence[str], rest: dict[str, Any]) -> str:
        return f'{_compact(self._about)[:-1]},"choices":[{",".join(choices)}],{_compact(rest)[1:]}'

    def _whole_choice(self, content: dict[str, Any], logprobs: Sequence[Sequence[str]]) -> str:
        told = "null"
        if self._asked.logprobs is not None:
            told = self._named([",".join(each) for each in zip(*logprobs, strict=True)] or [""] * len(self._lists))
        return f'{_compact(content)[:-1]},"logprobs":{told}}}'

    def _named(self, lists: Sequence[str]) -> str:
        """The lists of log probabilities, under their names."""
        named = [f'"{name}":[{each}]' for name, each in zip(self._lists, lists, strict=True)]
        return "{" + ",".join([*named, *(f'"{name}":null' for name in self._null)]) + "}"

    def _token(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.piece(token_id))


class CompletionFormat(_Response):
    """Of /v1/completions.

    Args:
        asked: what was asked for.
        model: its name.
        created: seconds of Unix time.
        tokenizer: names the tokens in log probabilities.
    """

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        super().__init__(asked, kind="text_completion", model=model, created=created, tokenizer=tokenizer)
        top = ("top_logprobs",)
        self._lists = ("tokens", "token_logprobs", "text_offset", *(top if asked.logprobs else ()))
        self._null = () if asked.logprobs else top
        # Of each choice: characters of its tokens so far, where log probabilities are sent.
        self._offsets: dict[int, int] = {}

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str) -> str:
        """The chunk before a choice's first tokens, or nothing."""
        ids = f',"prompt_token_ids":{_compact(list(prompt_token_ids))}' if self._asked.return_token_ids else ""
        if not echo and not ids:
            return ""
        start = f'{self._head}{{"index":{index},"text":{quoted(echo)},"logprobs":null'
        return f'{start},"finish_reason":null,"stop_reason":null{ids}}}]{self._tail}'

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens of choice `index` of the response."""
        logprobs = "null" if delta.logprobs is None else self._named(self.logprobs(delta, index))
        return (
            f'{self._head}{{"index":{index},"text":{quoted(delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":null,"stop_reason":null{self._ids(delta)}}}]{self._end(usage)}'
        )

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Why a choice ended."""
        return (
            f'{self._head}{{"index":{index},"text":"","logprobs":null,'
            f'"finish_reason":"{choice.finish_reason}","stop_reason":{_stop_reason(choice)}}}]{self._end(usage)}'
        )

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        return self._whole([self._choice(*each) for each in enumerate(choices)], {"usage": usage} | metrics)

    def _choice(self, index: int, choice: WholeChoice) -> str:
        assert choice.result is not None
        content: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.texts),
            "finish_reason": str(choice.result.finish_reason),
            "stop_reason": _raw_stop_reason(choice.result),
        }
        if self._asked.return_token_ids:
            content |= {"prompt_token_ids": list(choice.prompt_token_ids), "token_ids": choice.token_ids}
        return self._whole_choice(content, choice.logprobs)

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Of new tokens; `top_logprobs` is no list where none are asked for."""
        logprobs = delta.logprobs
        if logprobs is None:
            return ()
        tokens, values, best, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for place, token_id in enumerate(delta.token_ids):
            text = self._token(token_id)
            tokens.append(text)
            values.append(_finite(logprobs.token_logprobs[place]))
            best.append(self._best(logprobs, place, token_id))
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        lists = (tokens, values, offsets, best) if self._asked.logprobs else (tokens, values, offsets)
        return [_compact(each)[1:-1] for each in lists]

    def _best(self, logprobs: TokenLogprobs, place: int, chosen: int) -> dict[str, float]:
        """The best ones by their text, and the chosen one beside them where it is not among them."""
        named = dict[str, float]()
        if logprobs.top_token_ids:
            for token_id, value in zip(logprobs.top_token_ids[place], logprobs.top_logprobs[place], strict=True):
                # Of tokens that read alike the likelier one stays.
                named.setdefault(self._token(token_id), _finite(value))
        named.setdefault(self._token(chosen), _finite(logprobs.token_logprobs[place]))
        return named


class ChatFormat(_Response):
    """Of /v1/chat/completions; arguments as of `CompletionFormat`."""

    def __init__(self, asked: Asked, *, model: str, created: int, tokenizer: TextTokenizer | None) -> None:
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        super().__init__(asked, kind=kind, model=model, created=created, tokenizer=tokenizer)
        self._lists, self._null = ("content",), ("refusal",)

    def first(self, index: int, prompt_token_ids: Sequence[int], echo: str) -> str:
        """The chunk before a choice's first tokens, or nothing."""
        ids = f',"prompt_token_ids":{_compact(list(prompt_token_ids))}' if self._asked.return_token_ids else ""
        delta = '{"role":"assistant","content":""}'
        return f'{self._head}{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}]{ids}{self._tail}'

    def chunk(self, delta: TokenDelta, index: int, usage: str) -> str:
        """New tokens of choice `index` of the response."""
        logprobs = "null" if delta.logprobs is None else self._named(self.logprobs(delta, index))
        return (
            f'{self._head}{{"index":{index},"delta":{{"content":{quoted(delta.text)}}},"logprobs":{logprobs},'
            f'"finish_reason":null{self._ids(delta)}}}]{self._end(usage)}'
        )

    def last(self, choice: ChoiceResult, index: int, usage: str) -> str:
        """Why a choice ended."""
        return (
            f'{self._head}{{"index":{index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{choice.finish_reason}","stop_reason":{_stop_reason(choice)}}}]{self._end(usage)}'
        )

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any], metrics: dict[str, Any]) -> str:
        """The response that is not a stream."""
        rest: dict[str, Any] = {"usage": usage}
        if self._asked.return_token_ids:
            rest["prompt_token_ids"] = list(choices[0].prompt_token_ids)
        return self._whole([self._choice(*each) for each in enumerate(choices)], rest | metrics)

    def _choice(self, index: int, choice: WholeChoice) -> str:
        assert choice.result is not None
        content: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "finish_reason": str(choice.result.finish_reason),
            "stop_reason": _raw_stop_reason(choice.result),
        }
        if self._asked.return_token_ids:
            content["token_ids"] = choice.token_ids
        return self._whole_choice(content, choice.logprobs)

    def logprobs(self, delta: TokenDelta, index: int) -> Sequence[str]:
        """Of new tokens; there are no refusals."""
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
        return [_compact(content)[1:-1]]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token_id), "logprob": _finite(logprob), "bytes": self._bytes(token_id)}


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)


def _raw_stop_reason(choice: ChoiceResult) -> int | str | None:
    return choice.stop_token_id if choice.stop_token_id is not None else choice.stop_string


def _stop_reason(choice: ChoiceResult) -> str:
    return json.dumps(_raw_stop_reason(choice))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
