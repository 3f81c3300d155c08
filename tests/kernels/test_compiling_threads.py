"""Kernels that several threads compile at once."""

import threading
import time
from typing import Any

import pytest

from outrider.kernels.compiling_threads import compiling_threads

triton_compiler: Any = pytest.importorskip("triton.compiler")


def test_launchers_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch):
    class Kernel(triton_compiler.CompiledKernel):
        def __init__(self) -> None:
            self._run = self.module = None

    made, at_once = list[int](), list[int]()

    def init_handles(_: Kernel) -> None:
        made.append(threading.get_ident())
        at_once.append(len(made) - finished.count)
        time.sleep(0.005)
        finished.count += 1

    class Finished:
        count = 0

    finished = Finished()
    monkeypatch.setattr(triton_compiler.CompiledKernel, "_init_handles", init_handles)
    before = triton_compiler.CompiledKernel.run
    with compiling_threads() as threads:
        list(threads.map(lambda kernel: kernel.run, [Kernel() for _ in range(12)]))
    assert len(made) == 12 and len(set(made)) > 1
    assert set(at_once) == {1}
    assert triton_compiler.CompiledKernel.run is before
