"""Kernels that several threads compile at once, by stand-ins for what Triton does to launch one."""

import importlib.util
import threading
import time
from typing import Any

import pytest

from outrider.kernels.compiling_threads import compiling_threads

compiler: Any = pytest.importorskip("triton.compiler")
build: Any = pytest.importorskip("triton.runtime.build")


def test_no_thread_launches_a_kernel_that_another_is_loading(monkeypatch: pytest.MonkeyPatch):
    class Kernel(compiler.CompiledKernel):
        def __init__(self) -> None:
            self._run = self.module = self.function = None

    def init_handles(kernel: Any) -> None:
        # In Triton's order.
        kernel._run = threading.get_ident()
        time.sleep(0.02)
        kernel.function = "loaded"

    monkeypatch.setattr(compiler.CompiledKernel, "_init_handles", init_handles)
    before, kernels = compiler.CompiledKernel.run, [Kernel() for _ in range(4)]

    def launch(kernel: Any) -> tuple[Any, Any]:
        return kernel.run, kernel.function

    with compiling_threads() as threads:
        found = list(threads.map(launch, [kernel for kernel in kernels for _ in range(4)]))
    assert {function for _, function in found} == {"loaded"}
    # Each is loaded once, and several at a time.
    assert len({launcher for launcher, _ in found}) > 1
    assert compiler.CompiledKernel.run is before


def test_launchers_are_modules_of_names_of_their_own():
    # Any module that is a shared library, as Triton's are.
    spec = importlib.util.find_spec("markupsafe._speedups")
    assert spec is not None and spec.origin is not None
    before = build._load_module_from_path
    with compiling_threads():
        one, other = (build._load_module_from_path("_speedups", spec.origin) for _ in range(2))
    assert one is not other and one.__name__ != other.__name__
    assert one.__name__.endswith("._speedups") and one.__file__ == spec.origin
    assert build._load_module_from_path is before
