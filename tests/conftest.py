"""Threads of each process, and distribution of tests among several (`make test`): files stay whole, long ones begin."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

# One thread for each process, before any test imports torch. Small tensors gain nothing from more, and where other
# processes keep the cores busy, each of their operations waits until all its threads have been scheduled: a test of
# seconds takes minutes, and runs into its timeout.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# With its last channel grpc.aio ends its own thread, and waits for that for ever where an operation is still pending.
# One that is held here keeps it alive; the next test would start it again anyway.
grpc.aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue] - the stubs lack it

# The benchmarks are scripts of the repository, not part of the package: found from its root.
_ROOT = Path(__file__).resolve().parents[1]
if str(_ROOT) not in sys.path:
    sys.path.append(str(_ROOT))

# One process runs all files of these, one after the other: they share services, or each start a Ray.
_TOGETHER = ("tests/end_to_end/", "tests/deploy/")
# What takes longest begins, so that no process is left alone with it in the end.
_FIRST = ("tests/end_to_end/", "tests/kernels/test_interpreter.py", "tests/deploy/")


def _part(nodeid: str) -> str:
    """The folder or the file that a test belongs to."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Shares out what belongs together as one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _part(nodeid)

    # In the order of the tests, not by how many there are of a part.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # One process alone runs them in the order of the folders.
    if hasattr(config, "workerinput"):
        ranks = {part: rank for rank, part in enumerate(_FIRST)}
        items.sort(key=lambda item: ranks.get(_part(item.nodeid), len(ranks)))


def pytest_collection_finish() -> None:
    # What was imported stays until the end: no need for the garbage collector to look through it again and again.
    gc.collect()
    gc.freeze()
