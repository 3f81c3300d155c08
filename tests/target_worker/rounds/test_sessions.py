"""Sessions in rounds: prefilled in chunks, preempted, held, opened again, refused and at fault."""

import random
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from tests.target_worker.plain_decoding import plain_decode
from tests.target_worker.rounds.driving import (
    PROMPT,
    TARGET_ONLY,
    Driver,
    make_loop,
    no_tree,
    open_request,
    oracle_tree,
    random_tree,
)
from tests.tiny_llama import write_llama

from outrider.kernels.pool.columns import MAX_STOPS
from outrider.kernels.verification.walk import Finish
from outrider.sampling import SamplingSpec, VerificationRule
from outrider.target_worker.sessions.requests import WITHOUT_LIMIT, Code, SessionFault

pytestmark = pytest.mark.usefixtures("device")
SYNTHETIC = SamplingSpec(verification=VerificationRule.SYNTHETIC)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_the_same_tokens_whatever_the_chunks_the_cache_and_preemption(chunk, caching, checkpoint, reference_model):
    """Sessions that begin alike, end and come again, in a KV cache that is too small for them all."""
    rng = random.Random(1)
    shared = [rng.randrange(61) for _ in range(20)]
    prompts = [[*shared[: rng.choice([8, 14, 20])], *(rng.randrange(61) for _ in range(4))] for _ in range(3)]
    prompts += [prompts[0], prompts[1]]
    specs = [SamplingSpec(temperature=1.0, seed=number, max_new_tokens=24) for number in range(5)]
    plain = [plain_decode(reference_model, prompt, spec).tokens for prompt, spec in zip(prompts, specs, strict=True)]
    loop = make_loop(checkpoint, num_slots=56, chunk=chunk, enable_prefix_caching=caching)
    driver, waiting = Driver(loop), list(range(5))
    while waiting or loop.session_count:
        if waiting and rng.random() < 0.3:
            number = waiting.pop(0)
            driver.open(number, specs[number], plain[number], random_tree, prompt=prompts[number])
        driver.turn()
    driver.run()
    assert [driver.decoded[number].tokens for number in range(5)] == plain
    cached = sum(driver.decoded[number].results[-1].cached_tokens for number in range(5))
    assert (cached > 0) == caching
    assert loop.kv.slots.used == 0
    assert (loop.kv.slots.remembered > 0) == caching
    assert loop.preemptions > 0


def test_the_oldest_session_never_loses_its_slots(checkpoint):
    driver = Driver(make_loop(checkpoint, num_slots=40))
    outputs = [driver.open(number, SamplingSpec(max_new_tokens=24, seed=number), [], no_tree) for number in range(3)]
    driver.run()
    assert driver.loop.preemptions > 0
    # Whose slots were taken is to send its trees again.
    assert not any(result.lost for result in outputs[0].results)
    assert any(result.lost for result in outputs[2].results)


def test_kv_outlives_its_session(loop, reference_model):
    prompt = [*range(40, 60), 3]
    spec = SamplingSpec(max_new_tokens=6)
    plain = plain_decode(reference_model, prompt, spec).tokens
    driver = Driver(loop)
    driver.open(1, spec, plain, no_tree, prompt=prompt)
    driver.run()
    # All of the prompt but its last token, and for a conversation that goes on the output as well.
    driver.open(2, spec, plain, no_tree, prompt=prompt)
    longer = driver.open(3, replace(spec, max_new_tokens=1), [], no_tree, prompt=[*prompt, *plain[:3], 9])
    driver.run()
    assert driver.decoded[2].tokens == plain
    assert driver.decoded[2].results[-1].cached_tokens == 20
    assert longer.results[-1].cached_tokens == 24
    assert driver.decoded[1].results[-1].cached_tokens == 0


def test_a_prompt_that_another_computes_is_computed_once(checkpoint):
    loop = make_loop(checkpoint, chunk=8)
    prompt = [number % 61 for number in range(40)]
    driver = Driver(loop)
    for number in range(4):
        driver.open(number, SamplingSpec(max_new_tokens=2, seed=number, temperature=1.0), [], no_tree, prompt=prompt)
    driver.run()
    assert sorted(driver.decoded[number].results[-1].cached_tokens for number in range(4)) == [0, 39, 39, 39]


def test_nobody_waits_for_the_prompt_of_a_session_that_is_held(checkpoint):
    loop = make_loop(checkpoint, chunk=8)
    prompt = [number % 61 for number in range(40)]
    driver, spec = Driver(loop), SamplingSpec(max_new_tokens=2)
    driver.open(1, spec, [], no_tree, prompt=prompt)
    loop.limit((7, 1), 1, 0)
    second = driver.open(2, spec, [], no_tree, prompt=prompt)
    for _ in range(100):
        driver.turn()
    assert len(second.tokens) == spec.max_new_tokens
    loop.limit((7, 1), 1, WITHOUT_LIMIT)
    driver.run()


def test_a_held_session_goes_on_where_it_stopped(loop, reference_model):
    spec = SamplingSpec(temperature=1.0, seed=3, max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    driver = Driver(loop)
    decoded = driver.open(1, spec, plain, oracle_tree)
    loop.limit((7, 1), 1, len(PROMPT) + 4)
    for _ in range(8):
        driver.turn()
    assert decoded.tokens == plain[:4]
    loop.turn()
    assert not loop.has_work, "a held session keeps the rounds turning"
    loop.limit((7, 1), 1, 0)
    driver.turn()
    loop.limit((7, 1), 1, WITHOUT_LIMIT)
    driver.run()
    assert decoded.tokens == plain


def test_growth_that_was_lost_is_asked_for_until_it_is_sent_again(loop):
    """A row full of candidates loses what comes; the worker is told, and told no more once it has begun again."""
    driver = Driver(loop)
    decoded = driver.open(1, SamplingSpec(max_new_tokens=30), [], no_tree)
    driver.turn()
    # It rests until all has come: what is grown for a length that a round has left behind is not lost.
    loop.limit((7, 1), 1, 0)
    while loop.has_work:
        driver.turn()
    for number in range(70):
        driver.grow(1, ([number % 61], [0]), as_of=len(PROMPT) + len(decoded.tokens), place=1)
        driver.grow(1, (list(range(60)), list(range(60))), as_of=len(PROMPT) + len(decoded.tokens), place=2)
    loop.limit((7, 1), 1, WITHOUT_LIMIT)
    while not decoded.results[-1].lost:
        driver.turn()
        assert not decoded.is_over
    assert decoded.results[-1].lost & 0b110
    assert not decoded.results[-1].lost & 0b1001
    for place in (1, 2):
        loop.resend((7, 1), 1, place)
    # Rounds that were launched before still tell it.
    while decoded.results[-1].lost:
        driver.turn()
        assert not decoded.is_over
    loop.close((7, 1), 1)
    driver.run()


def test_a_session_opened_again_keeps_its_kv_and_drops_old_growth(loop, reference_model):
    spec = SamplingSpec(max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    driver = Driver(loop)
    driver.open(1, spec, plain, oracle_tree, epoch=2)
    while len(driver.decoded[1].tokens) < 6:
        driver.turn()
    driver.open(1, spec, plain[4:], oracle_tree, epoch=3, output=plain[:4])
    driver.grow(1, ([60, 60], [0, 1]), as_of=len(PROMPT) + 4, epoch=2)
    with pytest.raises(SessionFault, match="epoch 2 is over"):
        loop.open(open_request(1, spec, epoch=2))
    loop.close((7, 1), 2)
    assert loop.session_count == 1, "a ghost closed a session that was reopened"
    driver.run()
    assert driver.decoded[1].tokens == plain[4:]
    assert loop.kv.slots.used == 0


def test_opening_again_with_other_tokens_continues_these(loop, reference_model):
    spec = SamplingSpec(max_new_tokens=20)
    plain = plain_decode(reference_model, PROMPT, spec).tokens
    other = [(token + 1) % 61 for token in plain[:3]]
    driver = Driver(loop)
    driver.open(1, spec, plain, no_tree)
    for _ in range(4):
        driver.turn()
    expected = plain_decode(reference_model, [*PROMPT, *other], replace(spec, max_new_tokens=17)).tokens
    driver.open(1, spec, expected, oracle_tree, epoch=2, output=other)
    driver.run()
    assert driver.decoded[1].tokens == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (open_request(1, SamplingSpec(), prompt=[]), "prompt: empty"),
        (open_request(1, SamplingSpec(), prompt=[61]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), output=[99]), "token ids from 0 to 60"),
        (open_request(1, SamplingSpec(), prompt=[1] * 97), "the model takes 96"),
        (open_request(1, SamplingSpec(logit_bias={61: 1.0})), "sampling: token ids"),
        (open_request(1, replace(TARGET_ONLY, threshold_single=0.0)), "thresholds: .0.0, 1.0. given"),
        (open_request(1, SamplingSpec(choice_index=2**31)), "choice_index: 2147483648 given"),
        (open_request(1, SamplingSpec(logprobs=21)), "logprobs: 21 given, at most 20"),
        (open_request(1, replace(SYNTHETIC, synthetic_rates=(0.5,) * 33)), "synthetic_rates: 33 given, at most 32"),
    ],
)
def test_opens_that_cannot_be_served(request_, message, loop):
    with pytest.raises(SessionFault, match=message):
        loop.open(request_)
    assert loop.session_count == 0


def test_more_sessions_than_rows_are_refused(checkpoint):
    loop = make_loop(checkpoint, max_num_seqs=1)
    loop.open(open_request(1, SamplingSpec()))
    with pytest.raises(SessionFault, match="max_num_seqs"):
        loop.open(open_request(2, SamplingSpec()))


def test_output_ends_where_the_model_does(checkpoint, reference_model):
    loop = make_loop(checkpoint, max_model_len=12)
    spec = SamplingSpec(max_new_tokens=50)
    plain = plain_decode(reference_model, PROMPT, replace(spec, max_new_tokens=5)).tokens
    driver = Driver(loop)
    decoded = driver.open(1, spec, [*plain, 1, 2, 3], oracle_tree)
    driver.run()
    assert decoded.tokens == plain
    assert decoded.finish is Finish.LENGTH


def test_an_output_that_is_complete_ends_at_once(loop):
    spec = SamplingSpec(max_new_tokens=2)
    driver = Driver(loop)
    decoded = driver.open(1, spec, [], no_tree, output=[1, 2])
    driver.run()
    assert (decoded.tokens, decoded.finish) == ([], Finish.LENGTH)


def test_a_prompt_as_long_as_the_cache_gets_a_token_and_holds_nobody_up(checkpoint):
    loop = make_loop(checkpoint, num_slots=10)
    driver = Driver(loop)
    decoded = driver.open(1, SamplingSpec(max_new_tokens=50), [], no_tree, prompt=[1] * 10)
    other = driver.open(2, SamplingSpec(max_new_tokens=2), [], no_tree, prompt=[2])
    driver.run()
    assert (len(decoded.tokens), len(other.tokens)) == (1, 2)
    assert decoded.results[-1].fault is not None


def test_a_session_that_waits_for_a_row_is_work(checkpoint):
    loop = make_loop(checkpoint, max_num_seqs=1)
    driver = Driver(loop)
    driver.open(1, SamplingSpec(max_new_tokens=50), [], no_tree)
    for _ in range(3):
        driver.turn()
    loop.close((7, 1), 1)
    decoded = driver.open(2, SamplingSpec(max_new_tokens=4), [], no_tree)
    driver.run()
    assert len(decoded.tokens) == 4


def test_a_held_session_does_not_keep_slots_from_one_that_runs(checkpoint, reference_model):
    loop = make_loop(checkpoint, num_slots=24)
    driver = Driver(loop)
    spec = SamplingSpec(max_new_tokens=14)
    held = driver.open(1, spec, [], no_tree)
    for _ in range(2):
        driver.turn()
    loop.limit((7, 1), 1, 0)
    running = driver.open(2, SamplingSpec(max_new_tokens=20), [], no_tree, prompt=[9])
    while not running.is_over:
        driver.turn()
    assert len(running.tokens) == 20
    loop.limit((7, 1), 1, WITHOUT_LIMIT)
    driver.run()
    assert held.tokens == plain_decode(reference_model, PROMPT, spec).tokens


def test_a_session_does_not_wait_for_one_with_another_beginning(checkpoint):
    loop = make_loop(checkpoint, chunk=2)
    driver = Driver(loop)
    first, second, rest = list(range(20)), list(range(20, 40)), list(range(20))
    spec = SamplingSpec(max_new_tokens=1)
    driver.open(0, spec, [], no_tree, prompt=[*second, 50])
    driver.run()
    driver.open(1, spec, [], no_tree, prompt=[*first, *rest, 50])
    driver.open(2, spec, [], no_tree, prompt=[*second, *rest, 51])
    rounds = loop.rounds_read
    driver.run()
    # Both prompts side by side, at two rows a round.
    assert loop.rounds_read - rounds <= 32


def test_scores_that_are_not_finite_end_their_session_and_leave_no_kv(checkpoint, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loop = make_loop(folder)
    driver = Driver(loop)
    broken = driver.open(1, SamplingSpec(max_new_tokens=4), [], no_tree, prompt=[1, 2, 5, 3, 4])
    other = driver.open(2, SamplingSpec(max_new_tokens=4, allowed_token_ids=(3, 4)), [], no_tree, prompt=[1, 2, 3, 4])
    driver.run()
    fault = broken.results[-1].fault
    assert fault is not None
    assert (fault.code, broken.tokens, len(other.tokens)) == (Code.INTERNAL, [], 4)
    again = driver.open(3, SamplingSpec(max_new_tokens=1), [], no_tree, prompt=[1, 2, 5, 3, 4])
    driver.run()
    assert again.results[-1].fault is not None
    assert again.results[-1].cached_tokens <= 2, "KV of the broken token was remembered"


def test_a_session_that_outgrows_the_cache_says_what_to_raise(checkpoint):
    loop = make_loop(checkpoint, num_slots=10)
    with pytest.raises(SessionFault, match=r"11 tokens given, the KV cache holds 10: raise num_slots, kv_bytes or"):
        loop.open(open_request(1, SamplingSpec(), prompt=[1] * 11))
    driver = Driver(loop)
    decoded = driver.open(1, SamplingSpec(max_new_tokens=50), [], no_tree, prompt=[1] * 8)
    driver.run()
    fault = decoded.results[-1].fault
    assert len(decoded.tokens) == 3
    assert fault is not None
    assert (fault.code, "the KV cache holds 10" in fault.message) == (Code.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("min_new_tokens", [0, 6])
def test_more_stop_tokens_than_the_device_knows_end_the_output_and_are_banned_before(min_new_tokens, tmp_path):
    model = write_llama(tmp_path, seed=3, vocab_size=200, num_hidden_layers=1)
    stops = tuple(range(0, 200, 2))
    spec = SamplingSpec(temperature=1.0, seed=4, stop_token_ids=stops, min_new_tokens=min_new_tokens, max_new_tokens=40)
    plain = plain_decode(model, PROMPT, spec).tokens
    assert len(stops) > MAX_STOPS
    assert min_new_tokens < len(plain) < 40
    driver = Driver(make_loop(tmp_path))
    decoded = driver.open(1, spec, plain, random_tree)
    driver.run()
    assert (decoded.tokens, decoded.finish) == (plain, Finish.STOP)
