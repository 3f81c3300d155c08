"""The Triton kernels against their references, without a GPU: the `triton_device` tests under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


# Some 45 s alone; a machine with other work may take several times as long.
@pytest.mark.slow
@pytest.mark.timeout(550)
def test_triton_kernels_agree_with_their_references_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="the interpreter is part of triton")
    root = Path(__file__).parents[2]
    # The interpreter computes masked-out lanes too, and numpy warns of what it finds there.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).parent, "-qpno:cacheprovider", "-Wignore::RuntimeWarning"],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) >= 100, run.stdout
