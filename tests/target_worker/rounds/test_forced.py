"""Outputs that are known and have only to be scored: every token is committed, with the log probability it has."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.target_worker.plain_decoding import Plain, check_logprobs
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    Decoded,
    Driver,
    TreeMaker,
    make_loop,
    most_rounds,
    no_tree,
    open_request,
    random_tree,
)
from transformers import PreTrainedModel

from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec
from outrider.target_worker.rounds.loop import RoundLoop
from outrider.target_worker.sessions.requests import SessionFault

pytestmark = pytest.mark.usefixtures("device")

FORCED = tuple(random.Random(3).choices(range(61), k=75))
SCORE = SamplingSpec(forced_token_ids=FORCED, max_new_tokens=len(FORCED), logprobs=2)


@torch.inference_mode()
def check_scores(decoded: Decoded, model: PreTrainedModel) -> None:
    assert decoded.tokens == list(FORCED)
    assert decoded.finish is Finish.LENGTH
    rows = model(torch.tensor([[*PROMPT, *FORCED]])).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    check_logprobs(decoded.results, Plain(list(FORCED), list(rows)), 2)


@pytest.mark.parametrize("make_tree", [no_tree, random_tree])
def test_forced_outputs_have_the_log_probabilities_of_the_whole_text(
    loop: RoundLoop, reference_model: PreTrainedModel, make_tree: TreeMaker
) -> None:
    driver, before = Driver(loop), loop.rounds_read
    decoded = driver.open(1, SCORE, FORCED, make_tree)
    driver.run()
    check_scores(decoded, reference_model)
    if make_tree is no_tree:
        # A round scores as many as it verifies, of one session 16, and one takes the prompt.
        assert loop.rounds_read - before <= 1 + most_rounds(len(FORCED), each=16)


def test_scored_sessions_share_rounds_with_others_and_go_on_where_they_were(
    loop: RoundLoop, reference_model: PreTrainedModel
) -> None:
    driver = Driver(loop)
    alone = driver.open(1, SPECS["coupled"], [], no_tree)
    driver.run()
    driver = Driver(loop)
    scored = driver.open(1, SCORE, FORCED, no_tree)
    beside = driver.open(2, SPECS["coupled"], [], no_tree)
    resumed = driver.open(3, SCORE, FORCED, no_tree, output=FORCED[:41])
    driver.run()
    check_scores(scored, reference_model)
    assert resumed.tokens == list(FORCED[41:])
    assert beside.tokens == alone.tokens


def test_a_scored_session_that_is_preempted_begins_again_where_it_was(
    checkpoint: Path, reference_model: PreTrainedModel
) -> None:
    loop = make_loop(checkpoint, num_slots=100)
    driver = Driver(loop)
    older = driver.open(1, SamplingSpec(max_new_tokens=60), [], no_tree)
    scored = driver.open(2, SCORE, FORCED, no_tree)
    driver.run()
    check_scores(scored, reference_model)
    assert loop.preemptions and len(older.tokens) == 60
    # What is left of it fits into one round.
    again = next(place for place, result in enumerate(scored.results) if result.lost)
    assert len(scored.results[again:]) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"max_new_tokens": len(FORCED) + 1},
        {"temperature": 1.0},
        {"stop_token_ids": (3,)},
        {"logit_bias": {3: 1.0}},
        {"frequency_penalty": 0.5},
        {"forced_token_ids": (*FORCED[1:], 61)},
    ],
)
def test_what_would_change_a_forced_output_is_refused(loop: RoundLoop, changed: dict[str, Any]) -> None:
    given = {"forced_token_ids": FORCED, "max_new_tokens": len(FORCED), **changed}
    with pytest.raises(SessionFault, match=r"forced_token_ids|token ids from 0"):
        loop.open(open_request(1, SamplingSpec(**given)))
    assert not loop.session_count
