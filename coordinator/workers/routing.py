"""Choice of a session's target: the one with the longest known prefix, unless it is much busier.

A target keeps the KV of prompts it has seen (its prefix cache), so a session that begins like an earlier one starts
sooner where that one ran. What a target has is not asked for but remembered: the prompts that were sent there, cut into
blocks, each known by the hash of all tokens up to its end.

    target = argmax shared prefix   over targets with  load <= least load + slack * shared / length

so a session with nothing in common goes where there is least to do, and the more it shares the more it puts up with.
Pure: no clock, nothing of the wire.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.coordinator.workers.target_peer import TargetPeer

# Tokens a block. Shorter beginnings than this are not worth a detour.
BLOCK_TOKENS = 32
# Of a prompt so many blocks are looked at: what decides is how it begins.
MOST_BLOCKS = 128
# Blocks that are remembered, about 200 bytes each.
MOST_REMEMBERED = 50_000
# Targets that are remembered of a block, those it was sent to last: targets that are gone make way by and by.
_MOST_HOLDERS = 8
# A session that shares its whole prompt goes to a target that has up to this share of its places more in use.
SLACK = 0.25


class PrefixRouter:
    """Chooses targets and remembers what it chose.

    Args:
        most_remembered: blocks; beyond it those that were used longest ago are forgotten.
    """

    def __init__(self, *, most_remembered: int = MOST_REMEMBERED) -> None:
        self._most_remembered = most_remembered
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        """Hash of a beginning -> ids of the targets that were sent it."""

    def choose(self, token_ids: Sequence[int], targets: "Sequence[TargetPeer]") -> "TargetPeer":
        """The target for a session, which is remembered there from now on.

        Args:
            targets: those with room, at least one.
        """
        keys = block_keys(token_ids)
        shared = self._shared_blocks(keys, {target.worker_id for target in targets})
        least = min(_load(target) for target in targets)
        fitting = [
            target
            for target in targets
            if _load(target) <= least + SLACK * shared[target.worker_id] / max(1, len(keys))
        ]
        chosen = max(fitting, key=lambda target: (shared[target.worker_id], -_load(target)))
        self._remember(keys, chosen.worker_id)
        return chosen

    def _shared_blocks(self, keys: Sequence[int], worker_ids: set[str]) -> dict[str, int]:
        """Blocks of the beginning that each target was sent before."""
        shared = dict.fromkeys(worker_ids, 0)
        for depth, key in enumerate(keys):
            # A target without a block has none behind it either, or has them no more.
            following = [own for own in self._holders.get(key, ()) if shared.get(own) == depth]
            if not following:
                break
            for own in following:
                shared[own] += 1
        return shared

    def _remember(self, keys: Sequence[int], worker_id: str) -> None:
        # The last first: of a beginning that is half forgotten, the first half is of use.
        for key in reversed(keys):
            others = [own for own in self._holders.get(key, ()) if own != worker_id]
            self._holders[key] = (worker_id, *others[: _MOST_HOLDERS - 1])
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_remembered:
            self._holders.popitem(last=False)


def block_keys(token_ids: Sequence[int]) -> list[int]:
    """[blocks] of each whole block, the hash of all tokens up to its end."""
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(token_ids) // BLOCK_TOKENS, MOST_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *token_ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


def _load(target: "TargetPeer") -> float:
    """Share of its places in use."""
    used = len(target.sessions)
    return used / max(1, used + target.room)
