"""Verdicts in columns are the verdicts that they were made of."""

from typing import Any, cast

import pytest

from outrider.coordinator.messages import FaultKind, SessionFault, SessionVerdict, TokenLogprobs
from outrider.coordinator.verdicts import Verdicts

LOGPROBS = TokenLogprobs(token_logprobs=[-1.0], top_token_ids=[[]], top_logprobs=[[]])
PLAIN = SessionVerdict(1, 7, accepted_nodes=[1, 3], token_ids=[11, 12, 13])
OTHERS = [
    SessionVerdict(2, 1, accepted_nodes=[], token_ids=[5], logprobs=LOGPROBS, cached_tokens=32),
    SessionVerdict(3, 1, deferred=True),
    SessionVerdict(4, 2, fault=SessionFault(kind=FaultKind.LOST, message="gone")),
]


@pytest.mark.parametrize("verdicts", [[PLAIN], [PLAIN, OTHERS[0]], [PLAIN, *OTHERS]])
def test_one_by_one_they_are_what_they_were(verdicts):
    columns = Verdicts.of(verdicts)
    assert list(columns) == verdicts
    assert columns[1:] == verdicts[1:]
    assert columns.have_tokens == (len(verdicts) < 4)
    assert Verdicts.of(columns) is columns


@pytest.mark.parametrize(
    "short", ["epochs", "accepted", "token_ids", "deferred", "faults", "logprobs", "cached_tokens"]
)
def test_columns_that_do_not_fit_are_none(short):
    columns: dict[str, Any] = {
        "session_ids": [1, 2, 3],
        "epochs": [1] * 3,
        "accepted": [[]] * 3,
        "token_ids": [[5]] * 3,
    }
    assert len(Verdicts(**columns)) == 3
    with pytest.raises(ValueError, match="entries given for 3 sessions"):
        Verdicts(**{**columns, short: cast("Any", [None, None])})
