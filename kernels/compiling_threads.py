"""Threads in which Triton compiles several kernels at once, by launching them."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_THREADS = 8


@contextmanager
def compiling_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield threads that may launch kernels for the first time; the calling thread may do so, too.

    Triton builds a kernel's launcher at its first launch, without locks:

    - A second thread may find a launcher whose kernel is not loaded yet. Here it waits.
    - Before 3.7 the launchers of all kernels are modules of one name. Python keeps one module of a name, so that a
      thread may read another kernel's launcher from it ("function takes exactly 27 arguments (33 given)"). Here each
      has a name of its own.
    """
    from triton import compiler
    from triton.runtime import build

    kernel_type: Any = compiler.CompiledKernel
    run, load = kernel_type.run, build._load_module_from_path
    locks, numbers = dict[int, threading.Lock](), itertools.count()

    def run_when_loaded(kernel: Any) -> Any:
        with locks.setdefault(id(kernel), threading.Lock()):
            return run.fget(kernel)

    def load_apart(name: str, path: str) -> ModuleType:
        # Python finds the module's function by what follows the last dot.
        return load(f"launcher_{next(numbers)}.{name}", path)

    kernel_type.run, build._load_module_from_path = property(run_when_loaded), load_apart
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            yield threads
    finally:
        kernel_type.run, build._load_module_from_path = run, load
