"""What grows in a benchmark: a shape with random weights on a GPU, or a model whose device answers at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from benchmarks.draft_bench.drive import Point
from benchmarks.target_bench.models import shape_model
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.engine.config import EngineConfig
from outrider.engine.draft_staging import RankedChildren
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_buffers import StagedStep
from outrider.engine.step_program import answer_len

_MAX_MODEL_LEN = 4096


class IdleDevice:
    """A launched step that is done already, with drawn children in place of ranked ones.

    Gaps between the scores of a row are those of the largest of Gumbel draws, as under coupled sampling.
    """

    is_done = True
    _answers: dict[int, np.ndarray] = {}  # noqa: RUF012 - drawn once, for all steps of a size

    def __init__(self, staged: StagedStep) -> None:
        self._staged = staged

    def wait(self) -> None:
        """Nothing to wait for."""

    def device_ns(self) -> int:
        """No time."""
        return 0

    def children(self) -> RankedChildren:
        """Drawn ones."""
        words = answer_len(self._staged.bucket)
        if words not in self._answers:
            chance = np.random.default_rng(words)
            rows, count = self._staged.bucket.logit_rows, self._staged.bucket.children
            # Distinct within a row.
            tokens = chance.integers(0, 1000, (rows, 1)) * count + np.arange(count)
            scores = -np.sort(-chance.gumbel(size=(rows, count)).astype(np.float32) * 2, axis=1)
            log_q = np.log(chance.dirichlet(np.ones(count), rows)).astype(np.float32)
            self._answers[words] = np.stack([tokens.astype(np.int32), log_q.view(np.int32), scores.view(np.int32)])
        return RankedChildren(self._answers[words].ravel(), self._staged)


@contextmanager
def idle_checkpoint(max_model_len: int = _MAX_MODEL_LEN) -> Iterator[Path]:
    """The folder of a model that is never run."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=max_model_len,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        yield Path(folder)


@contextmanager
def idle_growth(point: Point) -> Iterator[TreeGrowth]:
    """Growth over a model that is never run."""
    with idle_checkpoint() as folder:
        runner = ModelRunner(_engine(folder, point, "cpu"), decoder=True)
        assert runner.steps is not None
        runner.steps.launch = IdleDevice  # pyright: ignore[reportAttributeAccessIssue] - a device that takes no time
        growth = TreeGrowth(runner, growth_config(point))
        # As on a device that works on its own.
        growth._launcher.overlaps = True
        yield growth


@contextmanager
def shape_growth(shape: str, points: list[Point]) -> Iterator[ModelRunner]:
    """A shape with random weights on the GPU, with room for any of the points."""
    largest = Point(sessions=max(point.sessions for point in points), width=max(point.width for point in points))
    credit = max(point.credit for point in points)
    with shape_model(shape, torch.device("cuda"), widened=False) as model:
        config = _engine(model.folder, largest, "cuda", max_nodes=credit)
        yield ModelRunner(config, decoder=True, source=model.source)


def growth_config(point: Point) -> GrowthConfig:
    """So that every step can be as wide as the point says: nothing is too unlikely."""
    return GrowthConfig(
        max_step_nodes=point.width,
        max_session_nodes=point.width,
        max_live_nodes=point.credit,
        max_model_len=_MAX_MODEL_LEN,
        min_path_value=0.0,
        min_acceptance=0.0,
    )


def _engine(folder: Path, point: Point, device: str, *, max_nodes: int | None = None) -> EngineConfig:
    nodes = point.credit if max_nodes is None else max_nodes
    return EngineConfig(
        model_path=folder,
        device=device,
        num_slots=point.sessions * (_MAX_MODEL_LEN + nodes),
        max_num_seqs=point.sessions,
        max_model_len=_MAX_MODEL_LEN,
        max_tree_nodes=nodes,
    )
