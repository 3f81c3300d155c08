from __future__ import annotations

import subprocess
import sys

import torch

from outrider.kernels import backend


def test_interpreter_takes_cpu_tensors(triton_device: torch.device) -> None:
    assert backend.uses_triton(torch.zeros(1, device=triton_device))


_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from outrider import ops
from outrider.kernels import backend
assert not backend.HAS_TRITON
one = torch.ones(1)
row = torch.tensor([[0.0, 5.0, 1.0]])
assert ops.coupled_choice(row, one.long(), one.long(), one * 0, one.long(), one, one * 0).tolist() == [1]
"""


def test_operators_work_where_triton_is_not_installed() -> None:
    run = subprocess.run([sys.executable, "-c", _WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
