"""The forward pass of an EAGLE head or a block drafter over the rows that a drafter's pool laid out.

A row is that of a token, as a draft model's is: it reads the token and the hidden row before it. Where the target has
computed that hidden row, it is found by the target's KV slot (`Features`).

- **A head's** logits of a row say what follows its token. Below the last committed token the hidden row is the head's
  own, kept by the pool's row and entry until the tree goes (`outrider.kernels.drafting.entering`).
- **A block drafter** answers in one pass for the B positions behind the root of each session that has something new:
  committed tokens store keys and values, and the root's row is computed B times, once a position. The logits stay by
  row of the pool. A node at depth d, and the root at depth 0, has as logits those of position d and the bias by its own
  token. So a tree grows level by level, and its further levels need no pass (`read`).

Shapes: R rows, N sessions as in `outrider.kernels.pool.pack`; S rows of the pool, L rows with logits, V vocabulary, Vd
of the drafter.
"""

import torch

from outrider.engine.eagle import BlockHead, EagleHead
from outrider.engine.kv_memory import KvCaches
from outrider.engine.packed_forward import Features
from outrider.kernels.attention.slot_updates import gather_slot_rows
from outrider.kernels.drafting.entering import Entering, enter_rows
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.tree_attention import TreeAttentionBatch


class HeadInputs:
    """Features of one target, KV slots and caches that the passes of one drafter read.

    Args:
        target_table: [S, ..] int32, the KV slots of the target's rows.
        sessions: N of the largest step.
        row_len: columns of the drafter's pool's table.
        trims: whether a step is run without padding, which waits for the device.
    """

    def __init__(
        self,
        features: Features,
        target_table: torch.Tensor,
        caches: KvCaches,
        *,
        sessions: int,
        row_len: int,
        trims: bool,
    ) -> None:
        # hidden: [slots, F] of `features`.
        self.hidden, self._target_table, self._trims = features.by_slot, target_table, trims
        self.caches = {"key_cache": caches.keys[0], "value_cache": caches.values[0]}
        self.pool_rows = len(target_table)  # S
        self._key_slots = torch.full((sessions, row_len), -1, dtype=torch.int32, device=target_table.device)

    def size(self, packed: Packed) -> tuple[int | None, int]:
        """Return how many rows and sessions to compute; None for all rows, padding too."""
        if self._trims:
            return int(packed.query_start[-1]), int((packed.pool_rows >= 0).sum())
        return None, packed.pool_rows.shape[0]

    def enter(self, packed: Packed, pool: Pool, grown: torch.Tensor | None, count: int | None) -> Entering:
        """See `enter_rows`."""
        return enter_rows(packed, pool, self._target_table, self.hidden, grown, count=count)

    def key_slots(self, packed: Packed, pool: Pool, key_len: torch.Tensor) -> torch.Tensor:
        """Return the slots of the first sessions' keys, of which the first token is none: [len(key_len), row_len]."""
        slots = self._key_slots[: len(key_len)]
        gather_slot_rows(pool.table[:, 1:], packed.pool_rows[: len(key_len)], key_len, slots)
        return slots


class EagleForward:
    """The forward pass of one head; a `ForwardPass`.

    Args:
        capacity: C of the pool.
    """

    def __init__(self, head: EagleHead, inputs: HeadInputs, *, capacity: int) -> None:
        self._head, self._inputs = head, inputs
        # Of every row's root and entries; the last one is of all else.
        self._grown = inputs.hidden.new_zeros((inputs.pool_rows * (capacity + 1) + 1, head.hidden_size))

    @torch.inference_mode()
    def logits(self, packed: Packed, pool: Pool, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """Store the rows' keys, values and hidden rows, and return the wanted logits; see `PackedForward.logits`."""
        count, sessions = self._inputs.size(packed)
        if count == 0:
            return self._grown.new_zeros((len(rows), self._head.vocab_size))
        entering = self._inputs.enter(packed, pool, self._grown, count)
        key_len = entering.key_len[:sessions]
        slots = self._inputs.key_slots(packed, pool, key_len)
        hidden = self._head.forward(
            entering.hidden,
            packed.tokens[:count],
            positions=entering.positions,
            write_slots=packed.slots[:count],
            batch=TreeAttentionBatch(
                slot_table=slots,
                query_start=packed.query_start[: sessions + 1],
                tree_start=entering.tree_start[:sessions],
                prefix_len=entering.prefix_len,
                key_len=key_len,
                tree_mask=packed.tree_mask[:count],
                max_query_len=most,
                max_key_len=slots.shape[1],
            ),
            **self._inputs.caches,
        )
        self._grown.index_copy_(0, entering.places, hidden)
        return self._head.logits(hidden.index_select(0, rows))


class BlockForward:
    """The forward pass of one block drafter, and the trees that it gives; a `ForwardPass`."""

    def __init__(self, head: BlockHead, inputs: HeadInputs) -> None:
        self._head, self._inputs = head, inputs
        # The last one is that of padding.
        self._blocks = inputs.hidden.new_zeros((inputs.pool_rows + 1, head.block_size, head.spec.draft_vocab_size))

    @torch.inference_mode()
    def logits(self, packed: Packed, pool: Pool, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """Compute the block of every session with committed rows, and return the wanted logits.

        See `PackedForward.logits`.
        """
        count, sessions = self._inputs.size(packed)
        if count == 0:
            return self._blocks.new_zeros((len(rows), self._head.vocab_size))
        self._compute(packed, pool, count, sessions)
        return self.read(packed, rows)

    def _compute(self, packed: Packed, pool: Pool, count: int | None, sessions: int) -> None:
        """Keep the blocks. A function of its own: what it allocates is free again before logits are read."""
        entering = self._inputs.enter(packed, pool, None, count)
        tokens, pool_rows = packed.tokens[:count], packed.pool_rows[:sessions]
        self._head.store(
            entering.hidden,
            tokens,
            positions=entering.positions,
            write_slots=packed.slots[:count],
            **self._inputs.caches,
        )
        # A session's committed rows stand before its nodes.
        first = packed.query_start[:sessions].long().clamp(max=len(tokens) - 1)
        own = packed.tree_start[:sessions] - packed.positions[first]
        last, key_len = (first + own - 1).clamp(0, len(tokens) - 1), entering.tree_start[:sessions]
        blocks = self._head.block_logits(
            entering.hidden[last],
            tokens[last],
            positions=entering.positions[last],
            slot_table=self._inputs.key_slots(packed, pool, key_len),
            key_len=key_len,
            **self._inputs.caches,
        )
        is_new = (own > 0) & (pool_rows >= 0)
        self._blocks.index_copy_(0, torch.where(is_new, pool_rows, len(self._blocks) - 1).long(), blocks)

    @torch.inference_mode()
    def read(self, packed: Packed, rows: torch.Tensor) -> torch.Tensor:
        """Return the wanted logits of a step whose sessions all have their blocks: [L, V] of rows [L] int64."""
        pool_rows = packed.pool_rows[packed.sessions[rows].clamp(min=0)]
        # The prefix of a node ends with the root.
        depth = (packed.positions[rows] + 1 - packed.prefix_len[rows]).clamp(0, self._head.block_size - 1)
        return self._head.spread(self._blocks[pool_rows, depth] + self._head.bias(packed.tokens[rows]))
