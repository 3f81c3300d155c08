"""Errors come back whole from other processes."""

import pickle

import pytest

from outrider import errors
from outrider.errors import FieldViolation, InvalidRequest, OutriderError, Overloaded

_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)]


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_pickle_keeps_what_an_error_says(kind: type[OutriderError]):
    if kind is InvalidRequest:
        error: OutriderError = InvalidRequest(
            [FieldViolation("seed", "at most 7"), FieldViolation("prompt", "too long")]
        )
    elif kind is Overloaded:
        error = Overloaded("the queue is full", retry_after_s=2.5)
    else:
        error = kind("why")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert str(found) == str(error)
    assert vars(found) == vars(error)
