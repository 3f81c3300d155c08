"""History of what a client received, and the invariant that it is checked against.

    per request and choice: the deltas, one after the other, are the output of the run without faults
    offsets, of tokens and of text, are contiguous: nothing comes twice, nothing is left out
    exactly one terminal event, and nothing behind it

A break of the stream that the client goes on from is no terminal event: it parts the history, and what comes after it
still has to continue what came before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Fault(Enum):
    """Kind of violation in a history."""

    DOUBLED = "doubled"
    LOST = "lost"
    CHANGED = "changed"
    NO_END = "no terminal event"
    TWO_ENDS = "more than one terminal event"
    AFTER_END = "something after the terminal event"
    WRONG_END = "another end than without faults"


class End(Enum):
    """Terminal events."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By the client itself."""
    REFUSED = "refused as poison"
    """Two targets were killed while they verified this request alone: the service cannot know that it was us."""


@dataclass(frozen=True, kw_only=True)
class ToldDelta:
    """Tokens and text of one choice, as they came."""

    index: int
    offset: int
    token_ids: Sequence[int]
    text: str
    text_offset: int
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The stream broke and the client asked again, naming what it had."""

    reason: str
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A terminal event; with FINISHED come the reasons and token counts of the choices."""

    end: End
    detail: str = ""
    finish_reasons: Sequence[str] = ()
    token_counts: Sequence[int] = ()
    at_s: float = 0.0


Event = ToldDelta | Broken | Ended


@dataclass(frozen=True, kw_only=True)
class ChoiceWanted:
    """A choice as it is without faults."""

    token_ids: Sequence[int]
    text: str
    finish_reason: str


@dataclass(kw_only=True)
class History:
    """Everything that one client was told of one request.

    Attributes:
        name: of the request, in reports.
        script: which request it was: its key among what is wanted.
        client: how the client behaved.
        began_s: by the monotonic clock, as all times here.
        resumes: breaks that the client went on from.
        events: in order.
    """

    name: str
    script: str
    client: str
    began_s: float = field(default_factory=time.monotonic)
    resumes: int = 0
    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """The next event."""
        self.events.append(event)

    @property
    def ended_s(self) -> float:
        """Time of the last event."""
        return self.events[-1].at_s if self.events else self.began_s

    @property
    def end(self) -> Ended | None:
        """Terminal event, if one came."""
        return next((event for event in self.events if isinstance(event, Ended)), None)

    def longest_silence_s(self, from_s: float, to_s: float) -> float:
        """Longest time without a token, of those that touch this time."""
        times = [self.began_s, *(event.at_s for event in self.events)]
        gaps = [(before, after) for before, after in itertools.pairwise(times)]
        return max((after - before for before, after in gaps if after > from_s and before < to_s), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A history that broke the invariant."""

    fault: Fault
    history: History
    message: str

    def __str__(self) -> str:
        return f"{self.history.name} ({self.history.client}, {self.history.script}): {self.fault.value}: {self.message}"


def violations_of(history: History, wanted: Sequence[ChoiceWanted]) -> list[Violation]:
    """Return a history's violations of the invariant; empty if it holds.

    Args:
        wanted: the choices of the run without faults.
    """
    return [
        Violation(fault=fault, history=history, message=message) for fault, message in _broken(history.events, wanted)
    ]


def _broken(events: Sequence[Event], wanted: Sequence[ChoiceWanted]) -> Iterator[tuple[Fault, str]]:
    token_ids: list[list[int]] = [[] for _ in wanted]
    texts = [""] * len(wanted)
    for place, event in enumerate(events):
        if isinstance(event, ToldDelta):
            if event.index >= len(wanted):
                yield Fault.CHANGED, f"choice {event.index} of {len(wanted)}"
                continue
            yield from _continued(event, len(token_ids[event.index]), len(texts[event.index].encode()))
            token_ids[event.index] += event.token_ids
            texts[event.index] += event.text
        elif isinstance(event, Ended) and (rest := events[place + 1 :]):
            kinds = ", ".join(type(other).__name__ for other in rest[:5])
            is_end = any(isinstance(other, Ended) for other in rest)
            yield Fault.TWO_ENDS if is_end else Fault.AFTER_END, f"after {event.end.value}: {kinds}"
            break
    end = next((event for event in events if isinstance(event, Ended)), None)
    if end is None:
        yield Fault.NO_END, f"{sum(map(len, token_ids))} tokens came"
    is_finished = end is not None and end.end is End.FINISHED
    for index, choice in enumerate(wanted):
        yield from _equal(f"choice {index}: token", token_ids[index], choice.token_ids, is_whole=is_finished)
        told, whole = texts[index].encode(), choice.text.encode()
        yield from _equal(f"choice {index}: byte of text", told, whole, is_whole=is_finished)
    if end is not None and end.end is End.FINISHED:
        yield from _same_end(end, wanted)
    elif end is not None and end.end is End.FAILED:
        yield Fault.WRONG_END, f"it failed: {end.detail}"


def _continued(delta: ToldDelta, tokens: int, text_bytes: int) -> Iterator[tuple[Fault, str]]:
    for what, offset, known in (("token", delta.offset, tokens), ("byte of text", delta.text_offset, text_bytes)):
        words = f"choice {delta.index}: a delta begins at {what} {offset}, {known} were there"
        if offset < known:
            yield Fault.DOUBLED, words
        elif offset > known:
            yield Fault.LOST, words


def _equal(what: str, told: Sequence[int], wanted: Sequence[int], *, is_whole: bool) -> Iterator[tuple[Fault, str]]:
    for place, (is_, should) in enumerate(zip(told, wanted, strict=False)):
        if is_ != should:
            yield Fault.CHANGED, f"{what} {place} is {is_}, {should} without faults"
            return
    if len(told) > len(wanted):
        yield Fault.DOUBLED, f"{what}s: {len(told)} came, {len(wanted)} without faults"
    elif is_whole and len(told) < len(wanted):
        yield Fault.LOST, f"{what}s: {len(told)} came, {len(wanted)} without faults"


def _same_end(end: Ended, wanted: Sequence[ChoiceWanted]) -> Iterator[tuple[Fault, str]]:
    reasons = [choice.finish_reason for choice in wanted]
    counts = [len(choice.token_ids) for choice in wanted]
    if list(end.finish_reasons) != reasons:
        yield Fault.WRONG_END, f"{', '.join(end.finish_reasons)}; {', '.join(reasons)} without faults"
    if list(end.token_counts) != counts:
        yield Fault.WRONG_END, f"{list(end.token_counts)} tokens counted, {counts} without faults"


def check_all(histories: Sequence[History], wanted: Mapping[str, Sequence[ChoiceWanted]]) -> list[Violation]:
    """The violations of many histories."""
    return [violation for history in histories for violation in violations_of(history, wanted[history.script])]
