"""A model's forward pass over the rows that a pool's `pack` laid out.

Where several ranks share the model, rank 0 alone has the pool: the packed rows and their sessions' slots are broadcast
as part of the pass. `lead` tells the others what to run, a captured graph by its number.

In deterministic mode the bits of a row's logits depend on its session's tokens up to it alone. The decoder's products
have one order of sums for any number of rows, attention splits the keys of every session at the same places, and a row
of a tree reads its own path behind its prefix, as if the path had been decoded one token at a time.

Shapes: R rows, N sessions, W mask words as in `outrider.kernels.pool.pack`; L rows with logits, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.graph_memory import GraphMemory
from outrider.engine.kv_memory import KvCaches
from outrider.engine.tensor_parallel_ranks import Ranks
from outrider.kernels.attention.slot_updates import gather_paths, gather_slot_rows, store_positions
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.tree_attention import TreeAttentionBatch

# In deterministic mode: keys of a split, most splits of a session, and rows of a session at least, from which on the
# shape of attention's tiles depends on them no more.
_FIXED_SPLIT_KEYS, _MOST_FIXED_SPLITS, _FIXED_QUERY_LEN = 1024, 16, 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """Hidden states of a model by the KV slot of their row, for a head that drafts from them."""

    layers: tuple[int, ...]  # where they are read, as in `DecoderInputs.feature_layers`
    # [T, F] of these layers, side by side, to the [T, N'] that the head reads.
    fuse: Callable[[torch.Tensor], torch.Tensor]
    by_slot: torch.Tensor  # [num_slots + 1, N'], written by every pass; the last row is that of padding


class ForwardPass(Protocol):
    """A model, as a step uses it; `PackedForward` is one."""

    def logits(self, packed: Packed, pool: Pool, rows: torch.Tensor, *, most: int) -> torch.Tensor:
        """See `PackedForward.logits`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackedShape:
    """Shape of a pass, as another rank has to know it."""

    rows: int  # R
    sessions: int  # N
    mask_words: int  # W
    lines: int  # L, the first rows
    most: int  # bound of the rows of one session
    # Number of the graph that is captured, or run if it has been; None for a pass without one.
    graph: int | None = None
    count: int | None = None  # rows without padding, of a pass that computes none


class PackedForward:
    """The forward pass of one model with its caches.

    Args:
        caches: its KV, written.
        sessions: N of the largest step.
        row_len: columns of the pool's table.
        ranks: the processes that share the model; one that follows runs what `follow` is given.
        fixed: deterministic mode.
        trims: whether a step is run without padding, which waits for the device to tell how large it is; otherwise
            launches depend on its bucket alone.
        features: written by every pass of this rank; None where no head reads them.
    """

    def __init__(
        self,
        decoder: Decoder,
        caches: KvCaches,
        *,
        sessions: int,
        row_len: int,
        ranks: Ranks,
        fixed: bool = False,
        trims: bool = False,
        features: Features | None = None,
    ) -> None:
        self._decoder, self._caches, self._trims, self.ranks = decoder, caches, trims, ranks
        self._features = features
        self.dtype = decoder.weights.embedding.dtype
        split_keys = max(_FIXED_SPLIT_KEYS, -(-row_len // _MOST_FIXED_SPLITS))
        self._split_keys = split_keys if fixed else None
        # Of a rank that follows. What stands beside a graph is no part of their memory, but read and written by it.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Packed, torch.Tensor]] = {}
        self._graph_memory: GraphMemory | None = None
        # Attention reads it within the step, so all buckets share it.
        self._slots = torch.full((sessions, row_len), -1, dtype=torch.int32, device=caches.positions.device)
        self._windowed = any(layer.window for layer in decoder.spec.layers)

    @torch.inference_mode()
    def logits(
        self, packed: Packed, pool: Pool, rows: torch.Tensor, *, most: int, count: int | None = None
    ) -> torch.Tensor:
        """Store the rows' keys and values, and return the wanted logits [L, V] in the model's dtype.

        Args:
            packed: the step.
            pool: whose step it is, not changed since `pack`.
            rows: [L] int64, rows of the step; with several ranks the first ones, in order.
            most: bound of the rows of one session.
            count: rows of the step without padding; where it is not known, padding takes part.
        """
        table = pool.table
        if self._trims:
            count = int(packed.query_start[-1]) if count is None else count
            if not count:
                return torch.zeros((len(rows), self._decoder.spec.vocab_size), dtype=self.dtype, device=table.device)
            sessions = int((packed.pool_rows >= 0).sum())
            slots = table[packed.pool_rows[:sessions].long(), : int(packed.key_len[:sessions].max())]
        else:
            slots = self._slots[: packed.pool_rows.shape[0]]
            gather_slot_rows(table, packed.pool_rows, packed.key_len, slots)
        return self._decode(packed, slots, rows, most=most, count=count)

    @contextmanager
    def lead(
        self, packed: Packed, *, lines: int, most: int, graph: int | None = None, count: int | None = None
    ) -> Iterator[None]:
        """Have the other ranks run the next pass, which is run within what is returned.

        Args:
            graph: see `PackedShape`.

        Raises:
            WorkerUnavailable: another rank was lost; also as it is left.
        """
        # A rank that stands still reads no commands, and its socket does not hold any number of them.
        with self.ranks.guard():
            if self.ranks.world_size > 1:
                rows, mask_words = packed.tree_mask.shape
                sessions = packed.pool_rows.shape[0]
                shape = PackedShape(
                    rows=rows,
                    sessions=sessions,
                    mask_words=mask_words,
                    lines=lines,
                    most=most,
                    graph=graph,
                    count=count,
                )
                self.ranks.lead("packed", shape)
            yield

    @torch.inference_mode()
    def follow(self, shape: PackedShape) -> None:
        """Run what rank 0 runs."""
        if shape.graph in self._graphs:
            self._graphs[shape.graph][0].replay()
            return
        device = self._caches.positions.device
        packed = Packed.of_shape(
            rows=shape.rows,
            sessions=shape.sessions,
            mask_words=shape.mask_words,
            scrap_slot=self._caches.positions.shape[0],
            device=device,
        )
        slots, rows = self._slots[: shape.sessions], torch.arange(shape.lines, device=device)

        def run() -> None:
            self._decode(packed, slots, rows, most=shape.most, count=shape.count)

        if shape.graph is None:
            run()
        else:
            self._graph_memory = self._graph_memory or GraphMemory(device)
            self._graphs[shape.graph] = self._graph_memory.capture(run), packed, rows

    def _decode(
        self, packed: Packed, slots: torch.Tensor, rows: torch.Tensor, *, most: int, count: int | None
    ) -> torch.Tensor:
        for words in (packed.words, slots):
            self.ranks.broadcast(words)
        # `None` is all of them.
        positions, write_slots, tree_mask = packed.positions[:count], packed.slots[:count], packed.tree_mask[:count]
        if self._windowed:
            store_positions(self._caches.positions, write_slots, positions)
        sessions = len(slots)
        tree_start, key_len = packed.tree_start[:sessions], packed.key_len[:sessions]
        is_fixed, paths = self._split_keys is not None, None
        if is_fixed:
            paths = torch.empty((tree_mask.shape[0], 64 * tree_mask.shape[1]), dtype=torch.int32, device=slots.device)
            gather_paths(slots, packed.sessions[:count], tree_start, key_len, tree_mask, paths)
        features, wanted = self._features, None
        if features is not None:
            width = len(features.layers) * self._decoder.spec.hidden_size
            wanted = features.by_slot.new_empty((len(positions), width))
        inputs = DecoderInputs(
            token_ids=packed.tokens[:count],
            positions=positions,
            write_slots=write_slots,
            batch=TreeAttentionBatch(
                slot_table=slots,
                query_start=packed.query_start[: sessions + 1],
                tree_start=tree_start,
                prefix_len=packed.prefix_len[:count],
                key_len=key_len,
                tree_mask=tree_mask,
                max_query_len=max(most, _FIXED_QUERY_LEN) if is_fixed else most,
                max_key_len=slots.shape[1],
                positions=positions,
                slot_positions=self._caches.positions,
                split_keys=self._split_keys,
                paths=paths,
            ),
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
            feature_layers=() if features is None else features.layers,
            features=wanted,
        )
        hidden = self._decoder.forward(inputs)
        if features is not None and wanted is not None:
            features.by_slot.index_copy_(0, write_slots.long(), features.fuse(wanted))
        return self._decoder.logits(hidden, rows) if len(rows) else hidden.new_empty((0, self._decoder.spec.vocab_size))
