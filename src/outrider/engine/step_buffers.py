"""A step as plain bytes: where each array lies, and the pinned buffers that bytes are packed in and copied from.

A bucket fixes the place of every array, so that a step is one copy to the device, and the same bytes mean the same step
on every rank. Whatever a step does not fill says "nothing" there: rows without a session, slots out of range, trees
without nodes.

Shapes: as in `outrider.engine.buckets`, and N rows of a verified tree, U entries of the slot table.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.buckets import Bucket

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 16
_TORCH_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}

# Layouts that are kept: a large step's is some 100 kB, and long contexts have thousands of them.
_MOST_LAYOUTS = 512


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    dtype: str
    shape: tuple[int, ...]
    padding: float
    begin: int

    @property
    def end(self) -> int:
        return self.begin + int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class StepLayout:
    """Where a bucket's arrays lie in its bytes.

    Attributes:
        bucket: whose.
        updates: U, entries of the slot table that a step brings along.
        begins: the first byte of each array, by name.
        nbytes: of a step.
        template: [nbytes] a step of nothing.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        # A verified tree leaves its path and takes fresh slots; prompts are the rows themselves.
        self.updates = bucket.tokens + 16 * bucket.sessions + 48
        self._arrays: list[_Array] = []
        end = 0
        for name, dtype, shape, padding in self._wanted():
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            self._arrays.append(_Array(name, dtype, shape, padding, begin))
            end = self._arrays[-1].end
        self.begins = {array.name: array.begin for array in self._arrays}
        self.nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.template: Bytes = np.zeros(self.nbytes, dtype=np.uint8)
        for array, values in zip(self._arrays, self.arrays(self.template).values(), strict=True):
            values[...] = array.padding

    @staticmethod
    @functools.lru_cache(maxsize=_MOST_LAYOUTS)
    def of(bucket: Bucket) -> "StepLayout":
        """The bucket's layout, made once."""
        return StepLayout(bucket)

    def arrays(self, data: Bytes) -> dict[str, np.ndarray]:
        """Views of the arrays in a step's bytes."""
        return {
            array.name: data[array.begin : array.end].view(array.dtype).reshape(array.shape) for array in self._arrays
        }

    def tensors(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the arrays in a tensor of bytes, on any device."""
        return {
            array.name: data[array.begin : array.end].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array in self._arrays
        }

    def _wanted(self) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
        bucket = self.bucket
        rows, sessions, logit_rows = (bucket.tokens,), (bucket.sessions,), (bucket.logit_rows,)
        yield "token_ids", "<i8", rows, 0
        yield "write_slots", "<i8", rows, -1
        yield "tree_mask", "<i8", (bucket.tokens, bucket.words), 0
        yield "positions", "<i4", rows, 0
        yield "prefix_len", "<i4", rows, 0
        yield "rows", "<i4", sessions, -1
        yield "query_start", "<i4", (bucket.sessions + 1,), 0
        yield "tree_start", "<i4", sessions, 0
        yield "key_len", "<i4", sessions, 0
        yield "logit_rows", "<i8", logit_rows, 0
        for name in ("update_rows", "update_columns", "update_slots"):
            yield name, "<i4", (self.updates,), -1
        if bucket.paths:
            for name in ("path_rows", "path_columns", "path_slots"):
                yield name, "<i4", (bucket.paths,), -1
        if bucket.nodes:
            yield "seeds", "<i8", logit_rows, 0
            for name in ("choice_positions", "top_k", "choice_index"):
                yield name, "<i4", logit_rows, 0
            for name, off in (("temperature", 0), ("top_p", 1), ("min_p", 0)):
                yield name, "<f4", logit_rows, off
        if bucket.nodes:
            for name in ("candidates", "tree_rows", "first_child", "next_sibling"):
                yield name, "<i4", (bucket.sessions, bucket.nodes), -1


@dataclass(frozen=True, slots=True)
class StepViews:
    """A step's bytes in a buffer, and the same as whole numbers.

    Attributes:
        data: [nbytes].
        wide: [nbytes / 8] int64.
        words: [nbytes / 4] int32.
    """

    data: Bytes
    wide: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]


@dataclass(kw_only=True, eq=False, slots=True)
class StagedStep:
    """A step as it is sent to whoever runs it. Not frozen: a device waits while it is made.

    Attributes:
        bucket: that it runs in.
        data: [nbytes] the arrays of the bucket's layout.
        more_updates: [3, n] int32, entries (row, column, slot) of the slot table that found no place in `data`.
        logit_rows: rows of logits that are wanted, the first of the bucket's.
        trees: trees that are verified, the first of the bucket's.
        buffer: the ring's buffer that holds `data`; None for bytes that came from elsewhere.
    """

    bucket: Bucket
    data: Bytes
    more_updates: npt.NDArray[np.int32]
    logit_rows: int
    trees: int
    buffer: "StepBuffer | None" = field(default=None, repr=False)


class StepBuffer:
    """One pinned buffer for a step's bytes and one for its answer, and the time of the step that used them last."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._pinned else []
        self._times = [0, 0]
        self._used = False
        self._tensors: dict[str, torch.Tensor] = {}
        # Views of these, by their kind and size, or by the layout.
        self._arrays: dict[StepLayout, tuple[Bytes, dict[str, np.ndarray]]] = {}
        self._views: dict[int, StepViews] = {}
        self._parts: dict[tuple[str, int], torch.Tensor] = {}
        self._answers: dict[int, npt.NDArray[np.int32]] = {}

    def step(self, layout: StepLayout) -> tuple[Bytes, dict[str, np.ndarray]]:
        """The bytes of a step of nothing, and views of its arrays."""
        found = self._arrays.get(layout)
        if found is None:
            data = self._bytes("step", layout.nbytes).numpy()[: layout.nbytes]
            _make_room(self._arrays)
            found = self._arrays[layout] = (data, layout.arrays(data))
        found[0][:] = layout.template
        return found

    def views(self, nbytes: int) -> StepViews:
        """The bytes of a step as they are, to be written whole."""
        found = self._views.get(nbytes)
        if found is None:
            data = self._bytes("step", nbytes).numpy()[:nbytes]
            _make_room(self._views)
            found = self._views[nbytes] = StepViews(data, data.view(np.int64), data.view(np.int32))
        return found

    def copy_in(self, data: Bytes) -> None:
        """Takes a step's bytes that were packed elsewhere."""
        self._bytes("step", len(data)).numpy()[: len(data)] = data

    def step_tensor(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, the bytes as the copy to the device reads them."""
        found = self._parts.get(("step", nbytes))
        if found is None:
            found = self._keep("step", nbytes, self._bytes("step", nbytes)[:nbytes])
        return found

    def answer(self, count: int) -> torch.Tensor:
        """[count] int32 on the host."""
        found = self._parts.get(("answer", count))
        if found is None:
            found = self._keep("answer", count, self._bytes("answer", 4 * count)[: 4 * count].view(torch.int32))
        return found

    def answer_words(self, count: int) -> npt.NDArray[np.int32]:
        """The same for reading."""
        found = self._answers.get(count)
        if found is None:
            _make_room(self._answers)
            found = self._answers[count] = self.answer(count).numpy()
        return found

    def note_begin(self) -> None:
        """Here the device begins with the step."""
        self._used = True
        self._note(0)

    def note_end(self) -> None:
        """Here the device is done with the step and with the buffers."""
        self._note(1)

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        return not (self._events and self._used) or self._events[1].query()

    def wait(self) -> None:
        """Until the step that used the buffers last is done."""
        if not self.is_done:
            self._events[1].synchronize()

    def elapsed_ns(self) -> int:
        """How long the device took for that step, once it is done."""
        if self._events:
            return int(self._events[0].elapsed_time(self._events[1]) * 1e6)
        return self._times[1] - self._times[0]

    def _note(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter_ns()

    def _bytes(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._tensors.get(name)
        if held is None or len(held) < nbytes:
            # Room to spare: pinning memory stops the device.
            held = torch.empty(max(2 * nbytes, 1 << 18), dtype=torch.uint8, pin_memory=self._pinned)
            self._tensors[name] = held
            for views in (self._arrays, self._views, self._parts, self._answers):
                views.clear()
        return held

    def _keep(self, name: str, size: int, part: torch.Tensor) -> torch.Tensor:
        _make_room(self._parts)
        self._parts[name, size] = part
        return part


def _make_room(views: dict[Any, Any]) -> None:
    """Forgets views rather than keep any number of them."""
    if len(views) >= _MOST_LAYOUTS:
        views.clear()


class StepBuffers:
    """A ring of buffers: a step is packed while others are still being read.

    Args:
        device: where steps run.
        count: steps that may be under way, and one that is packed.
    """

    def __init__(self, device: torch.device, *, count: int = 4) -> None:
        self._ring = [StepBuffer(device) for _ in range(count)]
        self._next = 0

    def take(self) -> StepBuffer:
        """The buffer that was used longest ago, once its step is done."""
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        buffer.wait()
        return buffer
