"""Parameters that no request could have brought about are found before they reach a step that others share."""

import math

import pytest

from outrider.sampling import SamplingSpec


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "min_p": 1.0},
        {"temperature": 3e38, "repetition_penalty": 2.0, "presence_penalty": -2.0, "logit_bias": {99: -100.0}},
        {"stop_token_ids": (0, 99), "allowed_token_ids": (5,), "choice_index": 15},
    ],
)
def test_what_a_request_may_ask_for_is_no_fault(changes):
    assert SamplingSpec(**changes).fault(100) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        # Divided by.
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": -math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: -math.inf}}, "logit_bias"),
        # Packed as int32: one more ended the draft's thread.
        ({"choice_index": 1 << 31}, "choice_index"),
        ({"stop_token_ids": (100,)}, "token ids"),
        ({"allowed_token_ids": (3, 1 << 32)}, "token ids"),
        ({"logit_bias": {100: 1.0}}, "token ids"),
        ({"forced_token_ids": (100,), "max_new_tokens": 1}, "token ids"),
        ({"forced_token_ids": (3,), "max_new_tokens": 2}, "forced_token_ids"),
    ],
)
def test_what_none_may_ask_for_is_named(changes, named):
    assert named in (SamplingSpec(**changes).fault(100) or "")


def test_a_draft_may_know_fewer_tokens():
    assert SamplingSpec(stop_token_ids=(100,)).fault(None) is None
