"""Rounds against a plain loop over transformers' own forward with the same choice rule."""

import pytest
from tests.target_worker.plain_decoding import check_logprobs, plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    SPECS,
    Driver,
    adversarial_tree,
    make_loop,
    most_rounds,
    no_tree,
    oracle_tree,
    random_tree,
)
from transformers import MistralForCausalLM

from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec

pytestmark = pytest.mark.usefixtures("device")
TREES = [random_tree, oracle_tree, adversarial_tree, no_tree]


@pytest.mark.parametrize("name", SPECS)
def test_any_tree_gives_plain_decoding(name, loop, reference_model):
    spec = SPECS[name]
    plain = plain_decode(reference_model, PROMPT, spec)
    rounds = {}
    for make_tree in TREES:
        driver = Driver(loop, seed=1)
        decoded = driver.open(1, spec, plain.tokens, make_tree)
        driver.run()
        assert decoded.tokens == plain.tokens, make_tree.__name__
        stopped = plain.tokens[-1] in spec.stop_token_ids
        assert decoded.finish is (Finish.STOP if stopped else Finish.LENGTH)
        rounds[make_tree] = len(decoded.results)
        if spec.logprobs is not None:
            check_logprobs(decoded.results, plain, spec.logprobs)
    assert rounds[no_tree] == len(plain.tokens)
    assert rounds[oracle_tree] <= most_rounds(len(plain.tokens), each=5), "the oracle's nodes were not accepted"
    assert (loop.session_count, loop.kv.slots.used) == (0, 0)


def test_specs_meet_what_they_are_for(reference_model):
    """Stop tokens occur before the limit, min_new_tokens changes something, penalties too."""
    outputs = {name: plain_decode(reference_model, PROMPT, spec).tokens for name, spec in SPECS.items()}
    assert len(outputs["stop"]) < 40
    assert 9 < len(outputs["min-new"]) < 40 or outputs["min-new"][9] % 3 == 0
    assert outputs["penalties"] != outputs["greedy"]


def test_a_sliding_window_sees_as_far_as_it_does_in_plain_decoding(windowed):
    model = MistralForCausalLM.from_pretrained(windowed, attn_implementation="eager").eval()
    spec = SamplingSpec(temperature=1.0, seed=2, max_new_tokens=24)
    plain = plain_decode(model, PROMPT, spec).tokens
    driver = Driver(make_loop(windowed, chunk=3))
    outputs = [driver.open(number, spec, plain, maker) for number, maker in enumerate((random_tree, oracle_tree))]
    driver.run()
    assert [decoded.tokens for decoded in outputs] == [plain] * 2
