"""Logs of services that get wrong messages."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def silence() -> Iterator[None]:
    """What every wrong message is answered with is no news."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
