"""Threads in which Triton compiles several kernels at once, by launching them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_THREADS = 8


@contextmanager
def compiling_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield threads that may launch kernels for the first time; no other thread may launch one meanwhile.

    Triton before 3.7 loads the launcher of every kernel as a module of one and the same name, and reads its function in
    a second step: two threads at once may end up with one kernel's launcher for the other ("function takes exactly 27
    arguments (33 given)"). So launchers are made one at a time here; compiling, which comes before, goes on beside it.
    """
    from triton import compiler

    kernels: Any = compiler.CompiledKernel
    lock, made = threading.Lock(), kernels.run
    with ThreadPoolExecutor(_THREADS) as threads:

        def run(kernel: Any) -> Any:
            with lock:
                return made.fget(kernel)

        kernels.run = property(run)
        try:
            yield threads
            threads.shutdown()
        finally:
            kernels.run = made
