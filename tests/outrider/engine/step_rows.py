"""Steps over chains and trees that a test lays out itself, for forward passes that need no pool.

Shapes: T rows, S sessions, W mask words, R rows whose logits are wanted. A session's rows stand together; key indices
count within its row of the slot table.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.kv_slots import SlotTable
from outrider.engine.model_runner import ModelRunner
from outrider.kernels.pool.columns import Pool
from outrider.kernels.pool.pack import Packed
from outrider.kernels.tree_attention import TreeAttentionBatch


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rows of a step, on a device.

    Attributes:
        packed: as `pack` would have written them.
        pool: one whose rows have the slots of the table's.
        slot_table: [S, most keys] int32, those of the step's sessions.
        logit_rows: [R] int64, ascending.
        most: most rows of a session.
    """

    packed: Packed
    pool: Pool
    slot_table: torch.Tensor
    logit_rows: torch.Tensor
    most: int

    def attention(
        self, *, slot_positions: torch.Tensor | None = None, split_keys: int | None = None
    ) -> TreeAttentionBatch:
        """Return what attention reads of the step."""
        packed = self.packed
        return TreeAttentionBatch(
            slot_table=self.slot_table, query_start=packed.query_start, tree_start=packed.tree_start,
            prefix_len=packed.prefix_len, key_len=packed.key_len, tree_mask=packed.tree_mask, max_query_len=self.most,
            max_key_len=self.slot_table.shape[1], positions=None if slot_positions is None else packed.positions,
            slot_positions=slot_positions, split_keys=split_keys,
        )  # fmt: skip


class StepBuilder:
    """Puts a step together, session after session; a session's rows are chains, then tree nodes.

    Args:
        slots: the table; the rows' slots are taken before they are added.
        device: of the step.
    """

    def __init__(self, slots: SlotTable, device: torch.device | str = "cpu") -> None:
        self._slots, self._device = slots, torch.device(device)
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._write_index: list[int] = []
        self._prefix_len: list[int] = []
        self._masks: list[npt.NDArray[np.int64]] = []
        self._rows: list[int] = []
        self._query_start: list[int] = []
        self._tree_start: list[int] = []
        self._key_len: list[int] = []
        self._logit_rows: list[int] = []

    def add_chain(self, row: int, tokens: Sequence[int], first_index: int, want_last_logits: bool) -> None:
        """Add consecutive tokens, each of which sees all before it and itself, from a key index on."""
        end = first_index + len(tokens)
        self._session(row, tree_start=end, key_len=end)
        indices = range(first_index, end)
        self._add(tokens, indices, indices, [index + 1 for index in indices], np.zeros((len(tokens), 1), np.int64))
        if want_last_logits:
            self._logit_rows.append(len(self._tokens) - 1)

    def add_tree(
        self, row: int, tokens: Sequence[int], *, tree_start: int, positions: Sequence[int],
        masks: npt.NDArray[np.int64], write_indices: Sequence[int],
    ) -> None:  # fmt: skip
        """Add nodes that see the keys before `tree_start` and those their masks name; bit 0 is key `tree_start`."""
        self._session(row, tree_start=tree_start, key_len=max(write_indices) + 1)
        first = len(self._tokens)
        self._add(tokens, positions, write_indices, [tree_start] * len(tokens), masks)
        self._logit_rows += range(first, len(self._tokens))

    def build(self) -> StepRows:
        """Return the step."""
        rows, sessions, words = len(self._tokens), len(self._rows), max(masks.shape[1] for masks in self._masks)
        query_start = np.array([*self._query_start, rows])
        lens = np.diff(query_start)
        table = self._slots.table
        of_row = np.repeat(np.arange(sessions), lens)
        slots = table[np.array(self._rows)[of_row], self._write_index]
        assert (slots >= 0).all(), "a row writes to a slot that was not taken"
        packed = Packed.of_shape(
            rows=rows, sessions=sessions, mask_words=words, scrap_slot=self._slots.num_slots, device=self._device
        )
        columns = {
            "tokens": self._tokens, "positions": self._positions, "slots": slots, "sessions": of_row,
            "prefix_len": self._prefix_len, "pool_rows": self._rows, "query_start": query_start,
            "tree_start": self._tree_start, "key_len": self._key_len,
            "tree_mask": np.concatenate(
                [np.pad(masks, ((0, 0), (0, words - masks.shape[1]))) for masks in self._masks]
            ),
        }  # fmt: skip
        for name, values in columns.items():
            getattr(packed, name).copy_(torch.from_numpy(np.array(values)))
        pool = Pool.allocate(sessions=len(table), max_len=table.shape[1], capacity=1, trail=1, device=self._device)
        pool.table.copy_(torch.from_numpy(table))
        return StepRows(
            packed=packed, pool=pool, slot_table=pool.table[self._rows, : max(self._key_len)],
            logit_rows=torch.tensor(self._logit_rows, dtype=torch.int64, device=self._device), most=int(lens.max()),
        )  # fmt: skip

    def _add(
        self, tokens: Sequence[int], positions: Sequence[int], indices: Sequence[int], prefix_len: Sequence[int],
        masks: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._tokens += tokens
        self._positions += positions
        self._write_index += indices
        self._prefix_len += prefix_len
        self._masks.append(masks)

    def _session(self, row: int, *, tree_start: int, key_len: int) -> None:
        if self._rows and self._rows[-1] == row:
            self._tree_start[-1] = tree_start
            self._key_len[-1] = max(self._key_len[-1], key_len)
            return
        assert row not in self._rows, f"the rows of session row {row} do not stand together"
        self._rows.append(row)
        self._query_start.append(len(self._tokens))
        self._tree_start.append(tree_start)
        self._key_len.append(key_len)


class Steps:
    """A runner's forward pass over steps that a test lays out.

    Args:
        runner: the model.
        sessions: most of a step.
    """

    def __init__(self, runner: ModelRunner, *, sessions: int = 8) -> None:
        self.runner, self._forward = runner, runner.packed_forward(sessions=sessions)

    def builder(self) -> StepBuilder:
        """Return a step without rows."""
        return StepBuilder(self.runner.slots, self.runner.device)

    def logits(self, step: StepRows) -> torch.Tensor:
        """Return the wanted logits [R, V], on the runner's device; all ranks compute those before them too."""
        lines = _lines(step)
        with self._lead(step, lines):
            return self._run(step, lines)

    def capture(self, step: StepRows) -> Callable[[], torch.Tensor]:
        """Return what replays the step's graph, on every rank, and returns its logits; one step of a GPU's runner."""
        lines = _lines(step)
        self.logits(step)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self._lead(step, lines, graph=0), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._run(step, lines)
        self.runner.ranks.note_graph(graph)

        def replay() -> torch.Tensor:
            with self._lead(step, lines, graph=0):
                graph.replay()
            return logits.clone()

        return replay

    def _lead(self, step: StepRows, lines: int, graph: int | None = None) -> AbstractContextManager[None]:
        return self._forward.lead(step.packed, lines=lines, most=step.most, graph=graph)

    def _run(self, step: StepRows, lines: int) -> torch.Tensor:
        first = torch.arange(lines, device=self.runner.device)
        return self._forward.logits(step.packed, step.pool, first, most=step.most)[step.logit_rows]


def _lines(step: StepRows) -> int:
    return int(step.logit_rows.max()) + 1 if len(step.logit_rows) else 0


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the depths of a root and its nodes; a node's parent is 0 (the root) or the number of an earlier node."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def ancestor_masks(parents: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return who a root and its nodes attend to, themselves included: [1 + n, 1], bit j is node j. At most 63 nodes."""
    masks = [1]
    for number, parent in enumerate(parents, start=1):
        masks.append(masks[parent] | 1 << number)
    return np.array(masks, dtype=np.uint64).view(np.int64)[:, None]
