"""Tests of rounds that run on a CPU, and once more on a GPU, where rounds are graphs that are launched ahead."""

from collections.abc import Iterator

import pytest
import torch
from tests.target_worker.rounds import driving


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the models of `driving` run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    driving.DEVICE = request.param
    yield request.param
    driving.DEVICE = "cpu"
