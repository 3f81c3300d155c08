"""What fake targets emit and fake drafts guess: functions of the seed and of a token's path, never of the time.

The token at position p of session s is h(seed, s, p) mod V, for a hash h. The same hash says at which rank a draft has
that token below the true path: rank r with the rate of r, none with what is left. So a draft's estimates are exactly
calibrated, and every worker, in whatever order it is asked, says the same. Drafts that are not quite the same model
have luck of their own at some positions: other ranks, and other tokens where they are wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

VOCAB_SIZE = 32_000
_MASK = (1 << 64) - 1
# Further words of a position's hash: which luck a draft has there, and each draft's luck.
_KINSHIP, _LUCKS = 1 << 32, 1 << 33


def mix(state: int, value: int) -> int:
    """A 64-bit hash of both (the finaliser of splitmix64, after a step of its sequence)."""
    word = (state * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _MASK
    return word ^ word >> 31


def share(word: int) -> float:
    """A 64-bit word as a number in [0, 1)."""
    return (word >> 11) * 2.0**-53


@dataclass(frozen=True)
class Guess:
    """A child that a draft proposes: `path_hash` is that of its path, None on the true path."""

    token: int
    acceptance: float
    path_hash: int | None


class PathModel:
    """A target and its drafts.

    Args:
        rank_rates: [k] chance of each rank, as in `Settings`.
        spread: as in `Settings`.
        draft: number of the draft that guesses.
        kinship: share of the positions at which it has the luck of draft 0.
        vocab_size: tokens that there are.
    """

    def __init__(
        self,
        *,
        seed: int,
        rank_rates: Sequence[float],
        spread: float,
        draft: int = 0,
        kinship: float = 1.0,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._seed = mix(seed, 0)
        self._vocab_size = vocab_size
        self._draft, self._kinship = draft, kinship
        first = rank_rates[0]
        self._rates: list[list[float]] = []
        for moved in (first - spread, first + spread):
            scale = (1 - moved) / (1 - first) if first < 1 else 0.0
            self._rates.append([moved, *(rate * scale for rate in rank_rates[1:])])
        self._cumulative = [list(accumulate(rates)) for rates in self._rates]

    def _hash(self, session: int, position: int) -> int:
        return mix(mix(self._seed, session), position)

    def token(self, session: int, position: int) -> int:
        """What the target emits there."""
        return self._hash(session, position) % self._vocab_size

    def _luck_of(self, path_hash: int) -> int:
        """The draft whose luck is this one's at the position."""
        if not self._draft or self._kinship >= 1 or share(mix(path_hash, _KINSHIP)) < self._kinship:
            return 0
        return self._draft

    def rank(self, session: int, position: int) -> int | None:
        """The draft's rank of that token, from 0; None: it does not propose it."""
        path_hash = self._hash(session, position)
        luck = share(mix(path_hash, 1 + _LUCKS * self._luck_of(path_hash)))
        for rank, bound in enumerate(self._cumulative[path_hash >> 63]):
            if luck < bound:
                return rank
        return None

    def guesses(self, session: int, position: int, path_hash: int | None) -> list[Guess]:
        """A draft's children for a position, best first.

        Args:
            path_hash: of their parent: None on the true path.
        """
        if path_hash is None:
            true_hash = self._hash(session, position)
            right, base, rates = (
                self.rank(session, position),
                true_hash % self._vocab_size,
                self._rates[true_hash >> 63],
            )
        else:
            true_hash = right = None
            base, rates = path_hash % self._vocab_size, self._rates[path_hash >> 63]
        # Drafts with different luck are wrong with different tokens.
        first = 1 + len(rates) * self._luck_of(path_hash or true_hash or 0)
        guesses = []
        for rank, rate in enumerate(rates):
            if rank == right:
                guesses.append(Guess(base, rate, None))
            else:
                token = (base + first + rank) % self._vocab_size
                guesses.append(Guess(token, rate, mix(path_hash or true_hash or 0, 1 + first + rank)))
        return guesses

    def walk(
        self, session: int, length: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """What a target says of one tree: (accepted node numbers, emitted tokens).

        Args:
            length: committed tokens.
            tokens: [n] of the nodes.
            parents: [n] as numbered by `outrider.tree.parent_numbers`.
        """
        numbers = {pair: number for number, pair in enumerate(zip(parents, tokens, strict=True), start=1)}
        accepted: list[int] = []
        emitted = [self.token(session, length)]
        while (node := numbers.get((accepted[-1] if accepted else 0, emitted[-1]))) is not None:
            accepted.append(node)
            emitted.append(self.token(session, length + len(emitted)))
        return accepted, emitted
