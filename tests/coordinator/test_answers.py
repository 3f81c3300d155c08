"""Workers' answers that must not be used; each brought a coordinator into trouble before it was refused."""

import random

import numpy as np
import pytest

from outrider.coordinator import answers
from outrider.coordinator.answers import check_additions, check_report, check_verification, usable_acceptance
from outrider.v1 import common_pb2, target_pb2


def answer(**changes) -> target_pb2.VerifyResponse:
    """Two sessions: one accepted two nodes of three, the other one emitted a token alone."""
    columns = {
        "step": 4,
        "session_ids": [7, 9],
        "epochs": [1, 1],
        "outcomes": [target_pb2.OUTCOME_ACCEPTED] * 2,
        "accepted_counts": [2, 0],
        "accepted_nodes": [1, 3],
        "token_counts": [3, 1],
        "tokens": [5, 6, 7, 8],
    }
    return target_pb2.VerifyResponse(**columns | changes)


def check(response: target_pb2.VerifyResponse) -> None:
    check_verification(response, {7: 3, 9: 0}, vocab_size=100)


def test_what_a_target_says_is_taken():
    check(answer())
    # A walk that ended at a stop token has no final one.
    check(answer(token_counts=[2, 1], tokens=[5, 6, 8]))
    for outcome in (target_pb2.OUTCOME_DEFERRED, target_pb2.OUTCOME_ERROR):
        check(answer(token_counts=[3, 0], tokens=[5, 6, 7], outcomes=[target_pb2.OUTCOME_ACCEPTED, outcome]))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 6, 7, 100]},
        {"tokens": [5, 6, 7]},
        {"token_counts": [4, 0]},
        {"accepted_nodes": [1]},
        {"accepted_nodes": [0, 1]},
        {"accepted_nodes": [1, 4]},
        {"accepted_nodes": [3, 1]},
        {"accepted_nodes": [3, 3]},
        {"session_ids": [7, 7]},
        {"logprobs": [target_pb2.Logprobs(row=2)]},
        # Of two tokens without an accepted node, the tree that follows would hang below a child of the old root.
        {"token_counts": [3, 2], "tokens": [5, 6, 7, 8, 9]},
        {"accepted_counts": [0, 0], "accepted_nodes": [], "token_counts": [2, 1], "tokens": [5, 6, 8]},
        {"token_counts": [1, 1], "tokens": [5, 8]},
        {"outcomes": [target_pb2.OUTCOME_ACCEPTED, target_pb2.OUTCOME_DEFERRED]},
        {"outcomes": [target_pb2.OUTCOME_ENDED, target_pb2.OUTCOME_ACCEPTED]},
        {"outcomes": [target_pb2.OUTCOME_ERROR, *[target_pb2.OUTCOME_ACCEPTED] * 2]},
        {"accepted_counts": [2, 0, 0]},
        {"token_counts": [3, 1, 0]},
        # An outcome that is none, which is what a worker says that forgets it.
        {"token_counts": [3, 0], "tokens": [5, 6, 7], "outcomes": [target_pb2.OUTCOME_ACCEPTED, 0]},
        # 2^64 - 1 ns in one report, and no one could be told of the server's state any more.
        {"report": common_pb2.StepReport(step_ns=(1 << 64) - 1)},
        {"report": common_pb2.StepReport(forward_ns=1 << 63)},
        {"report": common_pb2.StepReport(tokens=(1 << 32) - 1)},
    ],
)
def test_what_no_target_says_is_refused(changes):
    with pytest.raises(ValueError, match=r"needed|given|reported|twice|at most|there is not"):
        check(answer(**changes))


def test_what_passes_at_once_would_pass_entry_by_entry(monkeypatch):
    """Answers by dice, right or wrong in one number: where nothing is wrong, and nobody left out, it passes at once."""
    usual = answers._is_usual
    monkeypatch.setattr(answers, "IS_COMPILED", False)
    dice, passed = random.Random(5), 0
    for _ in range(3000):
        counts = [dice.randrange(1, 4) for _ in range(dice.randrange(1, 5))]
        columns = {
            "session_ids": list(range(1, len(counts) + 1)),
            "outcomes": [target_pb2.OUTCOME_ACCEPTED] * len(counts),
            "token_counts": counts,
            "accepted_counts": [count - dice.choice((0, 1)) for count in counts],
            "tokens": [dice.randrange(9) for _ in range(sum(counts))],
        }
        columns["accepted_nodes"] = [node + 1 for count in columns["accepted_counts"] for node in range(count)]
        if (wrong := columns[dice.choice(list(columns))]) and dice.random() < 0.7:
            wrong[dice.randrange(len(wrong))] += dice.choice((-1, 1))
        asked = {session_id: dice.randrange(2, 5) for session_id in range(1, len(counts) + 1)}
        try:
            response = target_pb2.VerifyResponse(**columns)
        except ValueError:
            continue
        try:
            check_verification(response, asked, vocab_size=9)
            is_right = True
        except ValueError:
            is_right = False
        is_whole = columns["session_ids"] == list(asked) and set(columns["outcomes"]) == {target_pb2.OUTCOME_ACCEPTED}
        assert usual(response, asked, 9) == (is_right and is_whole)
        passed += is_right
    assert 500 < passed < 2500


def test_no_more_additions_are_given_than_were_sent():
    for given in range(3):
        check_additions(answer(additions=given), 2)
    with pytest.raises(ValueError, match="additions: 3 given, 2 were sent"):
        check_additions(answer(additions=3), 2)


def test_a_long_step_and_a_large_one_are_taken():
    check_report(common_pb2.StepReport(step_ns=10**11, tokens=100_000))


def test_estimates_are_numbers_from_0_to_1():
    values = np.array([0.5, 1.0000001, -0.1], dtype=np.float32)
    assert usable_acceptance(values).tolist() == [0.5, 1.0, 0.0]
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="no numbers"):
            usable_acceptance(np.array([0.5, wrong], dtype=np.float32))
