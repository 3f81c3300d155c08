"""Compiles loops over arrays, whole numbers and floats with numba."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Return the function as machine code that runs without the GIL.

    The cache on disk is made anew only when the function's own file changes. After a change to a compiled function that
    another file's calls (`trie.find`), remove `__pycache__/*.nbi`.
    """
    try:
        return cast("_Function", njit(cache=True, nogil=True)(function))
    except RuntimeError:
        # Nowhere to keep what was compiled (a container whose files cannot be written): then at every start anew.
        return cast("_Function", njit(nogil=True)(function))
