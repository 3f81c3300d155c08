"""Functions as machine code: loops over arrays, whole numbers and floats, for numba compiles nothing else."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function as machine code that leaves the interpreter to other threads.

    What is kept on disk is made anew when the function's own file changes, and only then: constants of others go in
    as arguments, or stay as they are. Who changes a function of a checkout that another file's compiled one calls
    (`trie.find`) removes `__pycache__/*.nbi` there.
    """
    try:
        return cast("_Function", njit(cache=True, nogil=True)(function))
    except RuntimeError:
        # Nowhere to keep what was compiled (a container whose files cannot be written): then at every start anew.
        return cast("_Function", njit(nogil=True)(function))
