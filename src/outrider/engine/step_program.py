"""What the device does in a step, from its bytes to the accepted paths: the program that a bucket's graph captures.

    slot tables -> embeddings, layers, last norm -> logits of the wanted rows -> choices -> walks

Every launch depends on the bucket alone.

Shapes: as in `outrider.engine.step_buffers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.buckets import Bucket
from outrider.engine.decoder import Decoder, DecoderInputs
from outrider.engine.step_buffers import StepLayout
from outrider.kernels.slot_updates import gather_slot_rows, store_positions, update_slot_table
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.kernels.verify_coupled import verify_coupled

# Keys of a split in deterministic mode: as many for every step, whatever else is in it.
_FIXED_SPLIT_KEYS = 1024
# Where the shape of a tile follows from the most rows of a session, at least these make it the largest.
_FIXED_QUERY_LEN = 64
# The arrays of a step that say how each row chooses, in the operators' order.
_SAMPLING = ("seeds", "choice_positions", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True, eq=False)
class KvCaches:
    """Keys and values of all layers, and which position the token in each slot has.

    Attributes:
        keys, values: per layer [num_slots, Hkv, D].
        positions: [num_slots] int32.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """Where a program leaves its results.

    Attributes:
        logits: [R, V] in the model's dtype; None where no row's are wanted.
        answer: int32: predictions [R], paths [S, N], accepted nodes [S] where trees are verified; else empty.
        features: [T, F] hidden states of the layers that are tapped; None where none are.
    """

    logits: torch.Tensor | None
    answer: torch.Tensor
    features: torch.Tensor | None = None


class StepProgram:
    """A model with its caches and its copy of the slot table.

    Args:
        decoder: the model.
        caches: its KV.
        max_rows: rows of the slot table.
        row_len: their length.
        fixed: one order of every sum, whatever else is in a step.
    """

    def __init__(self, decoder: Decoder, caches: KvCaches, *, max_rows: int, row_len: int, fixed: bool) -> None:
        self._decoder, self._caches, self._fixed = decoder, caches, fixed
        self.device = caches.positions.device
        self._table = torch.full((max_rows, row_len), -1, dtype=torch.int32, device=self.device)
        # What attention reads of a step; it need not outlive the step, so all buckets share it.
        self._gathered = torch.full((max_rows * row_len,), -1, dtype=torch.int32, device=self.device)
        self._windowed = any(layer.window for layer in decoder.spec.layers)
        self._taps: tuple[int, ...] = ()
        # Read before the next step begins, so all buckets share it.
        self._features = torch.empty((0, 0), dtype=decoder.weights.embedding.dtype, device=self.device)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._decoder.spec.vocab_size

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return self._decoder

    def tap(self, taps: tuple[int, ...], *, rows: int) -> None:
        """From now on steps leave the hidden states after these layers in their output.

        Args:
            taps: as `DecoderInputs.feature_layers`.
            rows: of the largest step that is captured.
        """
        self._taps = taps
        size = (rows, len(taps) * self._decoder.spec.hidden_size)
        self._features = torch.zeros(size, dtype=self._features.dtype, device=self.device)

    @property
    def features(self) -> torch.Tensor:
        """[rows, F] where steps of so many rows leave the tapped hidden states, each over the last one's."""
        return self._features

    def slot_rows(self, updates: Sequence[torch.Tensor], rows: torch.Tensor, key_len: torch.Tensor) -> torch.Tensor:
        """The slots of sessions that no step is about, [S, row length]; valid until the next step.

        Args:
            updates: three [U], row, column and slot of entries that have changed; -1 for none.
            rows: [S] of the slot table; -1 for none.
            key_len: [S] slots of each.
        """
        update_slot_table(self._table, *updates)
        sessions, row_len = rows.shape[0], self._table.shape[1]
        slot_table = self._gathered[: sessions * row_len].view(sessions, row_len)
        gather_slot_rows(self._table, rows, key_len, slot_table)
        return slot_table

    @torch.inference_mode()
    def update_slots(self, updates: torch.Tensor) -> None:
        """Writes [3, n] entries (row, column, slot) that found no place in a step's bytes."""
        update_slot_table(self._table, *updates)

    @torch.inference_mode()
    def run(self, bucket: Bucket, data: torch.Tensor, after_layer: Callable[[int], object] | None = None) -> StepOutput:
        """Runs a step.

        Args:
            bucket: of the step.
            data: [nbytes] uint8 on the device.
            after_layer: called with the number of layers so far, after each.
        """
        arrays = StepLayout.of(bucket).tensors(data)
        inputs = self.inputs(bucket, arrays)
        hidden = self._decoder.forward(inputs, after_layer)
        answer = torch.zeros(answer_len(bucket), dtype=torch.int32, device=self.device)
        if not bucket.logit_rows:
            return StepOutput(logits=None, answer=answer, features=inputs.features)
        logits = self._decoder.logits(hidden, arrays["logit_rows"])
        if bucket.nodes:
            _verify(bucket, logits, arrays, answer)
        return StepOutput(logits=logits, answer=answer, features=inputs.features)

    def inputs(self, bucket: Bucket, arrays: dict[str, torch.Tensor]) -> DecoderInputs:
        """Brings the slot tables up to date, and says what the layers are to compute."""
        if bucket.sessions * bucket.keys <= len(self._gathered):
            slot_table = self._gathered[: bucket.sessions * bucket.keys].view(bucket.sessions, bucket.keys)
        else:
            slot_table = torch.empty((bucket.sessions, bucket.keys), dtype=torch.int32, device=self.device)
        update_slot_table(self._table, arrays["update_rows"], arrays["update_columns"], arrays["update_slots"])
        gather_slot_rows(self._table, arrays["rows"], arrays["key_len"], slot_table)
        if bucket.paths:
            update_slot_table(slot_table, arrays["path_rows"], arrays["path_columns"], arrays["path_slots"])
        if self._windowed:
            store_positions(self._caches.positions, arrays["write_slots"], arrays["positions"])
        batch = TreeAttentionBatch(
            slot_table=slot_table,
            query_start=arrays["query_start"],
            tree_start=arrays["tree_start"],
            prefix_len=arrays["prefix_len"],
            key_len=arrays["key_len"],
            tree_mask=arrays["tree_mask"],
            max_query_len=max(bucket.query_len, _FIXED_QUERY_LEN) if self._fixed else bucket.query_len,
            max_key_len=bucket.keys,
            positions=arrays["positions"],
            slot_positions=self._caches.positions,
            split_keys=_FIXED_SPLIT_KEYS if self._fixed else None,
        )
        return DecoderInputs(
            token_ids=arrays["token_ids"],
            positions=arrays["positions"],
            write_slots=arrays["write_slots"],
            batch=batch,
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
            feature_layers=self._taps,
            features=self._features_of(bucket.tokens),
        )

    def _features_of(self, rows: int) -> torch.Tensor | None:
        if not self._taps:
            return None
        if rows > len(self._features):
            return self._features.new_empty((rows, self._features.shape[1]))
        return self._features[:rows]


def answer_len(bucket: Bucket) -> int:
    """Words of a step's answer."""
    return bucket.logit_rows + bucket.sessions * (bucket.nodes + 1) if bucket.nodes else 0


def _verify(bucket: Bucket, logits: torch.Tensor, arrays: dict[str, torch.Tensor], answer: torch.Tensor) -> None:
    predicts, paths, accepted = answer.split(
        [bucket.logit_rows, bucket.sessions * bucket.nodes, bucket.sessions]
    )  # fmt: skip
    verify_coupled(
        logits,
        *(arrays[name] for name in _SAMPLING),
        choice_index=arrays["choice_index"],
        candidates=arrays["candidates"],
        retrive_index=arrays["tree_rows"],
        retrive_next_token=arrays["first_child"],
        retrive_next_sibling=arrays["next_sibling"],
        predicts=predicts,
        accept_index=paths.view(bucket.sessions, bucket.nodes),
        accept_token_num=accepted,
    )
