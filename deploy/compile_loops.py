"""Compiles all loops ahead: `python -m outrider.deploy.compile_loops`.

Else every role does it when it first starts, and roles that start together do it side by side (`outrider.compiled`).
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from outrider.compiled import IS_COMPILED


def _coordinator() -> None:
    from outrider.coordinator import warm_up

    warm_up.warm_up()


def _draft() -> None:
    from outrider import acceptance_calibration
    from outrider.draft_worker import child_kernels, draft_tree, guess_tree
    from outrider.engine import growth_kernels

    for module in (draft_tree, acceptance_calibration, child_kernels, guess_tree, growth_kernels):
        module.warm_up()


def _target() -> None:
    from outrider.target_worker import tree_step

    tree_step.warm_up()


_ROLES: tuple[Callable[[], None], ...] = (_coordinator, _draft, _target)


def main() -> int:
    """Each role's in a process of its own; nothing where nothing is compiled."""
    if IS_COMPILED:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            for done in [pool.submit(role) for role in _ROLES]:
                done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
