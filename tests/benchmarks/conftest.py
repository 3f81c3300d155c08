"""Logs of services that get wrong messages."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def silence() -> Iterator[None]:
    """Warnings about wrong messages are switched off."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
