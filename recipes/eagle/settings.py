"""Shape and training of a head and of a block drafter, and a few seconds of it to try the recipe itself."""

from dataclasses import dataclass, replace

import torch
from llama import LlamaShape
from sampling import SamplingConfig
from training import TrainingConfig, compute_dtype


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the head, apart from the text.

    Attributes:
        shape: of the head; hidden size and vocabulary are the target's.
        taps: after how many of the target's layers features are taken.
        unroll: drafting steps that are trained.
        step_share: of chains that are followed from each of them to the next, which is how much less it counts.
        uses: how often a step of the loop draws a window while the target's rows of it are in memory: the target is
            most of a step otherwise, and texts are gone through several times anyway.
        pool_batches: batches of windows whose rows are in memory.
        text_tokens: source that is read.
        written: what the target writes.
        windows: of a step.
        seconds: how long the loop runs; learning rates follow the clock.
        measured: windows that are not trained on.
        begin_with: folder of a head to go on with, from the project's on; empty: fresh weights.
        rank: of the block drafter's bias by the token before; 0: a head is trained.
    """

    shape: LlamaShape
    taps: tuple[int, ...]
    written: SamplingConfig
    windows: TrainingConfig
    unroll: int = 6
    step_share: float = 0.8
    uses: int = 4
    pool_batches: int = 128
    text_tokens: int = 30_000_000
    seconds: float = 600.0
    measured: int = 32
    begin_with: str = ""
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of what is trained, and of its folder among the models."""
        return "block" if self.rank else "eagle"

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of matrix products: for a block drafter bfloat16 on a CPU with matrix units for it, too."""
        if self.rank and device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False):
            return torch.bfloat16
        return compute_dtype(device)


FULL = Recipe(
    shape=LlamaShape(
        hidden_size=384, intermediate_size=2304, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1
    ),
    taps=(1, 3, 5),
    written=SamplingConfig(rounds=20, sequences=8192),
    # One token more than rows.
    windows=TrainingConfig(steps=1, batch_sequences=32, sequence_tokens=1025, matrix_lr=0.02, other_lr=0.004, seed=4),
)
BLOCK = replace(
    FULL,
    # As large as 4 MB allow.
    shape=replace(FULL.shape, intermediate_size=704),
    # What a CPU of one core with matrix units gets through in half an hour.
    written=SamplingConfig(rounds=4, sequences=576),
    windows=replace(FULL.windows, batch_sequences=4, sequence_tokens=257, matrix_lr=0.004, other_lr=0.002),
    text_tokens=300_000,
    seconds=1500.0,
    # Its first step is the head's.
    begin_with="src/outrider/models/eagle",
    rank=64,
)


def tiny(recipe: Recipe) -> Recipe:
    """Return a recipe of a few seconds, to try the recipe itself."""
    return replace(
        recipe,
        written=SamplingConfig(rounds=1, sequences=10, tokens=24, prompt_tokens=16),
        windows=replace(recipe.windows, batch_sequences=2, sequence_tokens=32, compile=False),
        text_tokens=4_000,
        pool_batches=2,
        seconds=2.0,
        measured=2,
    )


def for_target(recipe: Recipe, target: LlamaShape) -> Recipe:
    """Return the recipe for another target than the embedded one: a layer of its own proportions.

    Features are taken near the target's beginning, in the middle and near its end, as EAGLE-3 does. What the embedded
    target's drafter begins with is no beginning for another's.
    """
    layers = target.num_hidden_layers
    return replace(
        recipe,
        shape=replace(target, num_hidden_layers=1),
        taps=(min(2, layers), layers // 2, max(1, layers - 3)),
        # One token more than rows, of which matrix units like multiples of 8: a conversation has 1,024 tokens.
        windows=replace(recipe.windows, sequence_tokens=1017, batch_sequences=min(recipe.windows.batch_sequences, 16)),
        begin_with="",
    )
