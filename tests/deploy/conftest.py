"""Ray's remains are no fault of the tests that come after."""

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Where Ray had to be started twice, it forgets the processes of its first attempt, and Python complains of it when
    it collects them: here, not in the middle of another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
