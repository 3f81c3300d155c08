"""The memory check's inputs: every operator gets some, and on the CPU its reference survives them."""

import inspect

import pytest
import torch
from benchmarks.kernel_bench import malformed

from outrider import ops


def test_every_operator_is_among_them():
    source = inspect.getsource(malformed)
    # Two of the names compute nothing on the device.
    operators = {name for name in ops.__all__ if name[0].islower()} - {
        "create_config_for_draft_model",
        "extend_all_queries_by_N",
    }
    assert not {name for name in operators if f"ops.{name}(" not in source}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("group", malformed.GROUPS)
def test_references_and_kernels_survive_them(group: str, device: str):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    malformed.GROUPS[group](malformed.Inputs(torch.device(device)))
    if device == "cuda":
        torch.cuda.synchronize()
