"""Memory shared by steps that run in turn: processors of their sessions, and logits that are soon read."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from outrider.engine.graph_memory import GraphMemory
from outrider.kernels.sampling.processors import NodeProcessors


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """Memory of a target's rounds and of the growth steps between them, or of a draft worker's steps.

    Attributes:
        processors: of the sessions by row of the pool.
        processed: [L, V] float32, logits after the processors.
        graphs: memory of CUDA graphs; None on a CPU.
    """

    processors: NodeProcessors
    processed: torch.Tensor
    graphs: GraphMemory | None

    @classmethod
    def allocate(cls, *, sessions: int, lines: int, vocab_size: int, device: torch.device) -> Self:
        """Return memory for S = `sessions` rows without processors and L = `lines` lines."""
        return cls(
            processors=NodeProcessors.allocate(sessions=sessions, vocab_size=vocab_size, device=device),
            processed=torch.zeros((lines, vocab_size), dtype=torch.float32, device=device),
            graphs=GraphMemory(device) if device.type == "cuda" else None,
        )

    def first_tokens(self, vocab_size: int) -> Self:
        """Return the part of it for a model of fewer tokens."""
        processors = self.processors
        return replace(
            self,
            processors=replace(
                processors,
                counts=processors.counts[:, :vocab_size],
                additive=processors.additive[:, :vocab_size],
            ),
            processed=self.processed[:, :vocab_size],
        )
