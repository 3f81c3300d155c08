"""Sessions of the verifier: truncated, opened again, refused, and at fault."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.verifying import PROMPT, TARGET_ONLY, make_verifier, open_request, tree_request
from transformers import PreTrainedModel

from outrider.sampling import SamplingSpec
from outrider.target_worker.sessions import Code, OpenRequest, Outcome, TreeRequest
from outrider.target_worker.verifier import Verifier


@pytest.fixture(scope="module")
def verifier(checkpoint: Path) -> Verifier:
    return make_verifier(checkpoint)


def test_a_shorter_length_truncates_and_a_longer_one_asks_to_reopen(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(temperature=1.0, seed=12, repetition_penalty=1.4, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7, (plain[:6], list(range(6))))])
    again = verifier.step([tree_request(1, 9, ([plain[2]], [0]))]).results[0]
    assert list(again.token_ids) == plain[2:4]
    ahead = verifier.step([tree_request(1, 40)]).results[0]
    assert ahead.fault is not None
    assert ahead.fault.code is Code.FAILED_PRECONDITION
    assert "open the session again" in ahead.fault.message
    assert verifier.session_count == 0


def test_truncating_forgets_what_penalties_counted(verifier: Verifier, reference_model: PreTrainedModel) -> None:
    spec = SamplingSpec(repetition_penalty=2.0, frequency_penalty=2.0, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7, (plain[:8], list(range(8))))])
    verifier.step([tree_request(1, 16)])
    again = [
        token for length in range(8, 18) for token in verifier.step([tree_request(1, length)]).results[0].token_ids
    ]
    verifier.close((7, 1), 1)
    assert again == plain[1:11]


def test_reopening_with_other_tokens_recomputes_what_differs(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=20)
    other = [(token + 1) % 61 for token in plain_decode(reference_model, PROMPT, spec).tokens[:3]]
    verifier.open(open_request(1, spec))
    verifier.step([tree_request(1, 7)])
    verifier.step([tree_request(1, 8)])
    verifier.step([tree_request(1, 9)])
    verifier.open(open_request(1, spec, epoch=2, output=other))
    step = verifier.step([tree_request(1, 10, epoch=2)])
    verifier.close((7, 1), 2)
    expected = plain_decode(reference_model, [*PROMPT, *other], replace(spec, max_new_tokens=1)).tokens
    assert list(step.results[0].token_ids) == expected
    assert step.tokens == 3, "the prompt's KV was not kept"


def test_reopening_keeps_the_shared_prefix_and_refuses_older_epochs(
    verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    verifier.open(open_request(1, spec, epoch=2))
    verifier.step([tree_request(1, 7, (plain[:6], list(range(6))), epoch=2)])
    verifier.open(open_request(1, spec, epoch=3, output=plain[:4]))
    step = verifier.step([tree_request(1, 11, ([plain[4]], [0]), epoch=3)])
    assert list(step.results[0].token_ids) == plain[4:6]
    assert step.tokens == 2, "KV of the shared tokens was recomputed"
    with pytest.raises(Exception, match="epoch 2 is over"):
        verifier.open(open_request(1, spec, epoch=2))
    ghost = verifier.step([tree_request(1, 13, epoch=2)]).results[0]
    assert ghost.fault is not None
    assert ghost.fault.code is Code.FAILED_PRECONDITION
    verifier.close((7, 1), 2)
    assert verifier.session_count == 1, "a ghost closed a session that was reopened"
    verifier.close((7, 1), 3)
    assert verifier.slots_used == 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (tree_request(9, 7), Code.NOT_FOUND),
        (tree_request(1, 7, epoch=2), Code.NOT_FOUND),
        (tree_request(1, 7, ([61], [0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([-1], [0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1, 2], [0, 2])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1], [-1])), Code.INVALID_ARGUMENT),
        (tree_request(1, 7, ([1], [0, 0])), Code.INVALID_ARGUMENT),
        (tree_request(1, 6), Code.INVALID_ARGUMENT),
        (tree_request(1, 8), Code.FAILED_PRECONDITION),
    ],
)
def test_a_fault_is_its_own_sessions(
    request_: TreeRequest, code: Code, verifier: Verifier, reference_model: PreTrainedModel
) -> None:
    spec = SamplingSpec(max_new_tokens=4)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    for number in (1, 2):
        verifier.open(open_request(number, spec))
    step = verifier.step([request_, tree_request(2, 7, (plain[:2], [0, 1]))])
    assert step.results[0].fault is not None
    assert step.results[0].fault.code is code
    assert list(step.results[1].token_ids) == plain[:3]
    for number in (1, 2):
        verifier.close((7, number), 9)
    assert (verifier.session_count, verifier.slots_used) == (0, 0)


def test_a_repeated_session_is_a_fault_of_both_entries(verifier: Verifier) -> None:
    verifier.open(open_request(1, SamplingSpec()))
    step = verifier.step([tree_request(1, 7), tree_request(1, 7)])
    assert [result.outcome for result in step.results] == [Outcome.ERROR] * 2
    assert verifier.session_count == 0


def test_the_end_of_a_session_is_a_fault_not_a_token(verifier: Verifier) -> None:
    verifier.open(open_request(1, SamplingSpec(max_new_tokens=1)))
    assert len(verifier.step([tree_request(1, 7)]).results[0].token_ids) == 1
    over = verifier.step([tree_request(1, 8)]).results[0]
    assert over.fault is not None
    assert "ends at 8" in over.fault.message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (open_request(1, SamplingSpec(), prompt=[]), "prompt: empty"),
        (open_request(1, SamplingSpec(), prompt=[61]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), output=[99]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), prompt=[1] * 97), "the model takes 96"),
        (open_request(1, SamplingSpec(logit_bias={61: 1.0})), "sampling: token ids"),
        (open_request(1, replace(TARGET_ONLY, threshold_single=0.0)), "thresholds: .0.0, 1.0. given"),
        (open_request(1, replace(TARGET_ONLY, threshold_acc=1.5)), "thresholds"),
        (open_request(1, SamplingSpec(choice_index=2**31)), "choice_index: 2147483648 given"),
        (open_request(1, SamplingSpec(min_new_tokens=1, allowed_token_ids=(3,), stop_token_ids=(3, 4))), "leaves no"),
    ],
)
def test_opens_that_cannot_be_served(request_: OpenRequest, message: str, verifier: Verifier) -> None:
    with pytest.raises(Exception, match=message):
        verifier.open(request_)
    assert verifier.session_count == 0


def test_more_sessions_than_rows_are_refused(checkpoint: Path) -> None:
    verifier = make_verifier(checkpoint, max_num_seqs=1)
    verifier.open(open_request(1, SamplingSpec()))
    with pytest.raises(Exception, match="max_num_seqs"):
        verifier.open(open_request(2, SamplingSpec()))


def test_output_ends_where_the_model_does(checkpoint: Path, reference_model: PreTrainedModel) -> None:
    verifier = make_verifier(checkpoint, max_model_len=12)
    spec = SamplingSpec(max_new_tokens=50)
    plain = plain_decode(reference_model, PROMPT, replace(spec, max_new_tokens=5)).tokens
    verifier.open(open_request(1, spec))
    tree = ([*plain, 1, 2, 3], list(range(8)))
    result = verifier.step([tree_request(1, 7, tree)]).results[0]
    assert list(result.token_ids) == plain
    assert list(result.accepted_nodes) == [1, 2, 3, 4, 5]
