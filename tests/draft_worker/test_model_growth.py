"""Growth on a real model: random weights, random commits, logits against a fresh forward over the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.draft_worker.choice import ChildChooser
from outrider.draft_worker.draft_tree import DraftNode
from outrider.draft_worker.growth import TreeGrowth
from outrider.draft_worker.growth_config import GrowthConfig
from outrider.draft_worker.session import GrowthLimits
from outrider.engine.batch import BatchBuilder
from outrider.engine.model_runner import EngineConfig, ModelRunner
from outrider.sampling import SamplingSpec

Make = Callable[..., Any]


def fresh_logits(runner: ModelRunner, context: list[int]) -> np.ndarray:
    row = runner.slots.acquire_row()
    runner.slots.extend(row, len(context))
    builder = BatchBuilder()
    builder.add_chain(row, context, 0, want_last_logits=True)
    logits = runner.forward(builder.build())[0].numpy()
    runner.slots.release_row(row)
    return logits


def path_tokens(node: DraftNode) -> list[int]:
    tokens: list[int] = []
    walk: Any = node
    while walk.parent is not None:
        tokens.insert(0, walk.token)
        walk = walk.parent
    return tokens


@pytest.fixture
def chosen_from(monkeypatch: pytest.MonkeyPatch) -> dict[DraftNode, np.ndarray]:
    """The logits from which each node's children were chosen."""
    found: dict[DraftNode, np.ndarray] = {}
    choose = ChildChooser.choose

    def recording(self: ChildChooser, rows: Any, logits: torch.Tensor) -> Any:
        found.update(zip([node for _, node in rows], logits.numpy().copy(), strict=True))
        return choose(self, rows, logits)

    monkeypatch.setattr(ChildChooser, "choose", recording)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_any_commits_logits_are_those_of_a_fresh_forward(
    checkpoint: Path, make_start: Make, chosen_from: dict[DraftNode, np.ndarray], temperature: float
):
    reference = ModelRunner(EngineConfig(model_path=checkpoint, num_slots=300, max_num_seqs=1, torch_threads=1))
    runner = ModelRunner(EngineConfig(model_path=checkpoint, num_slots=600, max_num_seqs=3, torch_threads=1))
    config = GrowthConfig(max_step_nodes=6, max_step_tokens=20, max_model_len=256, min_path_value=0, min_acceptance=0)
    growth = TreeGrowth(runner, config)
    rng = np.random.default_rng(int(temperature))
    for number in (1, 2):
        spec = SamplingSpec(temperature=temperature, seed=number, max_new_tokens=150)
        prompt = rng.integers(0, 96, 30).tolist()
        growth.open(make_start(number, prompt=prompt, sampling=spec, limits=GrowthLimits(max_live_nodes=60)))
    checked: set[DraftNode] = set()
    for _ in range(12):
        for _ in range(5):
            growth.step()
        for number in (1, 2):
            session = growth.session((7, number))
            assert session is not None
            for node in (session.tree.root, *session.tree.nodes()):
                if node.child_tokens is not None and node not in checked:
                    expected = fresh_logits(reference, session.tokens + path_tokens(node))
                    np.testing.assert_allclose(chosen_from[node], expected, atol=2e-4)
                    checked.add(node)
            tokens, node = [], session.tree.root
            while node.children and rng.random() < 0.75:
                node = list(node.children.values())[min(int(rng.exponential(0.7)), len(node.children) - 1)]
                tokens.append(node.token)
            if not tokens or rng.random() < 0.3:
                tokens.append(int(rng.integers(96)))
            growth.commit((7, number), 1, session.length, tokens)
    assert len(checked) > 150
    growth.close_owned("owner")
    assert runner.slots.used == 0
