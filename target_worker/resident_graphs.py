"""CUDA graphs of what a resident draft runs on its device, one a size.

Which kernels a size needs follows from the size alone, so once every size has run, no step has to wait for one to be
compiled. A size that could not be captured runs one launch after the other.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Size = TypeVar("Size")
_COMPILING_THREADS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    data: torch.Tensor
    output: torch.Tensor


class SizedGraphs(Generic[Size]):
    """Graphs of one program.

    Args:
        program: what runs, from its size and its bytes on the device; what it returns is valid until its next run.
        nothing: the bytes of a run that stores nothing, [nbytes] uint8 of a size.
        what: it does, for the log.
        device: of the program.
        enabled: whether anything is captured; on a CPU nothing is.
    """

    def __init__(
        self,
        program: Callable[[Size, torch.Tensor], torch.Tensor],
        nothing: Callable[[Size], npt.NDArray[np.uint8]],
        *,
        what: str,
        device: torch.device,
        enabled: bool,
    ) -> None:
        self._program, self._nothing, self._what, self._device = program, nothing, what, device
        self._enabled = enabled and device.type == "cuda"
        self._captured: dict[Size, _Captured] = {}
        self._refused: set[Size] = set()
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._stream = torch.cuda.Stream(device) if self._enabled else None

    def warm_up(self, sizes: Sequence[Size]) -> None:
        """Compiles what sizes need and captures them, in their order.

        Args:
            sizes: from the largest on: what smaller ones need of memory is then there.
        """
        if not self._enabled:
            return
        begin = time.perf_counter()
        # Most of a compilation runs beside others in threads; what all sizes need is compiled once, before they would
        # do so each.
        self._try(self._program, sizes[0])
        with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
            list(pool.map(functools.partial(self._try, self._program), sizes[1:]))
        for size in sizes:
            self._graph(size)
        seconds = time.perf_counter() - begin
        logger.info("%d CUDA graphs of %s captured in %.1f s", len(self._captured), self._what, seconds)

    def rehearse(self, sizes: Sequence[Size], program: Callable[[Size, torch.Tensor], object]) -> None:
        """Compiles what is never captured, one size after the other; nothing where nothing is captured either.

        Args:
            sizes: which.
            program: what runs.
        """
        for size in sizes if self._enabled else ():
            self._try(program, size)

    def _try(self, program: Callable[[Size, torch.Tensor], object], size: Size) -> None:
        """A run that stores nothing, where there is memory for it."""
        with suppress(torch.OutOfMemoryError), torch.cuda.device(self._device):
            program(size, torch.from_numpy(self._nothing(size)).to(self._device))

    def run(self, size: Size, staged: torch.Tensor) -> torch.Tensor:
        """A run of the program, started; nothing is waited for, but for a capture where there is none yet.

        Args:
            size: of the run.
            staged: [nbytes] uint8 on the host.
        """
        captured = self._graph(size)
        if captured is None:
            return self._program(size, staged.to(self._device, non_blocking=True))
        captured.data.copy_(staged, non_blocking=True)
        captured.graph.replay()
        return captured.output

    def _graph(self, size: Size) -> _Captured | None:
        """The size's graph, captured if it is not yet; None where there is none."""
        if not self._enabled or size in self._refused:
            return None
        if size not in self._captured:
            try:
                self._captured[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                self._refused.add(size)
                logger.warning("no GPU memory for a CUDA graph of %s: such steps run slower: %s", size, error)
                return None
        return self._captured[size]

    def _capture(self, size: Size) -> _Captured:
        assert self._stream is not None
        data = torch.from_numpy(self._nothing(size)).to(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._program(size, data)
        # While a graph is captured, no memory is given back for it.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = self._program(size, data)
        return _Captured(graph=graph, data=data, output=output)
