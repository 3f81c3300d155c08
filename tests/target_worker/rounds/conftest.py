"""Tests of rounds that run on a CPU, and once more on a GPU, where rounds are graphs that are launched ahead."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.target_worker.rounds import driving

from outrider.target_worker.rounds.loop import RoundLoop


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the models of `driving` run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    driving.DEVICE = request.param
    yield request.param
    driving.DEVICE = "cpu"


@pytest.fixture(scope="module")
def loop(device: str, checkpoint: Path) -> RoundLoop:
    """Rounds of the tiny model."""
    return driving.make_loop(checkpoint)
