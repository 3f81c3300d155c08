"""Messages between the processes of a tensor-parallel model (see `outrider.engine.tensor_parallel_leader`)."""

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakSet

import torch

from outrider.engine.config import EngineConfig
from outrider.engine.tensor_parallel_collectives import Collectives, Meeting, SumOptions
from outrider.engine.weight_source import WeightSource

# A rank that is alive and does not answer, a step that never ends: noticed by time alone. A first step may compile.
STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The first message to a follower."""

    meeting: Meeting  # where it meets the others, with its rank
    config: EngineConfig
    source: WeightSource | None  # of its weights; None for the files of the checkpoint
    log_level: int


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the rank's device: the visible GPU of its number, or the CPU."""
    return torch.device("cuda", rank) if config.device == "cuda" else torch.device(config.device)


class Ranks:
    """One rank's way to the others; here that of a process that runs the whole model."""

    def __init__(self, device: torch.device, *, rank: int = 0, world_size: int = 1) -> None:
        # world_size: ranks of the model.
        self.rank, self.world_size, self.device = rank, world_size, device
        self.failed: Future[None] = Future()  # done with the reason once another rank is lost
        self._collectives: Collectives | None = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()

    def least(self, value: int) -> int:
        """The least of the values that all ranks give; all must call it, as often."""
        return value

    def connect(self, options: SumOptions) -> Collectives:
        """Join the ranks' sums; see `outrider.engine.tensor_parallel_collectives.connect`."""
        raise AssertionError("one rank has no others")

    def lead(self, name: str, payload: object = None) -> None:
        """Send a command to all followers, which they run after the ones before; nothing on a follower."""

    def broadcast(self, words: torch.Tensor) -> None:
        """See `Collectives.broadcast`; all must call it, with words of equal size."""
        if self._collectives is not None:
            self._collectives.broadcast(words)

    def note_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        """Take note of a graph with collectives in it: NCCL does not leave a group while there are any."""
        self._graphs.add(graph)

    def guard(self, timeout_s: float = STEP_TIMEOUT_S) -> contextlib.AbstractContextManager[None]:
        """Return a guard of a wait for what all ranks do; a follower ends with its leader, which watches all.

        Raises (as it is left):
            WorkerUnavailable: a rank was lost meanwhile or before, or the wait took too long.
        """
        return contextlib.nullcontext()

    def close(self) -> None:
        """End the followers and leave the group; no graph with collectives may be run any more."""
        for graph in self._graphs:
            graph.reset()
        if self._collectives is not None:
            self._collectives.close()
