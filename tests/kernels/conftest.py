"""Where the kernel tests run: references on the CPU, Triton through its interpreter, and Triton on a GPU.

Triton decides at import whether to interpret, so one process cannot hold both. Tests that take `triton_device` come
twice: their interpreter half is left out of an ordinary run and run by `test_interpreter.py` in a process of its own,
their CUDA half is marked `gpu` and skipped where there is no CUDA. Those that take `device` run the reference too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.kernels import backend

_TRITON = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=_TRITON)
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which operators run their Triton kernels."""
    return _device_of(request.param)


@pytest.fixture(params=["reference", *_TRITON])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device on which operators run their references, or their Triton kernels."""
    return _device_of(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """A CUDA device, for what only one can show."""
    return _device_of(request.param)


def _device_of(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device("cpu")
    if backend.INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and no interpreter")
    return torch.device("cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    kept, left_out = [], []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        interpreted = "interpreter" in (parameters.get("triton_device"), parameters.get("device"))
        belongs = here not in item.path.parents or interpreted == backend.INTERPRETED
        (kept if belongs else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _patch_language_once_a_launch() -> None:
    """Triton's interpreter replaces the functions of its language at every launch, and again whenever a kernel calls
    another jit function: a third of its time here, for nothing. Once a launch and module of jit functions is enough.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> interpreter._LangPatchScope:
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def launch_patched_anew(self: interpreter.GridExecutor, *arguments: Any, **options: Any) -> None:
        # What the last one has replaced was put back when it ended.
        patched.clear()
        launch(self, *arguments, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_patched_anew


if backend.INTERPRETED:
    _patch_language_once_a_launch()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


def _chi_square_p(observed: torch.Tensor, law: torch.Tensor) -> float:
    """Probability of counts as far from `law` as `observed`; 0 where something impossible was seen."""
    expected = law.double() * observed.sum()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    # Cells with few expected counts are put together, as the approximation needs.
    small = expected < 8
    cells = torch.cat([observed[~small].double(), observed[small].sum()[None].double()])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    statistic = ((cells - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(float(len(wanted) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.fixture
def chi_square_p() -> Callable[[torch.Tensor, torch.Tensor], float]:
    return _chi_square_p
