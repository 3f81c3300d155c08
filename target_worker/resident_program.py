"""What the device does after a step to draft on, in one piece: extend the head's KV, then grow a tree a session.

A round's shape depends on its bucket alone, and nothing in it waits for the host, so a CUDA graph captures it. It takes
of each session the last rows that it keeps; what is left before these is extended beforehand
(`outrider.target_worker.resident_extension`). Sessions whose trees need paths on the host have rounds of the same sizes
without a graph.

Whatever a round does not fill says "nothing" there: sessions without a row of the slot table, rows whose slot is out of
range.

Shapes: T rows of the target that sessions keep, S sessions, M slots of a tree, U entries of the slot table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.step_program import StepProgram
from outrider.kernels.tree_attention import TreeAttentionBatch
from outrider.target_worker.resident_choice import CandidateRanker, RankedSessions
from outrider.target_worker.resident_head import HeadLayer, TreeLevels
from outrider.target_worker.resident_trees import grow_trees
from outrider.target_worker.sessions import Session

# Of a session's kept rows, the last ones, which a round extends: more than most trees are deep.
MOST_ROWS = 8
_ALIGNMENT = 16
_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}
_RANKING = {
    "seeds": ("<i8", 0), "temperature": ("<f4", 0), "top_p": ("<f4", 1), "min_p": ("<f4", 0), "top_k": ("<i4", 0),
    "choice_index": ("<i4", 0), "positions": ("<i4", 0), "independent": ("<i4", 0), "fixed": ("<i4", 0),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, order=True)
class RoundSize:
    """Bounds of a round: S sessions, T rows, M slots of a tree."""

    sessions: int
    rows: int
    tree_slots: int

    @property
    def updates(self) -> int:
        """U."""
        return self.sessions * (self.tree_slots + MOST_ROWS) + 64


class RoundLayout:
    """Where a round's arrays lie in its bytes.

    Attributes:
        size: whose.
        nbytes: of a round.
        template: [nbytes] a round of nothing.
    """

    def __init__(self, size: RoundSize) -> None:
        self.size = size
        self._arrays: dict[str, tuple[str, tuple[int, ...], int]] = {}
        end = 0
        paddings = {}
        for name, dtype, shape, padding in self._wanted():
            self._arrays[name] = dtype, shape, end
            paddings[name] = padding
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        self.template = np.zeros(end, dtype=np.uint8)
        for name, array in self.arrays(self.template).items():
            array[...] = paddings[name]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(size: RoundSize) -> RoundLayout:
        """The size's layout, made once."""
        return RoundLayout(size)

    def arrays(self, data: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Views of the arrays in a round's bytes."""
        return {
            name: data[begin : begin + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for name, (dtype, shape, begin) in self._arrays.items()
        }

    def tensors(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the arrays in a tensor of bytes, on any device."""
        return {
            name: data[begin : begin + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(_DTYPES[dtype]).view(shape)
            for name, (dtype, shape, begin) in self._arrays.items()
        }

    def _wanted(self) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
        sessions, rows = (self.size.sessions,), (self.size.rows,)
        yield "feature_rows", "<i8", rows, 0
        yield "token_ids", "<i8", rows, 0
        yield "write_slots", "<i8", rows, -1
        yield "row_positions", "<i4", rows, 0
        yield "query_start", "<i4", (self.size.sessions + 1,), 0
        yield "last_rows", "<i8", sessions, 0
        yield "table_rows", "<i4", sessions, -1
        yield "roots", "<i4", sessions, 0
        yield "tree_slots", "<i8", (self.size.sessions, self.size.tree_slots), -1
        for name in ("update_rows", "update_columns", "update_slots"):
            yield name, "<i4", (self.size.updates,), -1
        for name, (dtype, padding) in _RANKING.items():
            yield name, dtype, sessions, padding


class RoundProgram:
    """A head, its caches and its target's slot table on the device.

    Args:
        layer: the draft head.
        target: whose tapped hidden states and slot table are read.
        ranker: ranks children.
        depth: levels of a tree.
        bits: of `resident_trees.own_bits`.
    """

    def __init__(
        self,
        layer: HeadLayer,
        target: StepProgram,
        ranker: CandidateRanker,
        *,
        depth: int,
        bits: torch.Tensor,
    ) -> None:
        self._layer, self._target, self._ranker = layer, target, ranker
        self._depth, self._bits = depth, bits

    @property
    def features(self) -> torch.Tensor:
        """[rows, F] where the target has to leave the hidden states that `run` reads."""
        return self._target.features

    @torch.inference_mode()
    def run(self, size: RoundSize, data: torch.Tensor) -> torch.Tensor:
        """Runs a round without waiting for anything; what `resident_trees.grow_trees` gives, [S, words].

        Args:
            size: of the round.
            data: [nbytes] uint8 on the device.
        """
        arrays = RoundLayout.of(size).tensors(data)
        return self._run(size, arrays, self._target.features, RankedSessions(_ranking(arrays)))

    @torch.inference_mode()
    def run_beside_host(
        self,
        size: RoundSize,
        data: torch.Tensor,
        *,
        features: torch.Tensor,
        sessions: Sequence[Session] = (),
        any_independent: bool = False,
    ) -> torch.Tensor:
        """`run` with what a graph cannot hold; its launches depend on its size and on `any_independent`.

        Args:
            size: of the round.
            data: [nbytes] uint8 on the device.
            features: [rows, F] hidden states, wherever the target has left them.
            sessions: the round's first ones, where the paths of any are needed on the host.
            any_independent: whether any session has coins of its own (target_only).
        """
        arrays = RoundLayout.of(size).tensors(data)
        ranked = RankedSessions(_ranking(arrays), sessions=sessions, any_independent=any_independent, ranks_all=True)
        return self._run(size, arrays, features, ranked)

    def _run(
        self, size: RoundSize, arrays: Mapping[str, torch.Tensor], features: torch.Tensor, sessions: RankedSessions
    ) -> torch.Tensor:
        updates = [arrays[name] for name in ("update_rows", "update_columns", "update_slots")]
        # Of sessions that are none, no slot is read and none is written.
        end = arrays["roots"] + (arrays["table_rows"] >= 0) * size.tree_slots
        table = self._target.slot_rows(updates, arrays["table_rows"], end.to(torch.int32))
        hidden = self._extend(arrays, table, features)
        top_k = self._ranker.top_k
        levels = TreeLevels(self._layer, table, arrays["roots"], arrays["tree_slots"], top_k=top_k)
        return grow_trees(
            self._layer.head,
            levels.step,
            self._ranker,
            sessions,
            hidden.index_select(0, arrays["last_rows"]),
            depth=self._depth,
            top_k=top_k,
            bits=self._bits,
        )

    @torch.inference_mode()
    def update_slots(self, updates: torch.Tensor) -> None:
        """Writes [3, n] entries (row, column, slot) that found no place in a round's bytes."""
        self._target.update_slots(updates)

    def _extend(self, arrays: Mapping[str, torch.Tensor], table: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """[T, N] the head over what the sessions keep."""
        positions = arrays["row_positions"]
        batch = TreeAttentionBatch(
            slot_table=table,
            query_start=arrays["query_start"],
            tree_start=arrays["roots"],
            prefix_len=positions + 1,
            key_len=arrays["roots"],
            tree_mask=torch.zeros((positions.shape[0], 1), dtype=torch.int64, device=positions.device),
            max_query_len=MOST_ROWS,
            max_key_len=table.shape[1],
        )
        return self._layer.forward(
            self._layer.head.fuse(features.index_select(0, arrays["feature_rows"])),
            arrays["token_ids"],
            positions=positions,
            write_slots=arrays["write_slots"],
            batch=batch,
        )


def _ranking(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What sessions rank by, of a round's arrays."""
    return {name: arrays[name] for name in _RANKING}
