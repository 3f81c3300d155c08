"""Workloads: conversations that are functions of seed and number, so that any process can make any of them.

A conversation is one prompt, or several turns: a turn's prompt is everything before it, the answers as they came, and
its own new part.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from outrider.models import held_out_prompts

Prompt = str | tuple[int, ...]
# Ids of special tokens are left out: they lie at the beginning of the vocabularies that are served most.
_FIRST_TOKEN = 256


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a conversation: the part of its prompt that is new."""

    prompt: Prompt
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns that follow each other, each after the answer to the one before."""

    turns: tuple[Turn, ...]
    seed: int


class Workload(Protocol):
    """Conversations by number."""

    @property
    def turns_each(self) -> int:
        """Most turns of one."""
        ...

    def conversation(self, number: int) -> Conversation:
        """The one of this number, from 0; the same whenever and wherever it is asked for."""
        ...


def request_seed(seed: int, number: int) -> int:
    """The sampling seed of a conversation."""
    return random.Random(f"request {seed} {number}").getrandbits(32)


@dataclass(frozen=True, kw_only=True)
class PythonPrompts:
    """The embedded pair's held-out prompts, in turn; the seed says with which one it begins."""

    max_new_tokens: int
    seed: int
    turns_each: int = 1

    def conversation(self, number: int) -> Conversation:
        """One prompt; with several turns, further ones follow as new parts."""
        prompts = self._prompts
        first = random.Random(f"python {self.seed}").randrange(len(prompts)) + number * self.turns_each
        turns = tuple(
            Turn(
                prompt=("\n\n" if turn else "") + prompts[(first + turn) % len(prompts)],
                max_new_tokens=self.max_new_tokens,
            )
            for turn in range(self.turns_each)
        )
        return Conversation(turns=turns, seed=request_seed(self.seed, number))

    @cached_property
    def _prompts(self) -> Sequence[str]:
        """Read once: a conversation is made when it is due, and what that takes is the client's lag."""
        return held_out_prompts()


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Random token ids; lengths are uniform within a share of their mean.

    Attributes:
        input_len: mean tokens of a prompt, beside the prefix.
        range_ratio: r in [0, 1): lengths lie in [(1 - r) mean, (1 + r) mean].
        prefix_len: tokens at the beginning that several conversations share.
        prefixes: how many such beginnings there are; conversations take them in turn.

    Raises:
        ValueError: a value out of range, with the value.
    """

    input_len: int
    output_len: int
    range_ratio: float
    vocab_size: int
    seed: int
    prefix_len: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"random_range_ratio: {self.range_ratio} given, at least 0 and less than 1 needed")
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size: {self.vocab_size} given, at least 2 needed")

    @property
    def turns_each(self) -> int:
        """One."""
        return 1

    def conversation(self, number: int) -> Conversation:
        """Return the conversation of this number: its lengths and ids."""
        draw = random.Random(f"random {self.seed} {number}")
        own = self._ids(draw, self._length(draw, self.input_len))
        turn = Turn(prompt=(*self._prefix(number), *own), max_new_tokens=self._length(draw, self.output_len))
        return Conversation(turns=(turn,), seed=request_seed(self.seed, number))

    def _prefix(self, number: int) -> tuple[int, ...]:
        draw = random.Random(f"prefix {self.seed} {number % max(1, self.prefixes)}")
        return self._ids(draw, self.prefix_len)

    def _length(self, draw: random.Random, mean: int) -> int:
        spread = int(mean * self.range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread))

    def _ids(self, draw: random.Random, count: int) -> tuple[int, ...]:
        least = min(_FIRST_TOKEN, self.vocab_size // 2)
        return tuple(draw.randrange(least, self.vocab_size) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """Conversations of a file; from its end it begins anew.

    Attributes:
        arrivals_s: a trace's times, one an entry; None where the file says nothing of time.
        shuffled: in an order that the seed says; a trace stays as it is.
    """

    entries: Sequence[tuple[Turn, ...]]
    seed: int
    arrivals_s: Sequence[float] | None = None
    shuffled: bool = False

    @property
    def turns_each(self) -> int:
        """Most turns of one."""
        return max(len(turns) for turns in self.entries)

    def conversation(self, number: int) -> Conversation:
        """The one of this number."""
        place = number % len(self.entries)
        if self.shuffled:
            place = self._order[place]
        return Conversation(turns=self.entries[place], seed=request_seed(self.seed, number))

    @cached_property
    def _order(self) -> Sequence[int]:
        """Drawn once: ShareGPT's 90,000 conversations take 30 ms, in which the client would be late."""
        return random.Random(f"file {self.seed}").sample(range(len(self.entries)), len(self.entries))
