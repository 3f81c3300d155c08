"""Functions as machine code where numba is there; where it is not, the same functions in plain Python.

What is written for this is loops over arrays, whole numbers and floats: numba compiles nothing else. Plain Python reads
entries of memoryviews sooner than numpy's, so that is what such functions get there (`entries`).
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

try:
    from numba import njit

    IS_COMPILED = True
except ImportError:
    IS_COMPILED = False


def compiled(function: _Function) -> _Function:
    """The function as machine code that leaves the interpreter to other threads, where numba is there.

    What is kept on disk is made anew when the function's own file changes, and only then: constants of others go in
    as arguments, or stay as they are. Who changes a function of a checkout that another file's compiled one calls
    (`trie.find`) removes `__pycache__/*.nbi` there.
    """
    if not IS_COMPILED:
        return function
    try:
        return cast("_Function", njit(cache=True, nogil=True)(function))
    except RuntimeError:
        # Nowhere to keep what was compiled (a container whose files cannot be written): then at every start anew.
        return cast("_Function", njit(nogil=True)(function))


def entries(array: Any) -> Any:
    """An array as a compiled function reads and writes it; it shares its memory."""
    return array if IS_COMPILED else memoryview(array)
