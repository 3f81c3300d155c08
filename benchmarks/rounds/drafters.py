"""The drafter of measured rounds: it grows trees from recorded outputs."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Nodes of one session; columns as `RoundLoop.grow` takes them.

    Attributes:
        number: of the session.
        as_of: committed tokens that the drafter had.
        node_ids, parents, tokens, acceptances: [n]
    """

    number: int
    as_of: int
    node_ids: Sequence[int]
    parents: Sequence[int]
    tokens: Sequence[int]
    acceptances: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Trees that `ReplayDrafter` grows.

    Attributes:
        chance: that a level has the right token, if all levels above have.
        depth: levels.
        delay_ms: from a commit to the tree below it.
    """

    chance: float = 0.8
    depth: int = 6
    delay_ms: float = 1.0


class ReplayDrafter:
    """Grows trees from recorded outputs: a tree of one size below every commit. Sessions are known by their numbers.

    Args:
        records: output by number of the session, as recorded.
        options: what trees look like.
        vocab_size: bound of wrong tokens.
    """

    def __init__(self, records: Mapping[int, Sequence[int]], options: ReplayOptions, *, vocab_size: int) -> None:
        self._records, self._options, self._vocab_size = records, options, vocab_size
        self._prompts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._ids: defaultdict[int, int] = defaultdict(int)
        self._chances: dict[int, random.Random] = {}
        # Delays are equal, so growth comes in the order of commits.
        self._due: deque[tuple[int, int, int]] = deque()

    def open(self, number: int, prompt: Sequence[int], sampling: SamplingSpec) -> None:
        """Begin to grow a session."""
        self._prompts[number] = self._lengths[number] = len(prompt)
        self._ids[number] = 0
        self._chances[number] = random.Random(sampling.seed)

    def commit(self, number: int, tokens: Sequence[int], now_ns: int) -> None:
        """Note the tokens that the target has committed."""
        self._lengths[number] += len(tokens)
        self._due.append((now_ns + round(1e6 * self._options.delay_ms), number, self._lengths[number]))

    def close(self, number: int) -> None:
        """End the session."""
        self._lengths.pop(number, None)

    def take(self, now_ns: int) -> Grown | None:
        """Return growth that has come by now; None if there is no more."""
        while self._due and self._due[0][0] <= now_ns:
            _, number, length = self._due.popleft()
            if number in self._lengths and (grown := self._tree(number, length)).tokens:
                return grown
        return None

    def _tree(self, number: int, length: int) -> Grown:
        options, chance = self._options, self._chances[number]
        begin = length - self._prompts[number]
        tokens, parents, acceptances = list[int](), list[int](), list[float]()
        node_ids, first, is_right = list[int](), self._ids[number] + 1, True
        for right in self._records[number][begin : begin + options.depth]:
            is_right = is_right and chance.random() < options.chance
            tokens.append(right if is_right else (right + 1) % self._vocab_size)
            parents.append(node_ids[-1] if node_ids else 0)
            node_ids.append(first + len(node_ids))
            acceptances.append(options.chance)
        self._ids[number] += len(node_ids)
        return Grown(
            number=number,
            as_of=length,
            node_ids=node_ids,
            parents=parents,
            tokens=tokens,
            acceptances=acceptances,
        )
