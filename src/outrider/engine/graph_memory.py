"""Memory of CUDA graphs that run one after the other.

What a graph allocates is free again when its capture ends, though its kernels go on using it. The next capture gets it
if it asks the same pool on the same stream. So all graphs together take about as much as the largest of them. None may
read what another one has left there, and no two may run at the same time.
"""

from collections.abc import Callable
from typing import Any

import torch


class GraphMemory:
    """The pool and the stream in which graphs are captured.

    Attributes:
        stream: for what has to run once before it is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of what `run` launches."""
        graph = torch.cuda.CUDAGraph()
        # PyTorch keeps a workspace of cuBLAS for each thread and stream that has ever multiplied: 34 MB on Hopper. One
        # that is made during a capture lies in the pool, and given up it is the next capture's like everything else.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        torch._C._cuda_clearCublasWorkspaces()
        return graph
