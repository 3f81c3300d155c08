"""Weights from memory-mapped safetensors files of a checkpoint.

A source hands out whole tensors, rows or columns by the names that transformers gives them. Of a file only the pages
of what is asked for are read, and nothing is copied before it goes to its device.

A checkpoint may have matrices of 8 bits: X.weight is float8_e4m3, and X.weight_scale has the factor of every row, or
one for all.

A checkpoint may store equal rows of a matrix of floats once: X.weight has the different ones, [R, N], and
X.weight_rows, [V] int32, says which of them each of the V rows is. A source hands out all V rows. In such a file many
tokens can share a row of the embedding, and it is no larger for them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALED = "F8_E4M3"
_INTEGERS = ("I32", "I64")


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def place(self) -> str:
        """Name of the source in messages."""
        ...

    def stores(self, name: str) -> bool:
        """Return True if the source has this optional tensor."""
        ...

    def factors(self, name: str) -> torch.Tensor | None:
        """Return the scales of an 8-bit matrix [R, C], [R] float32; None for any other tensor."""
        ...

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the source has tensors of these shapes, before any is read.

        Raises:
            CheckpointError: a tensor is missing, of another shape or no float; where only reading it can tell, the
                calls that read it raise.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor."""
        ...

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of a tensor [R, ...]."""
        ...

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return columns `start` to `stop` of a matrix [R, C]."""
        ...


class SafetensorsSource:
    """The files of a checkpoint folder: model.safetensors, or the shards that its index names.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, with its name and what to do.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder
        self._opened: dict[str, Any] = {}
        self._file_of = self._read_file_names()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors that it hands out."""
        return frozenset(self._file_of) - {_rows_of(name) for name in self._file_of}

    @property
    def files(self) -> dict[str, list[str]]:
        """The names of the tensors in each file."""
        found: dict[str, list[str]] = {}
        for name, file in self._file_of.items():
            found.setdefault(file, []).append(name)
        return found

    @property
    def number_count(self) -> int:
        """Numbers of all tensors that it hands out."""
        return sum(math.prod(self._shape(name)) for name in self.names)

    def stores(self, name: str) -> bool:
        """Return True if the checkpoint has the tensor."""
        return name in self._file_of

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See `WeightSource.check`; reads the headers of all files."""
        for file in dict.fromkeys(self._file_of.values()):
            self._open(file)
        absent = [name for name in shapes if name not in self._file_of]
        if absent:
            raise CheckpointError(f"{self.place}: {len(absent)} weights are missing, {absent[0]} first; "
                                  "copy or save the checkpoint again")  # fmt: skip
        for name, shape in shapes.items():
            dtype = self._slice(name).get_dtype()
            if _rows_of(name) in self._file_of:
                self._check_rows(name)
            if (given := self._shape(name)) != shape:
                raise CheckpointError(f"{self._path(name)}: {name} has shape {list(given)}, "
                                      f"{list(shape)} needed after config.json")  # fmt: skip
            if dtype == _SCALED:
                self._check_factors(name, shape)
            elif dtype not in _FLOATS:
                raise CheckpointError(f"{self._path(name)}: {name} is {dtype}; "
                                      "give the float or bfloat16 checkpoint")  # fmt: skip

    def factors(self, name: str) -> torch.Tensor | None:
        """Return the scales stored beside an 8-bit matrix, [R] float32; None for any other tensor."""
        if _factors_of(name) not in self._file_of or self._slice(name).get_dtype() != _SCALED:
            return None
        factors = _factors_of(name)
        # One factor for all may have no dimension, and no slices.
        stored = self._open(self._file_of[factors]).get_tensor(factors)
        return stored.float().flatten().expand(self._slice(name).get_shape()[0])

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file, or a copy where equal rows are stored once."""
        return self._select(name, slice(None), self._slice(name)[:])

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        if _rows_of(name) in self._file_of:
            return self._select(name, slice(start, stop), self._slice(name)[:])
        return self._slice(name)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        return self._select(name, slice(None), self._slice(name)[:, start:stop])

    def _select(self, name: str, part: slice, stored: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor's rows, out of the rows that are stored; all of these where each stands for one."""
        rows = _rows_of(name)
        return stored[self._slice(rows)[part].long()] if rows in self._file_of else stored

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what is handed out."""
        stored, rows = tuple(self._slice(name).get_shape()), _rows_of(name)
        return stored if rows not in self._file_of else (*self._slice(rows).get_shape(), *stored[1:])

    def _check_rows(self, name: str) -> None:
        """Check which of the stored rows each row of a matrix is."""
        rows, (count, *_) = _rows_of(name), self._slice(name).get_shape()
        found = self._slice(rows)
        if self._slice(name).get_dtype() not in _FLOATS:
            raise CheckpointError(f"{self._path(name)}: {name} is {self._slice(name).get_dtype()} and has {rows}, "
                                  "for which floats are needed")  # fmt: skip
        if len(found.get_shape()) != 1 or not found.get_shape()[0] or found.get_dtype() not in _INTEGERS:
            raise CheckpointError(f"{self._path(rows)}: {rows} is {found.get_dtype()} of shape "
                                  f"{list(found.get_shape())}, a list of whole numbers needed")  # fmt: skip
        least, most = (int(each) for each in found[:].aminmax())
        if least < 0 or most >= count:
            raise CheckpointError(f"{self._path(rows)}: {rows} names row {least if least < 0 else most}, and {name} "
                                  f"has {count}; copy or save the checkpoint again")  # fmt: skip

    def _check_factors(self, name: str, shape: tuple[int, ...]) -> None:
        factors = _factors_of(name)
        if len(shape) != 2 or factors not in self._file_of:
            raise CheckpointError(f"{self._path(name)}: {name} is {_SCALED} without {factors}; "
                                  "give the float or bfloat16 checkpoint")  # fmt: skip
        found = self._slice(factors)
        given = tuple(found.get_shape())
        if given not in ((), (1,), (shape[0],), (shape[0], 1)) or found.get_dtype() not in _FLOATS:
            raise CheckpointError(f"{self._path(factors)}: {factors} is {found.get_dtype()} of shape {list(given)}, "
                                  f"floats, one or [{shape[0]}, 1] of them, needed")  # fmt: skip

    def _read_file_names(self) -> dict[str, str]:
        """The file of every tensor."""
        if (self._folder / SINGLE_FILE).is_file():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        index = self._folder / INDEX_FILE
        if not index.is_file():
            raise CheckpointError(f"{self.place}: neither {SINGLE_FILE} nor {INDEX_FILE}; copy the checkpoint again")
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: no index of shards: {error!r}; copy the checkpoint again") from error
        if not isinstance(files, dict) or any(Path(str(file)).name != file for file in files.values()):
            raise CheckpointError(f"{index}: weight_map is no map of tensors to files of this folder")
        return files

    def _open(self, file: str) -> Any:
        opened = self._opened.get(file)
        if opened is not None:
            return opened
        path = self._folder / file
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, and {INDEX_FILE} names it; copy this file again")
        try:
            opened = self._opened[file] = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot load it, it is truncated or corrupt ({error}); "
                                  "copy this file again") from error  # fmt: skip
        return opened

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.place}: {name} is missing; copy or save the checkpoint again")
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._path(name)}: {name} is not in it, and {INDEX_FILE} says so; "
                                  "copy this file again") from error  # fmt: skip

    def _path(self, name: str) -> Path:
        return self._folder / self._file_of[name]


def _factors_of(name: str) -> str:
    return f"{name}_scale"


def _rows_of(name: str) -> str:
    return f"{name}_rows"
